"""The load generator: what is asked, who asks it, and what came of it."""
