"""One model on one device, serving many requests step by step."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from engine.assemble import EngineInfo, EngineParts, assemble
from engine.config import EngineConfig
from engine.errors import EngineError, ModelError, RequestError, StepError
from engine.fingerprint import fingerprint
from engine.generation_defaults import read_generation_defaults
from engine.grammar.compiler import Compile, GrammarCompiler, outcome
from engine.grammar.interface import CompiledGrammar
from engine.handoff import FetchOutcome, Quarantined, Reservation, UnfinishedReads
from engine.kernels.interface import Kernels
from engine.kernels.registry import check_format, kernel_name, load_kernels
from engine.launched import LaunchedStep
from engine.machine import available_memory
from engine.memory import format_bytes
from engine.model_source import ModelSource, resolve_model
from engine.models.describe import describe
from engine.models.interface import CausalModel, LoadFormat, ModelDescription
from engine.models.load import load_model
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from engine.scheduler.draft import ScheduledStep
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outbox import StepOutput
from engine.scheduler.scheduler import SchedulerFigures, SchedulerStats
from engine.sizing import (
    EngineShape,
    Memory,
    check_host,
    decide_shape,
    memory_of,
    size_cache,
    weight_bytes,
)
from engine.step_times import StepShape, StepTimes
from engine.text.tokenizer import Tokenizer
from kv_cache.cache import CacheStats
from kv_cache.events import EventLog, Snapshot
from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold

logger = logging.getLogger(__name__)

_MANY = 8  # requests that a line of the log names


@dataclass(frozen=True, slots=True)
class Flight:
    """A step from its launch to its end: what the scheduler has of it, and what the runner has."""

    step: ScheduledStep
    shape: StepShape
    launched: LaunchedStep | Exception  # why it could not be
    launched_s: float  # of `time.perf_counter`


class Engine:
    """Scheduler, cache and runner of one model; one thread calls it.

    `step` while `has_work`, all else between its calls. A step that fails ends the requests in
    it and leaves the others as they are. `tell_early`, where it is set, gets what need not wait
    for the end of a step; otherwise it is a part of the step's output.

    With `async_scheduling` the next step is planned and launched before the device is done with
    one, where that can be: between two calls a step may be in flight, and who is added or ended
    then is in the one after that, or no more in it.
    """

    def __init__(self, info: EngineInfo, parts: EngineParts, seed: int) -> None:
        self.info = info
        self._scheduler = parts.scheduler
        self._cache = parts.cache
        self._runner = parts.runner
        self.slabs = parts.slabs  # read and written by peers too, as they hold blocks
        self.touching = parts.touching  # to be joined by whoever measures what comes after it
        self._closing = parts.closing
        self._ahead = info.shape.async_scheduling
        self._in_flight: Flight | None = None
        self._ended_s = 0.0  # the last step, of `time.perf_counter`
        self._seeds = Random(seed)
        self.grammars = GrammarCompiler(lambda: _load_vocabulary(info))
        self.num_steps = 0
        self.num_failed = 0  # of them, the last ones, without one between that did not
        self.num_steps_ahead = 0  # of them, launched before the one before had ended
        # That they took, all together, and since when one is under way: at once, as others ask.
        self._spent: tuple[float, float | None] = (0.0, None)
        self.step_times = self._new_step_times()
        self.expected_s = 0.0  # what is launched should take, by the steps so far
        self.tell_early: Callable[[StepOutput], None] | None = None

    @classmethod
    def create(cls, config: EngineConfig) -> "Engine":
        """Loads the model, sizes the cache, and compiles what is compiled on first use."""
        started = time.monotonic()
        source = resolve_model(
            config.model,
            config.revision,
            config.download_dir,
            weights=config.load_format != "dummy",
        )
        model = describe(source)
        defaults = read_generation_defaults(source.folder)
        shape = decide_shape(config, model)
        torch.set_num_threads(shape.num_threads)
        model = replace(model, max_model_len=shape.max_model_len)
        kernels = _make_kernels(config, shape)
        weights = weight_bytes(model, shape.dtype, kernels)
        found = memory_of(shape.device)
        plan = size_cache(config, shape, model, found, weights)
        check_host(config, shape, model, plan, available_memory(), weights)
        _compile_kernels(kernels, shape)
        loaded = _load(config, source, model, shape, kernels)
        unused = memory_of(shape.device)
        plan = size_cache(config, shape, model, unused)
        check_host(config, shape, model, plan, available_memory())
        info = EngineInfo(
            source=source,
            model=model,
            shape=shape,
            cache=plan,
            defaults=defaults,
            fingerprint=fingerprint(
                source, _load_format(config), config.seed, model.variant(shape.dtype_name)
            ),
        )
        engine = cls(info, assemble(config, info, loaded), config.seed)
        _report(info, found, weights, unused)
        logger.info("warming up; what is to be compiled is compiled on a machine's first start")
        engine.warm_up()
        cache = format_bytes(plan.num_bytes)
        logger.info("ready after %.1f s with %s of cache", time.monotonic() - started, cache)
        return engine

    @property
    def has_work(self) -> bool:
        """Steps are to be made. Reserved blocks that others fill are no work of ours."""
        return self._in_flight is not None or self._scheduler.has_work

    @property
    def incarnation(self) -> int:
        """Random for every engine; its cache's events carry it."""
        return self._cache.config.incarnation

    @property
    def events(self) -> EventLog:
        return self._cache.events

    def snapshot(self) -> Snapshot:
        return self._cache.snapshot()

    @property
    def limits(self) -> SchedulerLimits:
        return self._scheduler.limits

    @property
    def num_transfers(self) -> int:
        """Holds of peers that read from the cache, or of reads into it."""
        return self._cache.transfers.num_active

    def add(
        self,
        request: GenerationRequest,
        grammar: CompiledGrammar | None = None,
        arrived_s: float | None = None,
    ) -> None:
        """RequestError for what can never run, QueueFullError for what could run later. A grammar
        that the caller has not had compiled is waited for. `arrived_s`: of `time.monotonic`."""
        seed = self._seeds.randrange(-(2**63), 2**63)
        if grammar is None and request.drawn_grammar is not None:
            grammar = outcome(self.grammars.submit(request.drawn_grammar))
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        self._scheduler.add(request, seed, arrived_s, grammar)

    def abort(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self._scheduler.stop_choice(request_id, choice)

    def step(self) -> StepOutput:
        """The end of one step of what there is; no step where nothing can be computed now."""
        flight = self._in_flight or self._launch(self._plan())
        self._tell_early()
        if flight is None:
            return self._scheduler.take_news()
        self._in_flight = self._launch_ahead(flight)
        output = self._end(flight)
        early = self._scheduler.take_news()
        return output if early.is_empty else output.after(early)

    def _plan(self) -> ScheduledStep | None:
        return self._scheduler.schedule(time.monotonic(), self.step_times.careful_costs)

    def _launch(self, step: ScheduledStep | None, before_s: float = 0.0) -> Flight | None:
        """`before_s`: what the device is at should take."""
        if step is None:
            return None
        shape = StepShape.of(step.plan)
        self.expected_s = before_s + self.step_times.predict(shape)
        launched_s = time.perf_counter()
        if self._spent[1] is None:
            self._spent = (self.steps_s, launched_s)
        launched: LaunchedStep | Exception
        try:
            launched = self._runner.launch(step.plan, lambda: self._announce(step))
        except Exception as error:  # noqa: BLE001 - as in _end
            launched = error
        return Flight(step, shape, launched, launched_s)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        if not self._ahead or isinstance(flight.launched, Exception):
            return None
        costs = self.step_times.careful_costs
        step = self._scheduler.schedule_ahead(flight.step, time.monotonic(), costs)
        self._tell_early()
        self.num_steps_ahead += step is not None
        return self._launch(step, self.step_times.predict(flight.shape))

    def _end(self, flight: Flight) -> StepOutput:
        step = flight.step
        try:
            if isinstance(flight.launched, Exception):
                raise flight.launched
            result = self._runner.finish(flight.launched)
        except Exception as error:  # noqa: BLE001 - whatever it is, only this step's requests end
            self._note_failure(step)
            self._spend(0.0, time.perf_counter())
            error.__traceback__ = None  # whose frames have the step's tensors, and the error
            return self._scheduler.fail(step, _as_step_error(error))
        else:
            self.num_failed = 0
            self._note_time(flight)
            return self._scheduler.complete(step, result, time.monotonic())
        finally:
            self.num_steps += 1

    def _note_failure(self, step: ScheduledStep) -> None:
        """A device that is broken fails thousands of them a second, all for the same reason."""
        self.num_failed += 1
        if self.num_failed == 1:
            sources = (part.sequence.request.source for part in step.parts)
            names = list(dict.fromkeys(source.request_id for source in sources))
            more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
            requests = ", ".join(names[:_MANY]) + more
            logger.exception("step %d failed, and with it %s", step.plan.step, requests)

    @property
    def steps_s(self) -> float:
        """That steps took, all together."""
        return self._spent[0]

    def spent_s(self, now: float) -> float:
        """The same with what the one under way has taken, at a time of `time.perf_counter`. On
        any thread."""
        steps_s, since_s = self._spent
        return steps_s if since_s is None else steps_s + max(0.0, now - since_s)

    def _note_time(self, flight: Flight) -> None:
        """Of a step that was launched during another, from that one's end on."""
        ended_s = time.perf_counter()
        took_s = ended_s - max(flight.launched_s, self._ended_s)
        self._ended_s = ended_s
        self._spend(took_s, ended_s)
        self.step_times.note(flight.shape, took_s)

    def _new_step_times(self) -> StepTimes:
        return StepTimes(self.info.model.pair_share, self.info.shape.block_size)

    def _spend(self, took_s: float, now: float) -> None:
        self._spent = (self.steps_s + took_s, None if self._in_flight is None else now)

    def _announce(self, step: ScheduledStep) -> None:
        """Peers read what a step has written while its tokens are drawn."""
        self._scheduler.announce(step)
        self._tell_early()

    def _tell_early(self) -> None:
        if self.tell_early is None:
            return
        news = self._scheduler.take_news()
        if not news.is_empty:
            self.tell_early(news)

    def end_fetch(
        self,
        reservation: Reservation,
        outcome: FetchOutcome,
        unfinished: Iterable[UnfinishedReads] = (),
    ) -> tuple[StepOutput, Quarantined]:
        """Once for each reservation. Blocks of unfinished reads are in quarantine from here on,
        one hold for each, until `end_quarantine`."""
        return self._scheduler.end_fetch(reservation, outcome, unfinished, time.monotonic())

    def end_quarantine(self, hold: TransferHold) -> None:
        """Nothing writes to its blocks any more."""
        self._cache.transfers.end_quarantine(hold)

    def drop_holds(self, holds: Iterable[TransferHold]) -> None:
        """The reader of announced or cached blocks has ended."""
        for hold in holds:
            self._cache.transfers.drop(hold)

    def hold_cached(
        self, token_ids: Sequence[int], cache_salt: str = "", first_token: int = 0
    ) -> HeldRange:
        """Holds what is cached of a prompt from `first_token` on: whole blocks, maybe none."""
        return self._scheduler.hold_cached(token_ids, cache_salt, first_token)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block that no sequence holds."""
        self._cache.reset()
        self._cache.events.flush()

    def figures(self) -> SchedulerFigures:
        """What can be told at any time, on any thread."""
        return self._scheduler.figures()

    def scheduler_stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def cache_stats(self) -> CacheStats:
        """On any thread; between steps its numbers are of one moment."""
        return self._cache.stats()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def warm_up(self) -> None:
        """A prompt of some blocks and a few tokens, so that no user waits for a compiler; once
        more, since steps are recorded when they are made again, and a last time for what they
        take then."""
        self._runner.prepare()
        for reporting in (True, False, False):
            self.step_times = self._new_step_times()
            self.add(_warm_up_request(self.info.shape, reporting))
            while self.has_work:
                for error in self.step().failures.values():
                    raise error
            self.reset_prefix_cache()
        self.num_steps, self.num_steps_ahead, self._spent = 0, 0, (0.0, None)
        self._scheduler.counts.reset()
        self._cache.reset_counts()

    def close(self) -> None:
        """Nothing of ours touches the cache's memory from here on but a last piece of it."""
        self._closing.set()
        self.grammars.close()
        if self._in_flight is not None and isinstance(self._in_flight.launched, LaunchedStep):
            self._in_flight.launched.wait()


def _load_vocabulary(info: EngineInfo) -> Compile:
    from engine.grammar.library import Vocabulary  # needed by requests with a grammar alone

    try:
        tokenizer = Tokenizer.from_folder(info.source.folder)
    except ModelError as error:
        raise RequestError("grammar", f"needs the model's tokenizer: {error}") from None
    eos = info.defaults.eos_below(info.model.vocab_size)
    return Vocabulary(tokenizer.to_json(), info.model.vocab_size, eos).compile


def _warm_up_request(shape: EngineShape, reporting: bool) -> GenerationRequest:
    length = min(4 * shape.block_size + 1, max(1, shape.max_model_len - 2))
    params = SamplingParams(
        max_tokens=min(2, shape.max_model_len - length),
        ignore_eos=True,
        temperature=0.0,
        logprobs=1 if reporting else None,  # which has kernels of its own
        prompt_logprobs=1 if reporting else None,
        logit_bias={0: 1.0} if reporting else {},  # and so has a draw from edited logits
    )
    return GenerationRequest(RequestId("warm-up"), [0] * length, params)


def _as_step_error(error: Exception) -> EngineError:
    return error if isinstance(error, EngineError) else StepError(f"the step failed: {error!r}")


def _make_kernels(config: EngineConfig, shape: EngineShape) -> Kernels:
    name = kernel_name(config.kernels, shape.device)
    check_format(name, shape.dtype, shape.kv_format.name, shape.device)
    return load_kernels(config.kernels, shape.device)


def _compile_kernels(kernels: Kernels, shape: EngineShape) -> None:
    if kernels.name == "cpu":
        from engine.compile_ahead import compile_ahead

        compile_ahead(shape.dtype, shape.kv_format)


def _load(
    config: EngineConfig,
    source: ModelSource,
    model: ModelDescription,
    shape: EngineShape,
    kernels: Kernels,
) -> CausalModel:
    logger.info(
        "loading %s: %s, %.1f M parameters in %s on %s",
        source.name,
        model.architecture,
        model.num_parameters / 1e6,
        shape.dtype,
        shape.device,
    )
    try:
        return load_model(
            source, model, kernels, shape.dtype, shape.device, _load_format(config), config.seed
        )
    except torch.OutOfMemoryError as error:  # there was enough when it was asked for
        raise ModelError(f"{source.name}: {error}") from error


def _load_format(config: EngineConfig) -> LoadFormat:
    return "dummy" if config.load_format == "dummy" else "auto"


def _report(info: EngineInfo, found: Memory, weights: int, unused: Memory) -> None:
    """`unused` is what weights left. What the cache does cannot be measured yet: a CPU's is being
    touched."""
    plan, shape = info.cache, info.shape
    logger.info(
        "%s of memory were available on %s: weights take %s, the cache %s, and %s are left",
        format_bytes(found.available_bytes),
        shape.device,
        format_bytes(weights),
        format_bytes(plan.num_bytes),
        format_bytes(unused.available_bytes - plan.num_bytes),
    )
    logger.info(
        "the cache holds %d tokens in blocks of %d: %d sequences of %d tokens at once",
        plan.num_tokens,
        shape.block_size,
        plan.num_sequences(shape.max_model_len),
        shape.max_model_len,
    )
