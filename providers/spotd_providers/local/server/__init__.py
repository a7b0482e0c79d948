"""The local market as a server of its own process, so that its machines and books live on when the daemon dies."""
