"""What the pages show, as pure functions from answers of the API to trees of plain values."""
