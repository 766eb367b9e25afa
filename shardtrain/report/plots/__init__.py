"""Plots of runs, plans and schedules; the boundary to matplotlib (extra `plots`)."""
