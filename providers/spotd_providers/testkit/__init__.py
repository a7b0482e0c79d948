"""What a provider must do, as behaviours anybody can run against their own; and the tools to build a fake cloud."""
