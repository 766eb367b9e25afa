"""Find ranks that hang or are slow, and end a hanging run with a diagnosis."""
