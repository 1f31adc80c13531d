"""Approximate reuse: text that stood at other positions before, found, attached with its stored keys and values, repaired and watched.

It answers the core's calls (agentcache/attached_ranges.py); the core imports nothing of it, but for the engine of a caller who consents.
"""
