"""Random traffic over small caches: every answer is the undisturbed one, and nothing is lost."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, StepError
from engine.request import (
    ChoiceSoFar,
    FinishReason,
    GenerationRequest,
    HandOver,
    RemotePrefix,
    RequestId,
)
from engine.sampling import SamplingParams
from engine.scheduler.draft import ScheduledStep
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import StepOutput
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.swap import SwapSpace
from engine.step import StepResult
from engine.step_times import StepCosts
from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig, first_visible
from kv_cache.layout import KvGroup
from tests.engine.scheduler.fake_runner import TOLD, VOCAB, FakeRunner, answer

BLOCK = 8
FULL = KvGroup((0, 1), 1, (8, 8))
WINDOW = KvGroup((2,), 1, (8, 8), window=11)
EOS = 999  # never drawn
COSTS = (None, *(StepCosts(0.0, token_s, 0.0, 0.0, 0.0) for token_s in (0.0, 0.05, 10.0)))


@dataclass
class Flight:
    """A step that the runner is at, and the block tables that it goes by."""

    step: ScheduledStep
    result: StepResult | StepError
    tables: list[list[list[int]]]  # of each part

    @property
    def slots(self) -> set[int]:
        return {part.slice.slot for part in self.step.parts}


@dataclass
class Bench:
    """A scheduler with a fake runner, and what every request has been told so far."""

    groups: tuple[KvGroup, ...] = (FULL,)
    num_blocks: int | tuple[int, ...] = 13  # of every group, or of each
    budget: int = 24
    max_pause_s: float = 1.0
    costs: StepCosts | None = None  # without them a step takes what it takes
    max_num_seqs: int = 4
    max_model_len: int = 80
    swap_blocks: int = 0
    by_priority: bool = False
    prefix_caching: bool = True
    max_queued: int = 100
    eos_token_ids: tuple[int, ...] = (EOS,)
    max_overtake_s: float | None = None
    ahead: bool = False
    fail_end: bool = False  # of the next step
    in_flight: Flight | None = None
    num_steps: int = 0
    num_steps_ahead: int = 0
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    stops: dict[tuple[str, int], int | None] = field(default_factory=dict)  # stop_token_id
    failures: dict[str, EngineError] = field(default_factory=dict)
    prompts: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        each = self.num_blocks
        self.cache = KvCache(
            CacheConfig(
                groups=self.groups,
                num_blocks=(each,) * len(self.groups) if isinstance(each, int) else each,
                block_size=BLOCK,
                max_chunk_tokens=self.budget,
            )
        )
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_pause_s=self.max_pause_s,
            max_model_len=self.max_model_len,
            max_num_queued_reqs=self.max_queued,
            by_priority=self.by_priority,
            prefix_caching=self.prefix_caching,
            vocab_size=VOCAB,
            eos_token_ids=frozenset(self.eos_token_ids),
            fingerprint="test",
            max_overtake_s=self.max_overtake_s,
        )
        swap = SwapSpace([self.swap_blocks] * len(self.groups))
        self.scheduler = Scheduler(limits, self.cache, swap)
        self.runner = FakeRunner(self.groups, BLOCK)

    def add(
        self,
        name: str,
        prompt: list[int],
        priority: int = 0,
        hand_over: HandOver | None = None,
        fetch_above: int | None = None,
        prefix: RemotePrefix | None = None,
        sent: tuple[ChoiceSoFar, ...] = (),
        arrived_s: float = 0.0,
        **params: object,
    ) -> None:
        request = GenerationRequest(
            RequestId(name),
            prompt,
            SamplingParams(**{"seed": 1, **params}),  # type: ignore[arg-type]
            priority=priority,
            hand_over=hand_over,
            fetch_above=fetch_above,
            prefix=prefix,
            sent=sent,
        )
        self.scheduler.add(request, seed=0, arrived_s=arrived_s)

    @property
    def has_work(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_work

    def step(self) -> StepOutput | None:
        """None where nothing was computed and there is nothing to say."""
        flight = self.in_flight or self.launch(self.scheduler.schedule(costs=self.costs))
        early = self.scheduler.take_news()
        if flight is None:
            self.take(early)
            return None if early.is_empty else early
        self.num_steps += 1
        self.in_flight = self.launch_ahead(flight)
        output = self.end(flight).after(early)
        output = output.after(self.scheduler.take_news())
        self.take(output)
        return output

    def launch(self, step: ScheduledStep | None) -> Flight | None:
        if step is None:
            return None
        try:
            result: StepResult | StepError = self.runner.execute(step.plan)
        except RuntimeError as error:
            result = StepError(str(error))
            return Flight(step, result, [[] for _ in step.parts])
        rows = [self.runner.rows[part.slice.slot] for part in step.parts]
        return Flight(step, result, [[list(table) for table in row.tables] for row in rows])

    def launch_ahead(self, flight: Flight) -> Flight | None:
        if not self.ahead or isinstance(flight.result, StepError):
            return None
        step = self.scheduler.schedule_ahead(flight.step, costs=self.costs)
        if step is not None:
            self.num_steps_ahead += 1
            assert flight.slots.isdisjoint(entering.slot for entering in step.plan.entering)
        return self.launch(step)

    def end(self, flight: Flight) -> StepOutput:
        if self.fail_end:
            self.fail_end = False
            flight.result = StepError(TOLD)
        if isinstance(flight.result, StepError):
            return self.scheduler.fail(flight.step, flight.result)
        return self.scheduler.complete(flight.step, flight.result)

    def check_flight(self) -> None:
        """What the step in flight reads stays where it is, and nobody has what it writes."""
        if self.in_flight is None:
            return
        for part, tables in zip(self.in_flight.step.parts, self.in_flight.tables, strict=True):
            _, start, num_tokens, write_start, *_ = part.slice
            blocks = part.sequence.blocks
            assert blocks is not None
            for g, table in enumerate(tables):
                first = first_visible(start, self.groups[g].window, BLOCK)
                last = (start + num_tokens - 1) // BLOCK
                assert blocks.tables[g][first : last + 1] == table[first : last + 1]
                if write_start < start + num_tokens:
                    for block in table[write_start // BLOCK : last + 1]:
                        assert self.cache._pools[g].owners(block) == (1, 0, 0)

    def take(self, output: StepOutput) -> None:
        for request_id, update in output.updates.items():
            if update.prompt is not None:
                assert request_id not in self.prompts
                self.prompts[request_id] = update.prompt
            for delta in update.deltas:
                self.tokens.setdefault((request_id, delta.choice), []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.reasons[request_id, delta.choice] = delta.finish_reason
                    self.stops[request_id, delta.choice] = delta.stop_token_id
        self.failures |= dict(output.failures.items())
        self.scheduler.check_integrity()
        self.check_flight()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.has_work:
                return
            assert self.step() is not None, "work is queued and nothing is scheduled"
        raise AssertionError("no end")


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    arrives: int
    aborted: int | None
    stopped: tuple[int, int] | None  # step, choice
    prompt_logprobs: bool
    stops: tuple[int, ...] = ()

    def answer(self, choice: int) -> list[int]:
        """What an undisturbed run says."""
        whole = answer(list(self.prompt), 1, choice, self.max_tokens)
        ends = [i + 1 for i, token in enumerate(whole) if token in self.stops]
        return whole[: ends[0]] if ends else whole


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shared = draw(st.sampled_from(((), (1, 2, 3) * 6, (1, 2, 3) * 6 + (4,) * 6, (9,) * 40)))
    own = draw(st.lists(st.integers(0, 3), max_size=20))
    prompt = (*shared, *own) or (5,)
    n = draw(st.sampled_from((1, 1, 1, 2, 3)))
    return Job(
        prompt=prompt,
        max_tokens=draw(st.integers(1, min(30, 80 - len(prompt)))),
        n=n,
        priority=draw(st.integers(0, 2)),
        arrives=draw(st.integers(0, 12)),
        aborted=draw(st.none() | st.integers(0, 40)),
        stopped=draw(st.none() | st.tuples(st.integers(0, 25), st.integers(0, n - 1))),
        prompt_logprobs=draw(st.booleans()),
        stops=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=5))),
    )


def crowd(jobs: list[Job]) -> list[Job]:
    """All at once, each to its end: in a small cache they take blocks from each other."""
    return [
        replace(
            job,
            max_tokens=min(30, 80 - len(job.prompt)),
            arrives=0,
            aborted=None,
            stopped=None,
            stops=(),
        )
        for job in jobs
    ]


@settings(max_examples=120)
@given(
    jobs=st.lists(jobs(), min_size=1, max_size=7)
    | st.lists(jobs(), min_size=3, max_size=7).map(crowd),
    groups=st.sampled_from(((FULL,), (WINDOW,), (FULL, WINDOW))),
    swap_blocks=st.sampled_from((0, 4, 30)),
    by_priority=st.booleans(),
    prefix_caching=st.booleans(),
    budget=st.sampled_from((4, 7, 24)),
    num_blocks=st.sampled_from((13, 17, 40)),
    failing_step=st.none() | st.integers(0, 20),
    failing_end=st.none() | st.integers(0, 20),
    ahead=st.booleans(),
    costs=st.sampled_from(COSTS),
)
def test_every_answer_is_the_undisturbed_one(
    jobs: list[Job],
    groups: tuple[KvGroup, ...],
    swap_blocks: int,
    by_priority: bool,
    prefix_caching: bool,
    budget: int,
    num_blocks: int,
    failing_step: int | None,
    failing_end: int | None,
    ahead: bool,
    costs: StepCosts | None,
) -> None:
    bench = Bench(
        groups=groups,
        num_blocks=num_blocks,
        budget=budget,
        swap_blocks=swap_blocks,
        by_priority=by_priority,
        prefix_caching=prefix_caching,
        ahead=ahead,
        costs=costs,
    )
    pending = sorted(enumerate(jobs), key=lambda job: job[1].arrives)
    aborted: set[str] = set()
    stopped: set[tuple[str, int]] = set()
    for step in range(3000):
        while pending and pending[0][1].arrives <= step:
            number, job = pending.pop(0)
            bench.add(
                str(number),
                list(job.prompt),
                priority=job.priority if by_priority else 0,
                n=job.n,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                stop_token_ids=job.stops,
                prompt_logprobs=2 if job.prompt_logprobs else None,
            )
        for number, job in enumerate(jobs):
            if job.aborted == step - job.arrives:
                bench.scheduler.abort(RequestId(str(number)))
                aborted.add(str(number))
            if job.stopped is not None and job.stopped[0] == step - job.arrives:
                bench.scheduler.stop_choice(RequestId(str(number)), job.stopped[1])
                stopped.add((str(number), job.stopped[1]))
        bench.scheduler.check_integrity()
        bench.check_flight()
        bench.runner.fail_next = step == failing_step
        bench.fail_end = step == failing_end
        if bench.has_work:
            assert bench.step() is not None, "work is queued and nothing is scheduled"
        elif not pending:
            break
    else:
        raise AssertionError("no end")
    assert bench.runner.max_tokens_seen <= budget
    assert all(group.held == 0 for group in bench.cache.stats().groups)
    may_fail = failing_step is not None or failing_end is not None
    assert may_fail or not bench.failures
    assert all(str(error) == TOLD for error in bench.failures.values())
    check_answers(bench, jobs, aborted, stopped)


def check_answers(
    bench: Bench, jobs: list[Job], aborted: set[str], stopped: set[tuple[str, int]]
) -> None:
    for number, job in enumerate(jobs):
        name = str(number)
        for choice in range(job.n):
            said = bench.tokens.get((name, choice), [])
            whole = job.answer(choice)
            cut = name in aborted or (name, choice) in stopped or name in bench.failures
            assert said == whole[: len(said)]
            if not cut:
                assert len(said) == len(whole)
                stopped_itself = whole[-1] in job.stops
                reason = FinishReason.STOP if stopped_itself else FinishReason.LENGTH
                assert bench.reasons[name, choice] is reason
        if not (name in aborted or name in bench.failures) and bench.prompts.get(name):
            check_report(job, bench.prompts[name])


def check_report(job: Job, report: object) -> None:
    from engine.request import PromptReport

    assert isinstance(report, PromptReport)
    if not job.prompt_logprobs:
        assert report.logprobs is None
        assert 0 <= report.num_cached_tokens < len(job.prompt)
        return
    assert report.num_cached_tokens == 0
    assert report.logprobs is not None
    assert report.logprobs[0] is None
    ids = [entry.token_id for entry in report.logprobs[1:] if entry is not None]
    assert ids == list(job.prompt[1:])


def test_who_is_still_being_read_does_not_draw() -> None:
    bench = Bench(num_blocks=40, budget=16)
    bench.add("long", [4] * 30, max_tokens=3)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_context_tokens) == (1, 16)
    assert (stats.num_drawing, stats.num_drawing_context) == (0, 0)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_drawing, stats.num_drawing_context) == (1, 30)
