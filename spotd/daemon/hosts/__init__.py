"""What hosts write to the object store: reading it, liveness, transfers, flood limits."""
