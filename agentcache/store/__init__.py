"""Cached pages: in memory, on disk, and their administration. Knows no models."""
