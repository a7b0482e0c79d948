"""Marketplace adapters of spotd: the contract, the kit they share, the bundled providers and the test kit."""
