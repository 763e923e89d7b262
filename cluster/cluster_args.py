"""What a cluster's user says: the `args` of a Serve config file, or the flags of `kvrelay serve`.

Checked when made, before anything starts; an unknown key is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.api_keys import ApiKeys
from cluster.autoscaling import Objectives
from cluster.front_args import FrontArgs, HttpArgs
from cluster.log_format import LogArgs
from cluster.openai.request_limits import RequestLimits
from cluster.router_args import RouterArgs
from cluster.scaling_args import ScalingArgs
from cluster.validation import AbsolutePath, checked, in_place, one_of
from cluster.worker_config import ConnectorChoice, WorkerConfig, merged, plane_of
from decode_worker.answerer import LocalPrefill
from engine.config import KNOBS, EngineConfig
from engine.errors import ConfigError
from protos.rpc import FILES, Plane, RpcConfig
from router.choosing import AIMED
from router.config import RouterConfig
from router.workers import Leg

MAX_REPLICAS = 10_000
# What makes the workers of one cluster answer differently, or share no blocks.
_OF_MODEL = ("model", "revision", "load_format", "dtype", "seed", "kv_cache_dtype", "block_size")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class ReplicaRange(NamedTuple):
    least: int
    most: int

    @classmethod
    def parse(cls, value: object) -> Self:
        """`3`, or `1-8` for a pool that is scaled between the two."""
        match = _RANGE.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
        if match is None:
            raise ValueError(f"{value!r}, must be a number, or a range like 1-4")
        least = int(match[1])
        most = int(match[2] or least)
        if not least <= most <= MAX_REPLICAS:
            raise ValueError(f"{value!r}, must be at most {MAX_REPLICAS}, the lower number first")
        return cls(least, most)

    @property
    def is_scaled(self) -> bool:
        return self.least != self.most


_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # as Ray can count


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Placement(_Args):
    """How many replicas there are, what each is given, and on which nodes it may run."""

    replicas: int | str = 1
    num_cpus: _Amount = 1
    num_gpus: _Amount = 0
    label_selector: dict[str, str] = {}
    resources: dict[str, _Amount] = {}
    max_replicas_per_node: int | None = Field(default=None, ge=1, le=100)

    @field_validator("replicas", mode="before")
    @classmethod
    def _check_replicas(cls, value: object) -> object:
        """Before pydantic takes true for 1."""
        ReplicaRange.parse(value)
        return value

    @field_validator("num_gpus")
    @classmethod
    def _check_gpus(cls, value: float) -> float:
        """Ray says so only when a replica is to be placed, and only in Serve's own logs."""
        if value > 1 and not value.is_integer():
            raise ValueError(f"{value:g}, must be a whole number above 1")
        return value

    @property
    def range(self) -> ReplicaRange:
        return ReplicaRange.parse(self.replicas)


class PoolArgs(Placement):
    """`engine`: knobs of this pool's workers that differ from the cluster's."""

    engine: dict[str, Any] = {}


