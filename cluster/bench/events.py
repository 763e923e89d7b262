"""Server-sent events, read from bytes as they come. No I/O and no clock."""


class EventReader:
    """Gives the data of each event; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in these bytes."""
        buffer = self._buffer + data if self._buffer else data
        if b"\r" in buffer:
            # A line end that is cut in two waits for its second half.
            tail = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *frames, self._buffer = buffer.split(b"\n\n")
        return [event for frame in frames if (event := _data(frame)) is not None]


def _data(frame: bytes) -> bytes | None:
    if frame.startswith(b"data: ") and b"\n" not in frame:
        return frame[6:]
    lines = [
        line[5:].removeprefix(b" ") for line in frame.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
