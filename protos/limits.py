"""What every message of the wire keeps to."""

PROTOCOL = 1
MAX_MESSAGE_BYTES = 4 << 20
# What is split stays below this, which leaves room for what surrounds a part.
PART_BYTES = 2 << 20
