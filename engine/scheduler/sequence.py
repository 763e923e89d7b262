"""One choice of one request on its way through the engine."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.grammar.interface import CompiledGrammar
from engine.request import GenerationRequest
from engine.sampling import SamplingParams
from engine.scheduler.course import PromptCourse
from engine.scheduler.order import Key
from engine.step import TableUpdate, TokenLogprobs
from kv_cache.names import SequenceNames
from kv_cache.sequence import SequenceBlocks


class SequenceState(Enum):
    """
    add() --> WAITING --- admitted: blocks and a slot -----------------> RUNNING
      |        ^ ^  |                                                    ^ | | | ^
      |        | |  +---- admitted: blocks to be filled --> FETCHING ----+ | | | |
      |        | +------- the fetch came to nothing ----------+   delivered| | | |
      |        +--------- preempted: computed again -----------------------+ | | |
      |       SWAPPED <-- preempted: blocks to the host ---------------------+ | |
      |        +--------- admitted: blocks come back --------------------------|-+
      +-----> FORKING --- the leader's prompt ends: shares it -----------------|-+
              (n > 1)                                                          v
    any of them ------- a stop, a length, an abort, a failure --------> FINISHED

    WAITING holds nothing, FORKING a slot once its leader runs or fetches, RUNNING and FETCHING
    a slot and blocks, SWAPPED host blocks, FINISHED nothing: where a step is in flight with it,
    nothing once that has ended.

    FETCHING computes nothing and is never preempted: what fills its blocks ends by itself. If
    that was a prefix, RUNNING computes the rest. A prompt that is handed over ends with its
    last chunk; what it announced has other owners.
    """

    WAITING = auto()
    FORKING = auto()
    FETCHING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


QUEUED = (SequenceState.WAITING, SequenceState.SWAPPED)


class Sequence:
    """Tokens, blocks and slot of one choice; the scheduler alone changes it.

    Tokens [0, num_computed) are in the cache. The rest, at least the last one, is still to be
    computed; when a slice reaches the end, the next token is drawn.
    """

    __slots__ = (
        "admitted",
        "blocks",
        "changes",
        "choice",
        "enters",
        "host_blocks",
        "key",
        "may_fetch",
        "may_fetch_prefix",
        "names",
        "num_computed",
        "num_written",
        "request",
        "slot",
        "state",
        "tokens",
    )

    def __init__(
        self,
        request: "RunningRequest",
        choice: int,
        state: SequenceState,
        key: Key,
        sent: Seq[int],
        names: SequenceNames,
    ) -> None:
        self.request = request
        self.choice = choice
        self.state = state
        self.key = key  # the smallest is served first
        self.tokens: list[int] = [*request.source.prompt_token_ids, *sent]
        self.admitted = False  # before, so what it finds in the cache may be its own
        self.may_fetch = request.source.fetch_above is not None
        self.may_fetch_prefix = request.source.prefix is not None
        self.num_computed = 0
        self.num_written = 0  # one more than computed when the last token is computed again
        self.slot: int | None = None
        self.enters = False  # the runner must be told everything about the slot
        self.changes: list[TableUpdate] = []  # what it must be told otherwise
        self.blocks: SequenceBlocks | None = None
        self.host_blocks: list[dict[int, int]] = []  # for each group, table entry -> block
        self.names = names

    def __lt__(self, other: "Sequence") -> bool:
        return self.key < other.key

    @property
    def params(self) -> SamplingParams:
        return self.request.source.params

    @property
    def own_slot(self) -> int:
        """Of a sequence that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    def note(self, changes: Iterable[tuple[int, int, int]]) -> None:
        """Changes of the block tables (group, entry, block), for the runner's next step."""
        slot = self.own_slot
        self.changes += [TableUpdate(slot, *change) for change in changes]


@dataclass(slots=True)
class RunningRequest:
    """A request and its choices from `add` until its last choice has ended."""

    source: GenerationRequest
    seed: int
    max_tokens: int
    grammar: CompiledGrammar | None = None  # of what draws here
    choices: list[Sequence] = field(default_factory=list)
    num_cached: int | None = None  # prompt tokens that nobody computes for it, once admitted
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    reported: bool = False  # the prompt's report went out
    in_doubt: bool = False  # what was computed of it, or found in the cache, may not be finite
    course: PromptCourse = field(default_factory=PromptCourse)
    num_announced: int = 0  # tokens that a hand-over has announced, or was not asked for
    num_holds: int = 0  # with which it did so
    stop_token_ids: frozenset[int] = field(init=False)  # of which there may be a vocabulary
    draws: bool = field(init=False)  # whether a token follows the last one that is computed
    reports_prompt_logprobs: bool = field(init=False)
    _forking: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, handed = self.source, self.source.hand_over
        self.stop_token_ids = frozenset(source.params.stop_token_ids)
        self.draws = handed is None or handed.draw
        # what has sent tokens has sent these before
        wanted = source.params.prompt_logprobs is not None
        self.reports_prompt_logprobs = wanted and not self.has_sent
        if handed is not None:
            self.num_announced = handed.first_token

    def add(self, choice: Sequence) -> None:
        self.choices.append(choice)
        if choice.state is SequenceState.FORKING:
            self._forking.append(choice)

    def forget_choices(self) -> None:
        """All have ended. They know it, and it knew them: with all their tokens they would stay
        until Python next looks for garbage, which servers have it do seldom."""
        self.choices.clear()
        self._forking.clear()

    @property
    def num_prompt(self) -> int:
        return len(self.source.prompt_token_ids)

    @property
    def live(self) -> list[Sequence]:
        return [c for c in self.choices if c.state is not SequenceState.FINISHED]

    @property
    def has_begun(self) -> bool:
        """One of its choices was admitted. Of those that went apart the others find in the cache
        what that one read, which says nothing of where the prompt's cache came from."""
        return any(choice.admitted for choice in self.choices)

    @property
    def forking(self) -> list[Sequence]:
        """Who has been forked is not to be forked again: most ask when nobody is left."""
        if self._forking:
            self._forking = [c for c in self._forking if c.state is SequenceState.FORKING]
        return self._forking

    @property
    def has_sent(self) -> bool:
        return any(choice.token_ids for choice in self.source.sent)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some are asked for and still to be computed."""
        return self.reports_prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt

    @property
    def num_readable(self) -> int | None:
        """Tokens that a prefix hit may cover, None for all: prompt logprobs read no cache."""
        return len(self.prompt_logprobs) - 1 if self.wants_prompt_logprobs else None
