"""Checkpoints: saved in the background, verified by checksums, restored onto any layout."""
