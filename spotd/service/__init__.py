"""One process put together: composition, configuration, socket, systemd, signals."""
