"""The language of the compiled kernels: 16-lane vectors, jobs, and how to add an instruction.

Numba compiles Python loops over numbers; what it has no word for is added as *instructions*,
functions that write their LLVM IR where a kernel calls them. Vectors are plain LLVM vectors, so
a CPU without 512-bit registers runs the same kernels in halves or quarters.

A kernel's first argument is a *job*: the address of the 64-bit words it was called with. The
job's type carries the element type of the tensors, which is how one kernel's source serves all:
`f32`, `f16`, `bf16`, `bf16_dot`, the same memory as bf16 with products in pairs by
`vdpbf16ps` (no conversion to fp32: 2.5 times as fast, on CPUs with AVX512-BF16 only), and
`bf16_tiles`, which is `bf16_dot` for all but products of tiles, on CPUs with AMX. `_narrow` stands
behind it on CPUs with sixteen registers of eight lanes; where what is read is stored
otherwise, its format does, behind a plus: a quantised cache's, as in `bf16_dot+int8`, or that of
weights, `bf16_dot+short`.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import (
    intrinsic,
    lower_builtin,
    register_jitable,
    register_model,
    type_callable,
)

from engine.kernels.cpu.emit import FLOATS, I64, INTS, splat_of
from engine.kernels.cpu.pipeline import KernelPipeline


class Vector(types.Type):
    """Sixteen fp32 or int32 lanes; the int32 ones may hold pairs of bf16."""

    def __init__(self, name: str, llvm: ir.Type) -> None:
        self.llvm = llvm
        super().__init__(name=name)


class Job(types.Type):
    """The words of one call, the element type of its tensors, and the format of what is
    stored otherwise."""

    def __init__(self, element: str) -> None:
        computed, _, self.stored = element.partition("+")
        self.has_tiles = computed == "bf16_tiles"
        self.narrow = computed.endswith("_narrow")
        self.element = "bf16_dot" if self.has_tiles else computed.removesuffix("_narrow")
        super().__init__(name=f"Job({element})")


# For functions that kernels call: they are only ever compiled into a kernel.
part_of_kernel = register_jitable(
    no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=KernelPipeline
)


floats = Vector("floats", FLOATS)


ints = Vector("ints", INTS)


JOB = object()  # stands for the job in the signature of an instruction; see `instruction`


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


@register_model(Job)
class JobModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, job: Job) -> None:
        super().__init__(manager, job, ir.PointerType(I64))


def instruction(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that writes IR callable from kernels.

    It is given the IR builder and the values of its parameters; for `JOB`, always the first,
    the pointer, the element type, whether there are products of tiles, the format of what is
    stored otherwise, or nothing, and whether registers are few and narrow.
    """

    def wrap(write: Callable[..., Any]) -> Any:
        def define(context: Any, *arguments: Any) -> Any:
            accepted = list(parameters)
            if JOB in parameters:
                accepted[0] = arguments[0]

            def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
                if JOB in parameters:
                    job = accepted[0]
                    known = job.element, job.has_tiles, job.stored, job.narrow
                    values = [(values[0], *known), *values[1:]]
                written = write(builder, *values)
                return target.get_dummy_value() if result is types.void else written

            return result(*accepted), generate

        # Numba reads names and number of arguments off the signature; the builder's stands for
        # the typing context there.
        define.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        define.__name__ = write.__name__
        return intrinsic(define)

    return wrap


def _binary(operation: Any, method: str) -> None:
    """`vector op vector` and `vector op number` in kernels."""

    @type_callable(operation)
    def typed(context: Any) -> Any:
        def result(x: Any, y: Any) -> Any:
            numbers = isinstance(y, types.Float) or y is floats
            return floats if x is floats and numbers else None

        return result

    @lower_builtin(operation, floats, floats)
    def on_vectors(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return getattr(builder, method)(*values)

    @lower_builtin(operation, floats, types.Float)
    def on_number(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = context.cast(builder, values[1], signature.args[1], types.float32)
        return getattr(builder, method)(values[0], splat_of(builder, number))


for _operation, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _binary(_operation, _method)
