"""Checkpoints as people really have them: for each kind a small fixture, and what the view makes of it."""
