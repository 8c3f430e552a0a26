"""The quantizers: one protocol suite for every device, the torch oracle, processes and caches."""
