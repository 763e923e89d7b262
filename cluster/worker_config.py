"""What `kvrelay worker` needs to know: a YAML file, flags, or both."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from cluster.validation import in_place
from engine.config import KNOBS, EngineConfig, type_words
from engine.errors import ConfigError
from kv_transfer.config import ExchangeConfig
from protos.address import MAX_PORT, Address
from protos.errors import PlaneError
from protos.rpc import Plane, RpcConfig

_Choice = TypeVar("_Choice", bound=StrEnum)

_ABOVE_0 = {"max_leases": 1 << 20, "max_quarantined_share": 1.0, "stuck_after_s": 3600.0}
_FROM_0 = {"unreachable_patience_s": 3600.0, "slow_bytes_per_s": 1e15}
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
# PyYAML's, of a date that there is not (2024-31-12), and of a tag that its text does not fit.
_NO_VALUE = (ValueError, LookupError, AttributeError)
UNSPECIFIED = ("0.0.0.0", "::")


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class ConnectorChoice(StrEnum):
    AUTO = "auto"
    NIXL = "nixl"
    SOCKET = "socket"
    COLLECTIVE = "collective"


# A prompt's time to its first token is what a prefill worker is for: short ones need not wait
# for long ones.
_ENGINE_DEFAULTS: Mapping[WorkerRole, Mapping[str, Any]] = {
    WorkerRole.PREFILL: {"scheduling_policy": "shortest"},
    WorkerRole.DECODE: {},
}


@dataclass(frozen=True)
class WorkerConfig:
    """Checked when made; unknown keys are errors that name them.

    `advertise` is the host that peers are told, where it is not that of `listen`. `drain_s`: how
    long a worker that is to end lets its requests go on.
    """

    role: WorkerRole
    listen: str = "127.0.0.1:0"
    connector: ConnectorChoice = ConnectorChoice.AUTO
    data_port: int = 0
    advertise: str | None = None
    drain_s: float = 30.0
    rpc: RpcConfig = field(default_factory=RpcConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        try:
            address = Address.parse(self.listen, "listen")
        except PlaneError as error:
            raise ConfigError(error.field, error.message) from error
        if not 0 <= self.data_port <= MAX_PORT:
            raise ConfigError("data_port", f"{self.data_port}, must be in 0..{MAX_PORT}")
        if self.data_port and self.data_port == address.port:
            raise ConfigError("data_port", f"{self.data_port}, which is that of `listen`")
        if not 0 <= self.drain_s <= 86400:
            raise ConfigError("drain_s", f"{self.drain_s}, must be in 0..86400")
        if address.host in UNSPECIFIED and self.advertise is None:
            message = f"must say how peers reach this machine, as {address.host} does not"
            raise ConfigError("advertise", message)

    @property
    def host(self) -> str:
        return Address.parse(self.listen).host

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """As in YAML: `rpc`, `exchange` and `engine` are mappings themselves."""
        values = dict(options)
        _check_keys("", values, {f.name for f in fields(cls)})
        if "role" not in values:
            raise ConfigError("role", f"must be given: {' or '.join(WorkerRole)}")
        values["role"] = _choice("role", values["role"], WorkerRole)
        if "connector" in values:
            values["connector"] = _choice("connector", values["connector"], ConnectorChoice)
        values["rpc"] = _rpc(_mapping("rpc", values.get("rpc")))
        values["exchange"] = _exchange(_mapping("exchange", values.get("exchange")))
        engine = {**_ENGINE_DEFAULTS[values["role"]], **_mapping("engine", values.get("engine"))}
        with in_engine(engine):
            values["engine"] = EngineConfig.from_mapping(engine)
        _check_type("listen", values, str)
        _check_type("advertise", values, str, type(None))
        _check_type("data_port", values, int)
        _check_type("drain_s", values, int, float)
        return cls(**values)


def in_rpc() -> AbstractContextManager[None]:
    """What is wrong with connections is told as `rpc` has it."""
    return in_place("rpc", [knob.name for knob in fields(RpcConfig)])


def in_engine(options: Collection[str] = ()) -> AbstractContextManager[None]:
    """What is wrong with knobs, those that are none among them, is told as `engine` has it."""
    return in_place("engine", KNOBS.union(options))


def plane_of(config: RpcConfig) -> Plane:
    with in_rpc():
        return Plane.load(config)


class _Loader(yaml.SafeLoader):
    """Refuses a name that stands twice in a mapping, of which the first would be lost, and one that
    YAML takes for something else than a text, such as 1 or yes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._place: list[str] = []  # of the node that is composed

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_value = parent is not None and index is not None
        if is_value:
            self._place.append(_as_written(index) if isinstance(index, yaml.Node) else str(index))
        node = super().compose_node(parent, index)
        if is_value:
            self._place.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As it is written: what is merged into it comes later."""
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag not in (_TEXT, _MERGE):
                name = _as_written(key)
                place = ".".join([*self._place, name])
                raise ConfigError(place, f'a name must be a text: "{name}", in quotes')
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if key.tag != _MERGE and names.count(key.value) > 1:
                raise yaml.composer.ComposerError(
                    None, None, f"{key.value!r} stands there twice", key.start_mark
                )
        return node


def _as_written(key: yaml.Node) -> str:
    return str(key.value) or "null"


def read_options(path: Path) -> dict[str, Any]:
    return only(read_documents(path), str(path))


def read_documents(path: Path) -> list[dict[str, Any]]:
    """What stands between the lines of `---`, but for nothing."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config", f"{path} is no YAML: {_in_one_line(error)}") from error
    return _parse_documents(text, str(path))


