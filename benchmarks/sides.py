"""How each engine under measure is started."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import Child
from benchmarks.workloads import ModelShape

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

    def start(self, shape: ModelShape, folders: Folders, *, settled: bool) -> Child:
        """Settled means that the engine touches its memory before it answers."""
        command = [str(self.python), "-m", self.module, str(folders.models / shape.name)]
        command += ["--kv-bytes", str(KV_BYTES), "--num-parameters", str(shape.num_parameters)]
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


def vllm(python: Path, cores: Sequence[int]) -> SideSpec:
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
    if libraries := _preloaded(python):
        environment["LD_PRELOAD"] = ":".join(libraries)
    variables = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    return SideSpec(VLLM, python, "benchmarks.peers.vllm_offline", environment, variables)


def _preloaded(python: Path) -> list[str]:
    places = (
        (python.parents[1] / "lib", "libiomp5.so"),
        (Path("/usr/lib/x86_64-linux-gnu"), "libtcmalloc_minimal.so.4"),
    )
    return [str(folder / name) for folder, name in places if (folder / name).exists()]
