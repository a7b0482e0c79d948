"""When a job may run, apart from its price: windows, other jobs that come first, arrays, and priorities."""
