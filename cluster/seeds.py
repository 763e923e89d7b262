"""Seeds of requests that say none. Drawn at the ingress, so that every worker that a request meets
draws the same tokens."""

import os
from random import Random

# Of its own, so that ids tell nothing of seeds. Asking the system for each lets other threads take
# the interpreter, which then has to be waited for; nobody gets anything for guessing one.
_random = Random()
os.register_at_fork(after_in_child=_random.seed)


def draw_seed() -> int:
    return _random.getrandbits(63)
