"""The boundary to the operating system: files, locks, signals, standard streams, the terminal. No jax."""
