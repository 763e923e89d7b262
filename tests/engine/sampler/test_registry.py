import subprocess
import sys

import pytest
import torch

from engine.sampler.cpu.sampler import CpuSampler
from engine.sampler.reference import ReferenceSampler
from engine.sampler.registry import load_sampler
from engine.sampler.table import SamplingTable


@pytest.mark.parametrize(
    ("name", "kind"), [("auto", CpuSampler), ("cpu", CpuSampler), ("reference", ReferenceSampler)]
)
def test_twin_of_a_cpu(name: str, kind: type) -> None:
    assert isinstance(load_sampler(name, torch.device("cpu"), SamplingTable(1, 8)), kind)


def test_one_twin_imports_nothing_of_the_others() -> None:
    code = (
        "import sys, torch; from engine.sampler.registry import load_sampler; "
        "from engine.sampler.table import SamplingTable; "
        "load_sampler('reference', torch.device('cpu'), SamplingTable(1, 8)); "
        "print([m for m in ('numba', 'triton.language', 'engine.sampler.cpu') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