def parse_options(text: str, where: str) -> dict[str, Any]:
    return only(_parse_documents(text, where), where)


def only(documents: Sequence[dict[str, Any]], where: str) -> dict[str, Any]:
    if len(documents) > 1:
        raise ConfigError("config", f"{where} has {len(documents)} documents, must have one")
    return documents[0] if documents else {}


def _parse_documents(text: str, where: str) -> list[dict[str, Any]]:
    try:
        documents = list(yaml.load_all(text, _Loader))
    except (yaml.YAMLError, *_NO_VALUE) as error:
        raise ConfigError("config", f"{where} is no YAML: {_in_one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError("config", f"{where} is nested too deep") from error
    return [dict(_mapping("config", one)) for one in documents if one is not None]


def merged(options: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins, key by key in inner mappings too."""
    result = dict(options)
    for key, value in over.items():
        if isinstance(value, Mapping):
            value = merged(_mapping(key, result.get(key)), value)
        result[key] = value
    return result


def _rpc(options: Mapping[str, Any]) -> RpcConfig:
    _check_keys("rpc.", options, {f.name for f in fields(RpcConfig)})
    for name in options:
        _check_type(name, options, str, type(None), prefix="rpc.")
    return replace(RpcConfig(), **options)


def _exchange(options: Mapping[str, Any]) -> ExchangeConfig:
    _check_keys("exchange.", options, {f.name for f in fields(ExchangeConfig)})
    _check_bool("exchange.checksums", options.get("checksums", False))
    for name in options.keys() - {"checksums"}:
        types = (int,) if name == "max_leases" else (int, float)
        _check_type(name, options, *types, prefix="exchange.")
    config = replace(ExchangeConfig(), **options)
    for name, high in _ABOVE_0.items():
        value = getattr(config, name)
        if not 0 < value <= high:
            raise ConfigError(f"exchange.{name}", f"{value}, must be above 0, at most {high:.15g}")
    for name, high in _FROM_0.items():
        value = getattr(config, name)
        if not 0 <= value <= high:
            raise ConfigError(f"exchange.{name}", f"{value}, must be in 0..{high:.15g}")
    return config


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(name, f"{value!r}, must be true or false")


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, "must be a mapping from names to values")
    return value


def _check_keys(prefix: str, options: Mapping[str, Any], known: set[str]) -> None:
    for name in options:
        if name not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"{prefix}{name}", f"unknown option; known are {names}")


def _choice(name: str, value: object, choices: type[_Choice]) -> _Choice:
    for choice in choices:
        if choice == value:
            return choice
    raise ConfigError(name, f"{value!r}, must be {' or '.join(choices)}")


def _check_type(name: str, options: Mapping[str, Any], *types: type, prefix: str = "") -> None:
    if name not in options:
        return
    value = options[name]
    if not isinstance(value, types) or isinstance(value, bool):
        raise ConfigError(f"{prefix}{name}", f"{value!r}, must be {type_words(types)}")


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
