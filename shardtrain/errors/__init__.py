"""How mistakes are found and reported: messages, field types, exit codes. No jax."""
