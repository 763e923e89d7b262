"""How the sampler's functions are compiled.

`error_model` numpy leaves out division checks, which keep loops from becoming vectors. Nothing
is relaxed about floats: every operation rounds once, in the order written (said explicitly, or
Numba would take over what the first caller allows). What is cached on disk are the entry points
(see launch.py), with all that they call inside.
"""

from numba import njit

from engine.kernels.cpu.pipeline import KernelPipeline

# Leaving out the wrappers that only Python needs saves a fifth of the compile time.
_options = {
    "error_model": "numpy",
    "fastmath": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": KernelPipeline,
}
compiled = njit(**_options)

# A call that LLVM chooses not to inline would keep the loop around it from becoming vectors.
inlined = njit(**_options, forceinline=True)
