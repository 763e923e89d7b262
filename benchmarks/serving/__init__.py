"""A whole cluster through HTTP, beside the peers': how each is started, asked, and compared."""
