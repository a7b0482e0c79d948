"""Google Cloud: Spot and on-demand virtual machines with GPUs."""
