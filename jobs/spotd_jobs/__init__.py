"""Jobs, from the file a user writes to the bytes a host writes: spec, wire formats, object stores, runner."""
