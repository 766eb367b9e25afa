"""Checkpoints: saved in the background, proven whole, restored onto any layout."""
