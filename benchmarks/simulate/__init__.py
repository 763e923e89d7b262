"""Routing at scale: the router's own code against modelled workers, in simulated time."""
