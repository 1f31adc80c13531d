"""The tier in memory: prefix tree, pins, eviction. Knows no disk."""
