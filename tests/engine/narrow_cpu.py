"""An engine as a lesser CPU has it, whatever this one is: `python -m` it with a model's folder, its
type and prompts, and `NUMBA_CPU_NAME` says for which CPU its kernels are compiled. It tells the
answers and the kernels.

Sampler and compiling ahead are not what is looked at, and would take as long again.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from engine import assemble
from engine import engine as engine_module
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.cpu import compiled, features
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kept import Kept
from engine.request import GenerationRequest, RequestId
from engine.sampler.interface import Sampler
from engine.sampler.registry import load_sampler
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams

FEATURES = {
    "haswell": CpuFeatures(False, False, False, narrow_registers=True),  # AVX2 alone
    "nehalem": CpuFeatures(False, False, False),  # and not even that
}


class Noted(Kept):
    names: ClassVar[list[str]] = []

    def __init__(self, folder: Path, function: Callable[[Any], None], element: str) -> None:
        super().__init__(folder, function, element)
        self.names.append(self.file.name.rpartition("-")[0])


def reference_sampler(_: str, device: torch.device, table: SamplingTable) -> Sampler:
    return load_sampler("reference", device, table)


def main() -> None:
    folder, dtype, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    config = EngineConfig(folder, dtype=dtype, num_threads=1, kv_cache_memory_bytes=4 << 20)
    found = FEATURES[os.environ["NUMBA_CPU_NAME"]]
    with (
        patch.object(features, "_of_this_machine", lambda: found),
        patch.object(assemble, "load_sampler", reference_sampler),
        patch.object(engine_module, "_compile_kernels"),
        patch.object(compiled, "Kept", Noted),
    ):
        engine = Engine.create(config)
    answers: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(RequestId(str(number)), prompt, params))
    while engine.has_work:
        output = engine.step()
        assert not output.failures
        for request_id, update in output.updates.items():
            for delta in update.deltas:
                answers[int(request_id)] += delta.token_ids
    sys.stdout.write(json.dumps([answers, Noted.names]))


if __name__ == "__main__":
    main()
