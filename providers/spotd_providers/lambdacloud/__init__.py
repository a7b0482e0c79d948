"""Lambda Cloud: on-demand virtual machines at list price."""
