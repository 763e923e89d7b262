"""Random lives of sequences: nothing computed from a wrong key, no block without its owner."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv_cache.world import CHUNK, GROUPS, Running, World

# Texts with a common beginning, so that prompts share, branch and end inside blocks.
TEXTS = [list(range(9)) + [100 * i + j for j in range(30)] for i in range(5)]
prompts = st.builds(
    lambda text, length: TEXTS[text][:length],
    st.integers(0, len(TEXTS) - 1),
    st.integers(1, 30) | st.sampled_from([8, 12, 16, 20, 24]),
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        num_blocks=st.integers(6, 24),
        eviction=st.sampled_from(["lru", "priority", "frequency"]),
        watermark=st.sampled_from([0.0, 0.2]),
        max_events=st.sampled_from([3, 1000]),
    )
    def set_up(
        self, groups: str, num_blocks: int, eviction: str, watermark: float, max_events: int
    ) -> None:
        self.world = World(GROUPS[groups], num_blocks, eviction, watermark, max_events)

    def pick(self, data: st.DataObject, incoming: bool = False) -> Running:
        return data.draw(
            st.sampled_from([s for s in self.world.running if bool(s.incoming) == incoming])
        )

    def has_running(self) -> bool:
        return any(not s.incoming for s in self.world.running)

    def has_incoming(self) -> bool:
        return any(s.incoming for s in self.world.running)

    @rule(tokens=prompts, priority=st.integers(-2, 2))
    def admit(self, tokens: list[int], priority: int) -> None:
        before = self.world.cache.stats()
        sequence = self.world.admit(tokens, priority)
        if sequence is None and not any(g.held for g in before.groups):
            blocked = any(g.quarantined for g in before.groups)
            assert blocked or not self.world.cache.ever_fits(len(tokens))

    @precondition(has_running)
    @rule(data=st.data(), count=st.integers(1, CHUNK), token=st.integers(0, 1))
    def step(self, data: st.DataObject, count: int, token: int) -> None:
        sequence = self.pick(data)
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = min(count, len(sequence.tokens) - sequence.num_computed)
        if not self.world.compute(sequence, count):
            self.world.release(sequence)

    @precondition(has_running)
    @rule(data=st.data())
    def finish_prompt(self, data: st.DataObject) -> None:
        self.world.finish_prompt(self.pick(data))

    @rule(tokens=prompts, priority=st.integers(-2, 2))
    def serve(self, tokens: list[int], priority: int) -> None:
        """A whole life at once, so that caches fill and blocks are evicted."""
        sequence = self.world.admit(tokens, priority)
        if sequence is not None and self.world.finish_prompt(sequence):
            self.world.release(sequence)

    @precondition(has_running)
    @rule(data=st.data(), answers=st.lists(st.integers(0, 1), min_size=2, max_size=3))
    def answer_twice(self, data: st.DataObject, answers: list[int]) -> None:
        """Siblings that share a partial block write to it, perhaps the same token."""
        first = self.pick(data)
        if not self.world.finish_prompt(first):
            return
        siblings = [first] + [self.world.fork(first) for _ in answers[1:]]
        for sequence, token in zip(siblings, answers, strict=True):
            sequence.tokens += [token] * 5
            self.world.finish_prompt(sequence)

    @precondition(has_running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.world.fork(self.pick(data))

    @precondition(has_running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self.pick(data))

    @rule(tokens=prompts)
    def receive(self, tokens: list[int]) -> None:
        self.world.receive(tokens)

    @precondition(has_incoming)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.world.commit(self.pick(data, incoming=True))

    @precondition(has_incoming)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(self.pick(data, incoming=True))

    @rule()
    def late_writes(self) -> None:
        self.world.late_writes()

    @precondition(lambda self: self.world.stuck)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.world.stuck))
        self.world.stuck.remove(hold)
        self.world.cache.transfers.end_quarantine(hold)

    @rule(data=st.data(), group=st.integers(0, 3))
    def send(self, data: st.DataObject, group: int) -> None:
        group %= len(self.world.groups)
        pool = self.world.cache._pools[group]
        blocks = [b for b in range(1, pool.num_blocks) if pool.labels[b] is not None]
        blocks += [b for s in self.world.running for b in s.blocks.tables[group] if b]
        if blocks:
            chosen = st.lists(st.sampled_from(blocks), min_size=1, max_size=4, unique=True)
            self.world.send(group, data.draw(chosen))

    @precondition(lambda self: self.world.held)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.world.held))
        self.world.held.remove(held)
        self.world.cache.transfers.drop(held[0])

    @rule(tokens=prompts)
    def forget(self, tokens: list[int]) -> None:
        """What is found of it afterwards is what some sequence holds."""
        self.world.forget(tokens)

    @rule()
    def reset(self) -> None:
        self.world.cache.reset()
        assert all(g.cached == 0 for g in self.world.cache.stats().groups)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for sequence in list(world.running):
            world.abort(sequence)
        for hold in world.stuck:
            world.cache.transfers.end_quarantine(hold)
        for hold, _ in world.held:
            world.cache.transfers.drop(hold)
        world.stuck, world.held = [], []
        world.check()
        assert all(g.free + g.cached == g.total for g in world.cache.stats().groups)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.filter_too_much],
)
