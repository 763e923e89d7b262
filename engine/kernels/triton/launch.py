"""One launch of a kernel as a value, so that the same arguments run it or only compile it."""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """`args` are the kernel's leading parameters in order, `constants` its constexprs by name.

    Every number comes from shapes and from the host-side summary of a step: making a launch
    never waits for the device. Launches run on the current CUDA device.
    """

    kernel: Any  # what triton.jit made
    grid: tuple[int, ...]
    args: tuple[object, ...]
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 2
    fused: bool = True  # multiply and add with one rounding

    @property
    def options(self) -> dict[str, Any]:
        """Of its compilation."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.fused,  # of which the default differs by release
        }

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](*self.args, **self.constants, **self.options)
