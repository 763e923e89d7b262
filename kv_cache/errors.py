"""What is raised on purpose when a cache is set up wrongly."""


class CacheError(ValueError):
    """A cache that cannot exist; the message names the field and what would be right."""
