"""How long to wait before a worker is asked for a snapshot once more. Pure."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
# After so long without trouble the next trouble is a new one.
CALM_S = 60.0


class Patience:
    """The first time not at all; then twice as long each time, since a worker whose events never
    add up would else be asked for all it holds without end."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._troubled: float | None = None
        self._until = 0.0

    def note_trouble(self, now: float) -> None:
        if self._troubled is None or now - self._troubled > CALM_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._troubled = now
        self._until = now + self._pause_s

    def is_over(self, now: float) -> bool:
        return now >= self._until
