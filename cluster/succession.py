"""Which workers an ingress keeps while Serve replaces one release by another.

Serve stops the workers of the old model as soon as those of the new one are there, and the old
ingresses later, when their own successors are there. In between, and until its last answer, an old
ingress has none but workers that are being stopped: these stay for it.
"""

from cluster.membership import Replicas
from router.workers import Leg

SUCCESSION_S = 120.0  # that a worker waits at most for ingresses which know no other


class Succession:
    """Of one ingress, for its release."""

    def __init__(self, release: str) -> None:
        self._release = release
        self._last: dict[Leg, Replicas] = {leg: {} for leg in Leg}

    def update(self, leg: Leg, replicas: Replicas) -> Replicas:
        """What the pool is to be told: once no worker of the release is left there, the last ones,
        until another one comes."""
        ours = {
            replica: metadata
            for replica, metadata in replicas.items()
            if metadata.get("release") == self._release
        }
        self._last[leg] = ours or self._last[leg]
        return self._last[leg]
