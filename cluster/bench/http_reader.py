"""An HTTP/1.1 response, read from bytes as they come. No I/O and no clock.

One of our own since a library's costs more than the rest of reading an answer: a stream is
thousands of chunks a second, and each passes here once.
"""

from enum import Enum, auto

from cluster.bench.errors import BrokenAnswerError, ProtocolError

MAX_HEAD_BYTES = 64 << 10
_WITHOUT_BODY = (204, 304)
_MOST_DIGITS = 20


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()  # so many bytes, then the end
    UNTIL_CLOSED = auto()
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    COMPLETE = auto()


class ResponseReader:
    """Reads one response; what follows it is an error, since nothing else was asked for."""

    def __init__(self) -> None:
        self.status = 0  # until the head is there
        self.headers: dict[str, str] = {}  # names in lower case
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0

    @property
    def complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """What these bytes have of the body."""
        self._buffer = self._buffer + data if self._buffer else data
        while self._state is _State.HEAD:
            if not self._read_head():
                return b""
        match self._state:
            case _State.LENGTH:
                return self._sized()
            case _State.UNTIL_CLOSED:
                body, self._buffer = self._buffer, b""
                return body
            case _State.COMPLETE:
                self._expect_nothing()
                return b""
        return self._chunked()

    def end(self) -> None:
        """The connection was closed."""
        if self._state is _State.UNTIL_CLOSED:
            self._state = _State.COMPLETE
            self.headers["connection"] = "close"
        elif not self.complete:
            raise BrokenAnswerError("the connection was closed before the end of the answer")

    def _read_head(self) -> bool:
        """False if it is not whole yet. An interim response (1xx) is read and forgotten."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError("the head of the response does not end")
            return False
        lines = head.decode("latin-1").split("\r\n")
        self.status = _status(lines[0])
        self.headers = dict(_header(line) for line in lines[1:])
        self._buffer = rest
        if self.status >= 200:
            self._state = self._body_state()
        return True

    def _body_state(self) -> _State:
        if self.status in _WITHOUT_BODY:
            return _State.COMPLETE
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return _State.CHUNK_SIZE
        if "content-length" not in self.headers:
            return _State.UNTIL_CLOSED
        length = self.headers["content-length"]
        if not (length.isascii() and length.isdigit() and len(length) < _MOST_DIGITS):
            raise ProtocolError(f"content-length: {length[:80]!r}")
        self._left = int(length)
        return _State.LENGTH if self._left else _State.COMPLETE

    def _sized(self) -> bytes:
        body, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        self._left -= len(body)
        if not self._left:
            self._state = _State.COMPLETE
            self._expect_nothing()
        return body

    def _chunked(self) -> bytes:
        buffer, at = self._buffer, 0
        parts = []
        while at < len(buffer) and self._state is not _State.COMPLETE:
            if self._state is _State.CHUNK:
                part = buffer[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._state = _State.CHUNK_END
                continue
            end = buffer.find(b"\r\n", at)
            if end < 0:
                if len(buffer) - at > MAX_HEAD_BYTES:
                    raise ProtocolError("the line before a chunk does not end")
                break
            self._read_line(buffer[at:end])
            at = end + 2
        self._buffer = buffer[at:]
        if self.complete:
            self._expect_nothing()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_line(self, line: bytes) -> None:
        """One of those around chunks."""
        match self._state:
            case _State.CHUNK_SIZE:
                size = line.partition(b";")[0].strip()
                try:
                    self._left = int(size, 16) if size.isalnum() else -1
                except ValueError:
                    self._left = -1
                if self._left < 0:
                    raise ProtocolError(f"a chunk's size: {size[:20]!r}")
                self._state = _State.CHUNK if self._left else _State.TRAILER
            case _State.CHUNK_END:
                if line:
                    raise ProtocolError("a chunk is longer than it said")
                self._state = _State.CHUNK_SIZE
            case _State.TRAILER:
                if not line:
                    self._state = _State.COMPLETE

    def _expect_nothing(self) -> None:
        if self._buffer:
            raise ProtocolError("something follows the response")


def _status(line: str) -> int:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
        raise ProtocolError(f"a status line: {line[:80]!r}")
    return int(code)


def _header(line: str) -> tuple[str, str]:
    name, found, value = line.partition(":")
    if not found:
        raise ProtocolError(f"a header: {line[:80]!r}")
    return name.strip().lower(), value.strip()
