"""Questions over retrieved passages, by their order, by reuse and by its repair: `agentcache bench rag`."""
