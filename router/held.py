"""The keys of one worker's blocks, and their digest. Pure."""

from collections.abc import Iterable

from kv_cache.events import DIGEST_MODULUS, Cleared, KvEvent, Removed, Stored, name_digest
from router.ask import KEY_MASK

# Additions that there should be room for in a new table, for each key in it.
SPARE_SHARE = 0.1


class BadEvents(Exception):
    """A worker told what cannot be: its events are of no use until a snapshot has come."""


class Held:
    """What events of one group of layers say is there. Knows no order and no numbers.

    A dict and not a set, since the garbage collector looks at every entry of every set it finds:
    a long halt for millions. It never looks at a dict of numbers and None.
    """

    def __init__(self, group: int) -> None:
        self.digest = 0
        self.keys: dict[int, None] = {}
        self._group = group
        self._room = 0  # additions until there is a new table

    def __len__(self) -> int:
        return len(self.keys)

    def apply(self, events: Iterable[KvEvent], num_groups: int) -> list[int]:
        """The keys that were stored. What was there already, or was not there to be removed, does
        not change the digest, which then is not the worker's. BadEvents may come halfway."""
        group, stored = self._group, list[int]()
        for event in events:
            if isinstance(event, Cleared):
                self.clear()
            elif event.group != group:
                _check_group(event, num_groups)
            elif isinstance(event, Stored):
                stored.append(self._add(event))
            else:
                self._remove(event)
        self._room -= len(stored)
        if self._room < 0:
            self._renew()
        return stored

    def load(self, stored: Iterable[Stored], num_groups: int) -> None:
        """A part of a snapshot. Two names that have one key count twice in its digest."""
        for event in stored:
            if event.group == self._group:
                before = self.digest
                self._add(event)
                self.digest = (before + name_digest(event.name)) % DIGEST_MODULUS
            else:
                _check_group(event, num_groups)

    def clear(self) -> None:
        self.digest = 0
        self.keys = {}

    def _add(self, event: Stored) -> int:
        value = name_digest(event.name)
        key = value & KEY_MASK
        if key not in self.keys:
            self.keys[key] = None
            self.digest = (self.digest + value) % DIGEST_MODULUS
        return key

    def _remove(self, event: Removed) -> None:
        value = name_digest(event.name)
        key = value & KEY_MASK
        if key in self.keys:
            del self.keys[key]
            self.digest = (self.digest - value) % DIGEST_MODULUS

    def _renew(self) -> None:
        """A dict does not use the place of a removed key again. Full, it makes itself a table of
        three to six slots a key; a copy has one and a half to three, or as many as the next one
        that has room to spare: at most 98 bytes a key, with the key's own 32."""
        renewed: dict[int, None] = {}
        renewed.update(self.keys)
        self.keys = renewed
        num_slots = 1 << (3 * len(renewed) // 2).bit_length()
        self._room = 2 * num_slots // 3 - len(renewed)
        if self._room < SPARE_SHARE * len(renewed):
            self._room = 4 * num_slots // 3 - len(renewed)


def _check_group(event: Stored | Removed, num_groups: int) -> None:
    if event.group >= num_groups:
        raise BadEvents(f"group: {event.group}, there are {num_groups}")
