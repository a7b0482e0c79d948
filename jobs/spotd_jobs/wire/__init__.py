"""What daemon and hosts write for each other in the store, as strict models for the daemon's side."""
