"""Which workers serve a request."""
