"""One launch of a kernel as a value, so that the same arguments run it or only compile it."""

from typing import Any, NamedTuple

OPTIONS = {"enable_fp_fusion": True}  # of every compilation; the default differs by release


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

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            *self.args,
            **self.constants,
            **OPTIONS,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )
