"""Code for a job that its caller is done with at once, and a worker when it is let."""

import ctypes
from threading import Event, current_thread

from engine.kernels.cpu.team import C_FUNCTION


class SlowWorkers:
    def __init__(self) -> None:
        self.go_on = Event()
        self.jobs: list[int] = []  # the address of each, as a worker began it
        self._has_begun = Event()
        self._function = C_FUNCTION(self._run)

    @property
    def code(self) -> int:
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        return address

    def _run(self, job: int) -> None:
        if current_thread().name.startswith("kernels-"):
            self.jobs.append(job)
            self._has_begun.set()
            self.go_on.wait()
        else:
            self._has_begun.wait()
