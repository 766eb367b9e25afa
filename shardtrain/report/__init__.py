"""What a user reads of a run: metrics, progress, tables, plots and timelines."""
