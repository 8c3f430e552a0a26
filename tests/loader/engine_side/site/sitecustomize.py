"""Runs at the start of every Python process that has this folder in PYTHONPATH, an engine's own children included."""

import torchvision_on_cpu

torchvision_on_cpu.install()
