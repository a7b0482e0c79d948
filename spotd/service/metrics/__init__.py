"""The figures of a running daemon for Prometheus. Imported only where `[metrics] listen` is set."""
