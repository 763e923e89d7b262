"""What can go wrong with a server under load, beside what it says itself."""

from engine.errors import EngineError


class ProtocolError(EngineError):
    """The server sent what is no HTTP, no event stream or no completion."""


class BrokenAnswerError(EngineError):
    """The connection ended before the answer did."""
