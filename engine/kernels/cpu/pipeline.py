"""What Numba does with a function of a kernel, before LLVM.

Kernels have no closures, no exceptions, no `with`, nothing to unroll or to inline on this level:
without the passes that look for those, after each of which Numba analyses the function anew, a
kernel compiles in a tenth less time, to the same machine code.
"""

from typing import Any

from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)

PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    DeadBranchPrune,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
)


class KernelPipeline(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        manager = PassManager("kernel")
        for one in PASSES:
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]
