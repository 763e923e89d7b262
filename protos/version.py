"""Which kvrelay this is."""

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("kvrelay")
    except metadata.PackageNotFoundError:
        return "not installed"
