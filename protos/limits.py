"""What every message of the wire keeps to."""

PROTOCOL = 2
MAX_MESSAGE_BYTES = 4 << 20
# What is split stays below this, which leaves room for what surrounds a part.
PART_BYTES = 2 << 20
MAX_WORDS_CHARS = 1000
# In a session's initial metadata: whoever may open one is told so before anything is read.
SESSION_OPEN = ("kvrelay-session", "open")


def shortened(words: str) -> str:
    """Of what a peer says in words, as much as may go into logs and answers."""
    return words[:MAX_WORDS_CHARS]
