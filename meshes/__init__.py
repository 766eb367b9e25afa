"""Layouts for `--mesh` and strategies for `--strategy`, in TOML: give one, or copy it and change it."""
