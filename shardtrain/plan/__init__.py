"""Predict memory, time and communication of a step before it runs, and search the best layout."""
