"""Measures of the engine beside its peers and the machine's limits; not installed."""
