"""In a process of its own: what is left out here would stay left out for other tests."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from cluster.garbage import leave_out_what_stays

class Thing:
    pass

stays, goes = Thing(), Thing()
goes.itself = goes
gone = weakref.ref(goes)
del goes
gc.disable()
leave_out_what_stays()
assert gone() is None
assert all(thing is not stays for thing in gc.get_objects())
gc.enable()
looks = []
gc.callbacks.append(lambda phase, about: looks.append(phase))
many = [[] for _ in range(20_000)]
assert not looks
more = [[] for _ in range(100_000)]
assert looks
"""


def test_what_is_garbage_goes_and_what_stays_is_not_looked_at_again_nor_what_is_new_often() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
