"""What is drawn for requests: their ids, and the seeds of those that say none. At the ingress, so
that every worker that a request meets draws the same tokens."""

import os
from random import Random

# Two, so that ids tell nothing of seeds. Asking the system for each lets other threads take the
# interpreter, which then has to be waited for; nobody gets anything for guessing one.
_ids, _seeds = Random(), Random()
for _random in (_ids, _seeds):
    os.register_at_fork(after_in_child=_random.seed)


def new_request_id() -> str:
    return f"{_ids.getrandbits(128):032x}"


def draw_seed() -> int:
    return _seeds.getrandbits(63)
