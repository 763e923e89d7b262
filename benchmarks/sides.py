"""How each engine under measure is started."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import Child
from benchmarks.workloads import WEIGHT_BYTES, ModelShape

KV_BYTES = 512 << 20  # for every engine; the largest workload needs 250 MB
OURS, VLLM = "kvrelay", "vllm"


@dataclass(frozen=True)
class Folders:
    """`caches` is where engines keep what they compiled, in place of where they would."""

    models: Path
    logs: Path
    caches: Path | None = None


@dataclass(frozen=True)
class SideSpec:
    name: str
    python: Path
    module: str
    environment: Mapping[str, str]
    cache_variables: tuple[str, ...]
    words: tuple[str, ...] = ()  # further arguments

    def start(self, shape: ModelShape, folders: Folders, *, settled: bool) -> Child:
        """Settled means that the engine touches its memory before it answers."""
        command = [str(self.python), "-m", self.module, str(folders.models / shape.name)]
        command += ["--kv-bytes", str(KV_BYTES), "--num-parameters", str(shape.num_parameters)]
        command += self.words
        if settled:
            command.append("--settled")
        environment = dict(self.environment)
        if folders.caches:
            caches = str(folders.caches / self.name)
            environment |= dict.fromkeys(self.cache_variables, caches)
        return Child(command, environment, folders.logs / f"{self.name}.log")


def ours() -> SideSpec:
    return SideSpec(
        OURS, Path(sys.executable), "benchmarks.peers.kvrelay_offline", {}, ("NUMBA_CACHE_DIR",)
    )


@dataclass(frozen=True)
class Vllm:
    """`python` is of the environment that has it; not resolved, as the link's own place is what
    makes it an environment's."""

    python: Path
    dtype: str = "auto"

    @property
    def weight_bytes(self) -> int:
        return 4 if self.dtype == "float32" else WEIGHT_BYTES


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-python", type=Path, help="of the environment that has vLLM")
    parser.add_argument(
        "--vllm-dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of vLLM's weights and cache; default: the model's, which is bfloat16. It multiplies"
        " float32 faster on a CPU without instructions for bfloat16",
    )


def chosen_vllm(arguments: argparse.Namespace) -> Vllm | None:
    python: Path | None = arguments.vllm_python
    return Vllm(python.absolute(), arguments.vllm_dtype) if python else None


def vllm(peer: Vllm, cores: Sequence[int]) -> SideSpec:
    """As it comes, its model in a process of its own, with what its documentation advises for a
    CPU: all cores for it, and the OpenMP library and the allocator it asks for loaded first,
    where they are there."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cores)),
    }
    if libraries := _preloaded(peer.python):
        environment["LD_PRELOAD"] = ":".join(libraries)
    variables = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    module = "benchmarks.peers.vllm_offline"
    return SideSpec(VLLM, peer.python, module, environment, variables, ("--dtype", peer.dtype))


def _preloaded(python: Path) -> list[str]:
    places = (
        (python.parents[1] / "lib", "libiomp5.so"),
        (Path("/usr/lib/x86_64-linux-gnu"), "libtcmalloc_minimal.so.4"),
    )
    return [str(folder / name) for folder, name in places if (folder / name).exists()]
