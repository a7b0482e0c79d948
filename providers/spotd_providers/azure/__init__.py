"""Azure: Spot and on-demand virtual machines, by the Resource Manager API."""
