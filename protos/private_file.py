"""Files of secrets: read only where nobody else may."""

import os
import stat
from pathlib import Path

from protos.errors import PlaneError


def read_private_file(field: str, path: Path, max_bytes: int) -> bytes:
    """At most so much of it. Refuses, naming the field, a file that anyone but its owner may
    touch."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PlaneError(field, f"{path} is no regular file")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise PlaneError(
                    field, f"{path} is open to others (mode {mode:04o}); chmod 600 closes it"
                )
            return file.read(max_bytes)
    except OSError as error:
        raise PlaneError(field, f"{path} cannot be read: {error.strerror}") from error
