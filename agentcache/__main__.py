"""`python -m agentcache`: the same as the command. Knows nothing else."""

from agentcache_llm import main

if __name__ == "__main__":
    main()
