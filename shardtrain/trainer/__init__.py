"""Train a run: its options, set-up, agreement, restore, loop and end."""
