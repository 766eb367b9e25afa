"""Error messages, checks of field types, exceptions of user code, exit codes. No jax."""
