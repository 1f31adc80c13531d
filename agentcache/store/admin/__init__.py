"""Administration of a store on disk: check, rebuild, prune, archives. Knows no requests."""
