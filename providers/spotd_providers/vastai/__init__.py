"""vast.ai: a marketplace of untrusted hosts, rented on-demand or by bid."""
