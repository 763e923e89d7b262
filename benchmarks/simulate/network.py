"""Transfers between workers: every worker sends one at a time, and receives one at a time."""

from collections import defaultdict

from router.workers import LinkSpeed


class Network:
    """Full duplex, all links equal. A transfer waits for its sender and for its receiver."""

    def __init__(self, link: LinkSpeed) -> None:
        self._link = link
        self._sending_until: defaultdict[int, float] = defaultdict(float)
        self._receiving_until: defaultdict[int, float] = defaultdict(float)
        self.num_bytes = 0

    def send(self, sender: int, receiver: int, num_bytes: int, now: float) -> float:
        """When the last byte is there. Workers are known by their incarnations."""
        start = max(now, self._sending_until[sender], self._receiving_until[receiver])
        end = start + num_bytes / self._link.bytes_per_s
        self._sending_until[sender] = self._receiving_until[receiver] = end
        self.num_bytes += num_bytes
        return end + self._link.latency_s