class ClusterArgs(HttpArgs):
    """`worker_host`: where workers listen. `node` is their node's address, which takes a cluster
    secret, or loopback without one in a cluster of one node. `drain_s`: how long a worker that is
    stopped keeps what another one could take."""

    model: str = "bundled"
    served_model_name: tuple[str, ...] = ()
    engine: dict[str, Any] = {}
    prefill: PoolArgs = PoolArgs()
    decode: PoolArgs = PoolArgs()
    ingress: Placement = Placement(num_cpus=0)
    local_prefill: str = LocalPrefill.AUTO.name.lower()
    connector: ConnectorChoice = ConnectorChoice.AUTO
    worker_host: str = "node"
    rpc: dict[str, Any] = {}
    exchange: dict[str, Any] = {}
    drain_s: float = Field(default=30.0, ge=0, le=86400)
    front: FrontArgs = FrontArgs()
    log: LogArgs = LogArgs()
    metrics_targets_file: AbsolutePath | None = None
    scaling: ScalingArgs = ScalingArgs()
    router: RouterArgs = RouterArgs()

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(names):
            raise ValueError("must not be empty")
        return names

    @field_validator("local_prefill")
    @classmethod
    def _check_local_prefill(cls, value: str) -> str:
        return one_of(value, [mode.name.lower() for mode in LocalPrefill])

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            EngineConfig.from_mapping({"model": self.model, **self.engine})
        except ConfigError as error:
            raise ValueError(f"engine.{error}") from error
        for leg, pool in ((Leg.PREFILL, self.prefill), (Leg.DECODE, self.decode)):
            if "model" in pool.engine or "model" in self.engine:
                raise ValueError("engine.model: a cluster serves one model; say it in `model`")
            try:
                config = self.worker(leg, "127.0.0.1").engine
            except ConfigError as error:
                place = f"{leg}." if error.field.startswith("engine.") else ""
                raise ValueError(f"{place}{error}") from error
            if _identity(config) != _identity(self.engine_config):
                names = ", ".join(_OF_MODEL[1:])
                raise ValueError(f"{leg}.engine: the pools must agree on {names}")
        self._check_files()
        self._check_lengths()
        for name, placement in (("decode", self.decode), ("ingress", self.ingress)):
            if placement.range.least < 1:
                raise ValueError(f"{name}.replicas: must be at least 1")
        if self.prefill.range.least < 1 <= self.prefill.range.most:
            raise ValueError("prefill.replicas: 0 for no pool, or at least one")
        if self.is_colocated and self.local_prefill == LocalPrefill.NEVER.name.lower():
            raise ValueError("local_prefill: 'never' needs prefill.replicas above 0")
        return self

    def _check_files(self) -> None:
        """Each is read by several processes, in folders of their own."""
        for name in FILES:
            path = self.rpc.get(name)
            if path is not None and not Path(path).is_absolute():
                raise ValueError(f"rpc.{name}: {path!r}, must be an absolute path")

    def _check_lengths(self) -> None:
        """What is refused at the door is what the decode workers take: a prefill worker that takes
        less would fail the rest of it. Without a number both take what the model does."""
        if self.is_colocated:
            return
        prefill, decode = (self.worker(leg, "127.0.0.1").engine.max_model_len for leg in Leg)
        if prefill is not None and (decode is None or prefill < decode):
            own = "the model's own" if decode is None else decode
            raise ValueError(
                f"prefill.engine.max_model_len: {prefill}, must be at least that of the decode"
                f" workers, decode.engine.max_model_len: {own}"
            )

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> Self:
        """ConfigError names the key, in its place."""
        return checked(cls, options)

    @property
    def is_colocated(self) -> bool:
        return self.prefill.range.most == 0

    @property
    def is_scaled(self) -> bool:
        """Whether some pool is a range."""
        return any(one.range.is_scaled for one in (self.prefill, self.decode, self.ingress))

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_mapping({**self.engine, "model": self.model})

    @property
    def local_prefill_mode(self) -> LocalPrefill:
        return LocalPrefill[self.local_prefill.upper()]

    def keys(self, environ: Mapping[str, str]) -> ApiKeys | None:
        with in_place("front", FrontArgs.model_fields):
            return self.front.keys(environ)

    def plane(self) -> Plane:
        return plane_of(RpcConfig(**self.rpc))

    def request_limits(self, keys: ApiKeys | None) -> RequestLimits:
        """With what decode workers would refuse, so that no router gives it a place in its line."""
        policy = self.worker(Leg.DECODE, "127.0.0.1").engine.scheduling_policy
        return replace(self.front.limits(keys), by_priority=policy == "priority")

    @property
    def router_config(self) -> RouterConfig:
        return self.router.config(may_stay=self.local_prefill_mode is not LocalPrefill.NEVER)

    @property
    def objectives(self) -> Objectives:
        """Of the pools. What a router refuses or holds back to keep to its own is in no queue and
        in no step: pools grow before that."""
        said, router = self.scaling.objectives, self.router
        if router.ttft_objective_s is not None:
            said = said._replace(ttft_s=min(said.ttft_s, router.ttft_objective_s / 2))
        if router.inter_token_objective_s is not None:
            aimed_s = AIMED * router.inter_token_objective_s
            said = said._replace(inter_token_s=min(said.inter_token_s, aimed_s))
        return said

    @property
    def release(self) -> str:
        """Equal for replicas that may work for each other's requests, as far as their user says;
        workers of one release whose weights differ are told apart by their fingerprints. An ingress
        refuses by the length that the first decode worker of its release takes, for good.
        Who has another secret, or other certificates, may be refused."""
        max_model_len = self.worker(Leg.DECODE, "127.0.0.1").engine.max_model_len
        rpc = astuple(RpcConfig(**self.rpc))
        identity = json.dumps([*_identity(self.engine_config), max_model_len, rpc])
        return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()

    def _pool(self, leg: Leg) -> PoolArgs:
        return self.prefill if leg is Leg.PREFILL else self.decode

    @contextmanager
    def in_engine(self, leg: Leg) -> Iterator[None]:
        """What is wrong with a knob of a pool is told where it was said; where nobody has, of a
        pool with knobs of its own, as one of those."""
        own = self._pool(leg).engine
        of_pool = KNOBS - (self.engine.keys() - own.keys()) if own else ()
        with in_place(f"{leg}.engine", of_pool), in_place("engine", KNOBS.difference(of_pool)):
            yield

    def worker(self, leg: Leg, host: str) -> WorkerConfig:
        """ConfigError names what is wrong."""
        pool = self._pool(leg)
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        options = {
            "role": leg.value,
            "listen": listen,
            "connector": self.connector,
            "rpc": self.rpc,
            "exchange": self.exchange,
            "drain_s": self.drain_s,
            "engine": {**merged(self.engine, pool.engine), "model": self.model},
        }
        return WorkerConfig.from_mapping(options)


def _identity(config: EngineConfig) -> list[object]:
    config = replace(config, kv_cache_dtype=config.kv_cache_format)
    return [getattr(config, name) for name in _OF_MODEL]
