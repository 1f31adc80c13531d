"""HTTP server: warm engines for every program on the machine, with OpenAI's API, the cache's own, and a page."""
