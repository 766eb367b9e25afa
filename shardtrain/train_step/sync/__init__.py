"""How islands synchronise: in every step, after local steps, or in waves; one file each, and the barriers."""
