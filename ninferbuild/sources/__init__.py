"""Sources: what parameters are read from."""
