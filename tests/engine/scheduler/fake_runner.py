"""A runner without a model: it checks every cached token that a query would see.

A cell of the fake cache holds the digest of the tokens up to its position, which is what a
real key depends on. The token drawn is a function of the digest, the seed and the choice.
"""

from dataclasses import dataclass, field

from engine.step import NOT_FINITE, Sample, StepPlan, StepResult, TokenLogprobs
from kv_cache.layout import KvGroup

VOCAB = 50
TOLD = "told to fail"
Cell = int | None


EMPTY = 7  # the digest of no tokens


def digest(tokens: list[int], value: int = EMPTY) -> int:
    """`value`: the digest of what comes before them."""
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value


def draw(digested: int, seed: int, choice: int) -> int:
    return (digested ^ (seed * 31 + choice * 17)) % VOCAB


def answer(prompt: list[int], seed: int, choice: int, num_tokens: int) -> list[int]:
    """What an undisturbed run says."""
    tokens: list[int] = []
    value = digest(prompt)
    for _ in range(num_tokens):
        tokens.append(draw(value, seed, choice))
        value = digest(tokens[-1:], value)
    return tokens


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    seed: int
    choice: int
    tables: list[list[int]]
    digests: list[int] = field(default_factory=list)  # up to each of the first tokens

    def digest_at(self, position: int) -> int:
        """Of the tokens up to it; tokens are only ever added."""
        for token in self.tokens[len(self.digests) : position + 1]:
            self.digests.append(digest([token], self.digests[-1] if self.digests else EMPTY))
        return self.digests[position]


@dataclass
class FakeRunner:
    groups: tuple[KvGroup, ...]
    block_size: int
    max_tokens_seen: int = 0
    fail_next: bool = False
    poison: int | None = None  # a token, after which nothing can be drawn
    rows: dict[int, Row] = field(default_factory=dict)
    cells: dict[tuple[int, int], list[Cell]] = field(default_factory=dict)
    host: dict[tuple[int, int], list[Cell]] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError(TOLD)
        self._move(plan)
        for s in plan.entering:
            tables = [list(t) for t in s.tables] or [[] for _ in self.groups]
            self.rows[s.slot] = Row(
                list(s.token_ids), s.num_prompt_tokens, s.seed, s.choice, tables
            )
        for slot, group, entry, block in plan.updates:
            table = self.rows[slot].tables[group]
            table += [0] * (entry + 1 - len(table))
            table[entry] = block
        samples: list[Sample] = []
        prompt_logprobs = {}
        assert plan.num_tokens == sum(s.num_tokens for s in plan.slices)
        assert [s.num_tokens == 1 for s in plan.slices] == [
            i < plan.num_decode for i in range(len(plan.slices))
        ]
        self.max_tokens_seen = max(self.max_tokens_seen, plan.num_tokens)
        for part in plan.slices:
            row = self.rows[part.slot]
            end = part.start + part.num_tokens
            for position in range(part.start, end):
                if position >= part.write_start:
                    self._write(row, position)
            self._check_visible(row, part.start, end)
            if part.prompt_logprobs is not None:
                last = min(end + 1, row.num_prompt)
                prompt_logprobs[part.slot] = tuple(
                    TokenLogprobs(row.tokens[i], -float(i), 1, ())
                    for i in range(part.start + 1, last)
                )
            for slot in part.samples:
                target = self.rows[slot]
                assert target.tokens == row.tokens
                assert end == len(row.tokens)
                token = draw(target.digest_at(end - 1), target.seed, target.choice)
                samples.append(Sample(slot, token, None))
        slots = [sample.slot for sample in samples]
        failed = {slot: NOT_FINITE for slot in slots if self.poison in self.rows[slot].tokens}
        for sample in samples:
            self.rows[sample.slot].tokens.append(sample.token_id)
        return StepResult(plan.step, tuple(samples), prompt_logprobs, failed)

    def _move(self, plan: StepPlan) -> None:
        for group, device, host in plan.swap_out:
            self.host[group, host] = list(self.cells[group, device])
        for group, source, target in plan.copies:
            self.cells[group, target] = list(self.cells[group, source])
        for group, device, host in plan.swap_in:
            self.cells[group, device] = list(self.host[group, host])

    def _write(self, row: Row, position: int) -> None:
        entry, offset = divmod(position, self.block_size)
        for group, table in enumerate(row.tables):
            block = table[entry]
            assert block != 0, "a write into the null block"
            cell = self.cells.setdefault((group, block), [None] * self.block_size)
            cell[offset] = row.digest_at(position)

    def _check_visible(self, row: Row, start: int, end: int) -> None:
        """What the queries from `start` to `end` see: all of it is written by now."""
        for group, spec in enumerate(self.groups):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(first, end):
                entry, offset = divmod(position, self.block_size)
                block = row.tables[group][entry]
                assert block != 0, f"token {position} is freed, queries from {start} on see it"
                found = self.cells[group, block][offset]
                assert found == row.digest_at(position), (
                    f"group {group}, token {position} for queries from {start} on"
                )
