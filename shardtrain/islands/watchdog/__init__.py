"""Find ranks that hang or are slow, and end the run with a diagnosis."""
