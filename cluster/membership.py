"""Who exists, as Ray Serve says: the replicas of every pool, with what each published of itself.

Serve's router thread publishes; whoever subscribes is called on that thread. One per process,
since Serve copies the class that publishes, with its module, into every process that routes.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

# Replica ids, and what `record_replica_metadata` of each returned.
Replicas = Mapping[str, Mapping[str, Any]]
Listener = Callable[[str, Replicas], None]


class Membership:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, Replicas] = {}
        self._listeners: list[Listener] = []

    def publish(self, pool: str, replicas: Replicas) -> None:
        with self._lock:
            self._pools[pool] = dict(replicas)
            for listener in self._listeners:
                listener(pool, self._pools[pool])

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Called at once with what is known, then with every change, and never again after the
        function that is returned was called. It must not block, nor publish."""
        with self._lock:
            self._listeners.append(listener)
            for pool, replicas in self._pools.items():
                listener(pool, replicas)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe


MEMBERSHIP = Membership()
