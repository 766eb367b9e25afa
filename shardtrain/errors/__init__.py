"""Build error messages, check field types, report exceptions of user code, define exit codes. No jax."""
