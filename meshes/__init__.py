"""Layouts in TOML, values only: give one to `--mesh`, or copy one and change it."""
