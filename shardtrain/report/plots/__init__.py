"""Pictures of a run and of schedules; the boundary to matplotlib (extra `plots`)."""
