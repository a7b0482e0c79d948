"""Which offers fit a job, best first: speed, remaining work, expected cost, ceilings."""
