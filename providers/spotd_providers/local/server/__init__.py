"""The local market as a server of its own process, so that its machines and ledger outlive the daemon."""
