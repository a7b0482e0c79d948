"""Object stores: where checkpoints, logs and grants meet. `api` is the contract, the rest implement it."""
