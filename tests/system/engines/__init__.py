"""Real engines on loopback: what a test starts, and ends."""
