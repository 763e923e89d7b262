"""Random traffic over a prefill and a decode scheduler: every answer is the undisturbed one."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import ChoiceSoFar, FinishReason, PromptReport, RequestId
from tests.engine.scheduler.fake_runner import TOLD, answer
from tests.engine.scheduler.pair import BenchPair, Plan, prefix_of
from tests.engine.scheduler.prefixes import PrefixPlan
from tests.engine.scheduler.test_scheduler import FULL, WINDOW, Bench, Job, check_report, jobs

DO_NOT_FIT = "prompts that were begun at once do not fit"


@dataclass(frozen=True)
class Traffic:
    """`on_prefill` are answered there, beside the prompts that are handed over. `prefixes` are the
    blocks that others have of a prompt, by arrival."""

    jobs: list[Job]
    on_prefill: list[Job]
    plans: list[Plan]
    prefixes: list[int]
    prefix_plans: list[PrefixPlan]


plans = st.builds(
    Plan,
    ends_with=st.sampled_from(("delivered", "delivered", "refetch", "here", "failed")),
    after=st.integers(0, 8),
    stuck=st.integers(0, 3),
    delay=st.sampled_from((0, 0, 1, 4)),
    draw=st.booleans(),
    prefix=st.sampled_from((0, 0, 1, 3, 9)),
)
prefix_plans = st.builds(
    PrefixPlan,
    ends_with=st.sampled_from(("delivered", "delivered", "delivered", "here", "refetch")),
    after=st.sampled_from((0, 0, 1, 5)),
    short=st.sampled_from((0, 0, 1, 2, 9)),
)
traffic = st.builds(
    Traffic,
    st.lists(jobs(), min_size=1, max_size=6),
    st.lists(jobs(), max_size=3),
    st.lists(plans, max_size=8),
    st.lists(st.integers(0, 9), max_size=9),
    st.lists(prefix_plans, max_size=8),
)


@settings(max_examples=120)
@given(
    traffic=traffic,
    groups=st.sampled_from(((FULL,), (WINDOW,), (FULL, WINDOW))),
    swap_blocks=st.sampled_from((0, 4, 30)),
    prefix_caching=st.booleans(),
    overtaking=st.booleans(),
    budget=st.sampled_from((4, 7, 24)),
    num_blocks=st.sampled_from((13, 17, 40)),
    fetch_above=st.sampled_from((0, 0, 20, None)),
    failing_step=st.none() | st.integers(0, 20),
    ahead=st.booleans(),
)
def test_every_answer_is_the_undisturbed_one(
    traffic: Traffic,
    groups: tuple[object, ...],
    swap_blocks: int,
    prefix_caching: bool,
    overtaking: bool,
    budget: int,
    num_blocks: int,
    fetch_above: int | None,
    failing_step: int | None,
    ahead: bool,
) -> None:
    def bench() -> Bench:
        return Bench(
            groups=groups,  # type: ignore[arg-type]
            num_blocks=num_blocks,
            budget=budget,
            swap_blocks=swap_blocks,
            prefix_caching=prefix_caching,
            max_overtake_s=9.0 if overtaking else None,
            ahead=ahead,
        )

    pair = BenchPair(bench(), bench(), traffic.plans, traffic.prefix_plans)
    arriving = [(job.arrives, f"d{i}", job) for i, job in enumerate(traffic.jobs)]
    arriving += [(job.arrives, f"p{i}", job) for i, job in enumerate(traffic.on_prefill)]
    arriving.sort(key=lambda item: item[0])
    names = [name for _, name, _ in arriving]
    prefixes = dict(zip(names, traffic.prefixes, strict=False))
    aborted: set[str] = set()
    stopped: set[tuple[str, int]] = set()
    by_name = {name: job for _, name, job in arriving}
    while arriving or pair.is_busy:
        assert pair.ticks < 3000, "no end"
        while arriving and arriving[0][0] <= pair.ticks:
            _, name, job = arriving.pop(0)
            begin(pair, name, job, fetch_above, prefixes.get(name, 0))
        for name, job in by_name.items():
            scheduler = side(pair, name).scheduler
            if job.aborted == pair.ticks - job.arrives:
                scheduler.abort(RequestId(name))
                aborted.add(name)
            if job.stopped is not None and job.stopped[0] == pair.ticks - job.arrives:
                scheduler.stop_choice(RequestId(name), job.stopped[1])
                stopped.add((name, job.stopped[1]))
        pair.prefill.runner.fail_next = pair.ticks == failing_step
        pair.tick()
    pair.check_idle()
    may_fail = failing_step is not None or any(p.ends_with == "failed" for p in traffic.plans)
    check_failures(pair, may_fail)
    for name, job in by_name.items():
        whole = name not in aborted and name not in side(pair, name).failures
        check_answer(side(pair, name), name, job, whole, stopped)


def check_failures(pair: BenchPair, may_fail: bool) -> None:
    """Nothing fails by itself but a prompt that was begun for the other side, which asks again."""
    told = {**pair.prefill.failures, **pair.decode.failures}
    for name, error in told.items():
        assert (may_fail and str(error) == TOLD) or (
            name.startswith("fetch-") and str(error) == DO_NOT_FIT
        )


def side(pair: BenchPair, name: str) -> Bench:
    return pair.decode if name.startswith("d") else pair.prefill


def begin(pair: BenchPair, name: str, job: Job, fetch_above: int | None, prefix: int) -> None:
    side(pair, name).add(
        name,
        list(job.prompt),
        sent=tuple(ChoiceSoFar(tokens) for tokens in sent_before(job)),
        fetch_above=fetch_above if name.startswith("d") else None,
        prefix=prefix_of(list(job.prompt), prefix),
        arrived_s=float(pair.ticks),
        n=job.n,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        prompt_logprobs=2 if job.prompt_logprobs else None,
    )


def sent_before(job: Job) -> list[list[int]]:
    """Some requests were begun elsewhere, their choices not at the same pace."""
    cuts = [min(job.priority * (choice + 1), job.max_tokens - 1) for choice in range(job.n)]
    return [answer(list(job.prompt), 1, choice, cut) for choice, cut in enumerate(cuts)]


def check_answer(
    bench: Bench, name: str, job: Job, whole: bool, stopped: set[tuple[str, int]]
) -> None:
    for choice in range(job.n):
        said = bench.tokens.get((name, choice), [])
        sent = len(sent_before(job)[choice])
        expected = answer(list(job.prompt), 1, choice, job.max_tokens)[sent:]
        assert said == expected[: len(said)]
        if whole and (name, choice) not in stopped:
            assert len(said) == len(expected)
            assert bench.reasons[name, choice] is FinishReason.LENGTH
    report = bench.prompts.get(name)
    if whole and report is not None:
        if any(sent_before(job)):
            assert isinstance(report, PromptReport)
            assert report.logprobs is None
            assert 0 <= report.num_cached_tokens <= len(job.prompt)
        else:
            check_report(job, report)
