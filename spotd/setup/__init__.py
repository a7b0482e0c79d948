"""The way from an installed package to a configured service: `spotd install-service` and `spotctl init`."""
