"""What is stored under which name, in every group: the prefix tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_cache.config import first_visible
from kv_cache.events import DIGEST_MODULUS, EventLog, Stored, name_digest
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName
from kv_cache.pool import BlockPool


@dataclass(slots=True, eq=False)
class Node:
    """A named block; `blocks` has its number in each group's pool, 0 where its blob is gone."""

    name: BlockName
    parent: BlockName | None
    blocks: list[int]
    children: set[BlockName] | None = None  # in a prefix-closed tree


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has of a prompt; valid until something is evicted.

    `num_tokens` of them need not be computed, at most one less than the prompt has.
    `num_cached` are in the cache: one more than `num_tokens` if the whole prompt is, whose
    last token is then computed again but not written.
    """

    names: Sequence[BlockName]  # the first `num_blocks` of them are the hit
    num_blocks: int
    num_tokens: int
    num_cached: int
    firsts: tuple[int, ...]  # of each group, the first block that the hit needs
    epoch: int


class PrefixTree:
    """Finds, adds and evicts named blocks; which sequence holds them is not its business.

    A name implies its whole prefix, so a dict of names is the tree. With a full-attention
    group it is prefix-closed: every node has a blob in all full-attention groups, a parent
    (or is a first block), and what a sequence holds of it, it holds with all ancestors. So
    look-ups may gallop, and giving up a full-attention blob gives up the node with all its
    blobs and all its descendants, of which usually there are none: leaves go first. (A
    transfer holds blocks without their ancestors; a descendant that it holds loses its name
    and is freed with the transfer.) Window blobs come and go one by one.
    """

    def __init__(
        self,
        groups: Sequence[KvGroup],
        block_size: int,
        pools: Sequence[BlockPool[Node]],
        events: EventLog,
    ) -> None:
        self.num_evicted = [0] * len(groups)  # blobs, since the start
        self._windows = [(g, group.window) for g, group in enumerate(groups)]
        self._sliding = [(g, window) for g, window in self._windows if window is not None]
        self._prefix_closed = len(self._sliding) < len(groups)
        self._block_size = block_size
        self._pools = pools
        self._events = events
        self._nodes: dict[BlockName, Node] = {}
        self._epoch = 0  # grows when something is forgotten

    def __contains__(self, name: BlockName) -> bool:
        return name in self._nodes

    def match(self, names: Sequence[BlockName], num_tokens: int) -> Match:
        """The longest hit for a prompt of `num_tokens` whose full blocks have `names`."""
        depth = min(len(names), num_tokens // self._block_size)
        if self._prefix_closed:
            depth = self._closed_depth(names, depth)
        if self._sliding:
            depth = self._window_depth(names, depth, num_tokens)
        num_cached = depth * self._block_size
        start = min(num_cached, num_tokens - 1)
        firsts = tuple(first_visible(start, w, self._block_size) for _, w in self._windows)
        return Match(names, depth, start, num_cached, firsts, self._epoch)

    def _closed_depth(self, names: Sequence[BlockName], limit: int) -> int:
        """How many leading names are in a prefix-closed tree."""
        nodes = self._nodes
        low, step = 0, 1
        while low + step <= limit and names[low + step - 1] in nodes:
            low += step
            step *= 2
        high = min(low + step, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if names[middle - 1] in nodes:
                low = middle
            else:
                high = middle
        return low

    def _window_depth(self, names: Sequence[BlockName], depth: int, num_tokens: int) -> int:
        """The deepest hit, of at most `depth` blocks, whose visible window blobs are all there.

        A blob missing from what depth d sees is missing from all that see it: those down to
        its own index. What was found on the way down stays valid, so nothing is looked up
        twice for one group.
        """
        found_from = [depth] * len(self._sliding)
        while depth:
            start = min(depth * self._block_size, num_tokens - 1)
            for i, (group, window) in enumerate(self._sliding):
                first = first_visible(start, window, self._block_size)
                index = min(found_from[i], depth)
                while index > first and self._has(names[index - 1], group):
                    index -= 1
                found_from[i] = index
                if index > first:
                    depth = index - 1
                    break
            else:
                return depth
        return 0

    def _has(self, name: BlockName, group: int) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.blocks[group] != 0

    def num_idle(self, match: Match) -> list[int]:
        """How many blocks of the hit nobody holds, in each group."""
        return [
            sum(
                pool.is_cached(self._nodes[match.names[i]].blocks[g])
                for i in range(match.firsts[g], match.num_blocks)
            )
            for g, pool in enumerate(self._pools)
        ]

    def pin(self, match: Match, priority: int) -> tuple[list[int], ...]:
        """One more sequence holds the hit; its tables, 0 where it sees nothing."""
        assert match.epoch == self._epoch, "something was evicted since the match"
        tables = []
        for g, pool in enumerate(self._pools):
            table = [0] * match.firsts[g]
            for i in range(match.firsts[g], match.num_blocks):
                block = self._nodes[match.names[i]].blocks[g]
                pool.touch(block, priority)
                table.append(block)
            tables.append(table)
        return tuple(tables)

    def insert(
        self, name: BlockName, parent: BlockName | None, blocks: Sequence[int], priority: int
    ) -> list[int]:
        """Names the blocks (0 for none) of a sequence that holds them and all their ancestors.

        Returns the blocks which the sequence holds now: where the name has another block
        already, that one wins and the sequence's own is released. So equal blocks are kept
        once, and a sequence that holds a node holds the ancestors which the tree knows.
        """
        if not any(blocks):
            return list(blocks)
        node = self._nodes.get(name) or self._add_node(name, parent)
        return [self._place(node, g, block, priority) for g, block in enumerate(blocks)]

    def _add_node(self, name: BlockName, parent: BlockName | None) -> Node:
        node = self._nodes[name] = Node(name, parent, [0] * len(self._pools))
        if self._prefix_closed and parent is not None:
            above = self._nodes[parent]
            if above.children is None:
                above.children = set()
            above.children.add(name)
        return node

    def _place(self, node: Node, group: int, block: int, priority: int) -> int:
        pool, stored = self._pools[group], node.blocks[group]
        if not block:
            return 0
        if not stored:
            pool.label(block, node, priority)
            node.blocks[group] = block
            self._events.stored(node.name, node.parent, group)
            return block
        if stored != block:
            pool.touch(stored, priority)
            pool.release(block)
        return stored

    def evict(self, group: int) -> None:
        """Gives up the group's next cached block (there must be one) and what needs it."""
        block = self._pools[group].victim()
        assert block is not None, f"group {group} has nothing to evict"
        node = self._pools[group].labels[block]
        assert node is not None, f"cached block {block} of group {group} has no node"
        self._give_up(node, group)

    def forget(self, names: Sequence[BlockName]) -> None:
        """Gives up what no sequence holds of a prefix, and what needs it."""
        for name in names:
            for group, pool in enumerate(self._pools):
                node = self._nodes.get(name)
                if node is None:  # given up with another group's blob, or never there
                    break
                if node.blocks[group] and not pool.is_in_use(node.blocks[group]):
                    self._give_up(node, group)

    def _give_up(self, node: Node, group: int) -> None:
        if (group, None) in self._windows:
            for gone in self._descendants_first(node):
                for g, other in enumerate(gone.blocks):
                    if other:
                        self._evict_blob(gone, g)
        else:
            self._evict_blob(node, group)

    def _evict_blob(self, node: Node, group: int) -> None:
        self.num_evicted[group] += 1
        self._events.removed(node.name, group)
        self._forget(node, group)

    def _descendants_first(self, node: Node) -> list[Node]:
        """The node and all below it, every child before its parent."""
        found = [node]
        for above in found:
            found.extend(self._nodes[name] for name in above.children or ())
        return found[::-1]

    def _forget(self, node: Node, group: int) -> None:
        self._epoch += 1
        self._pools[group].remove(node.blocks[group])
        node.blocks[group] = 0
        if any(node.blocks):
            return
        del self._nodes[node.name]
        if self._prefix_closed and node.parent is not None:
            children = self._nodes[node.parent].children
            assert children is not None, "a parent that does not know its child"
            children.remove(node.name)

    def clear(self) -> None:
        """Forgets all that nobody holds; what is left is told anew."""
        for group, pool in enumerate(self._pools):
            while pool.victim() is not None:
                self.evict(group)
        self._events.cleared()
        for stored in self.stored():
            self._events.stored(stored.name, stored.parent, stored.group)

    def stored(self) -> Iterator[Stored]:
        """Every blob there is, parents before children where the tree is prefix-closed."""
        for node in self._nodes.values():
            for group, block in enumerate(node.blocks):
                if block:
                    yield Stored(node.name, node.parent, group)

    def check_integrity(self) -> None:
        """Asserts that nodes and labels agree and that prefixes are closed."""
        labels = [0] * len(self._pools)
        for name, node in self._nodes.items():
            assert name == node.name, "a node under another's name"
            assert any(node.blocks), "a node without blobs"
            for g, block in enumerate(node.blocks):
                labels[g] += block != 0
                assert not block or self._pools[g].labels[block] is node, "not the node's block"
                assert block or not self._prefix_closed or self._windows[g][1], "not closed"
            if self._prefix_closed and node.parent is not None:
                assert name in (self._nodes[node.parent].children or ()), "an orphan"
            for child in node.children or ():
                assert self._nodes[child].parent == name, "a foster child"
        for pool, count in zip(self._pools, labels, strict=True):
            assert sum(label is not None for label in pool.labels) == count, "a stray label"
        digests = [0] * len(self._pools)
        for name, _, group in self.stored():
            digests[group] += name_digest(name)
        assert self._events.digests == tuple(d % DIGEST_MODULUS for d in digests)
