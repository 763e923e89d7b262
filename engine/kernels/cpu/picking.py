"""Some rows of a matrix, in an order that is given."""

from typing import Any

from engine.kernels.cpu.memory import claim, copy, int64_at, word

WORDS = "7q"


def pick_rows(job: Any) -> None:
    """Pieces are rows of the result."""
    x, x_row, numbers = word(job, 0), word(job, 1), word(job, 2)
    out, row_bytes, rows, together = word(job, 3), word(job, 4), word(job, 5), word(job, 6)
    while True:
        first = claim(job, together)
        if first >= rows:
            return
        for row in range(first, min(first + together, rows)):
            source = x + int64_at(numbers + row * 8) * x_row
            copy(out + row * row_bytes, source, row_bytes)
