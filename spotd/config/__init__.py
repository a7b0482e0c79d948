"""The daemon's configuration: one TOML file, checked whole, every refusal with file, line, key and a way out."""
