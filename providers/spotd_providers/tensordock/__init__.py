"""TensorDock: on-demand virtual machines whose price has parts."""
