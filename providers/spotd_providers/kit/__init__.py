"""Tools that adapters share: one door each for HTTP, retries, pacing and threads."""
