"""The command `agentcache`: one module for each kind of verb. Knows how to print, nothing else."""
