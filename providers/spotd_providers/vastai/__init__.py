"""vast.ai: a marketplace of strangers' computers, rented on-demand or by bid."""
