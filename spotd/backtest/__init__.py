"""Back-tests: recorded prices and preemptions, run through the core that decides in production."""
