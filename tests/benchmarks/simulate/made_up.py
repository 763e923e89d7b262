"""Small devices and traffic whose times can be computed by hand."""

from benchmarks.simulate.device import Device
from benchmarks.simulate.traffic import Request, block_name, full_blocks
from router.workers import LinkSpeed

BLOCK = 16


def plain_device(num_blocks: int = 256) -> Device:
    """A prompt token takes 1 ms, a step 10 ms beside it; a decode step 20 ms whatever it reads. A
    token of cache crosses a link in 0.1 ms, and the last one takes 5 ms longer."""
    return Device(
        flops_per_s=1e6,
        bytes_per_s=1e6,
        prompt_step_s=0.01,
        decode_step_s=0.02,
        weight_bytes=0.0,
        layer_parameters=500.0,
        head_parameters=0.0,
        pair_flops=0.0,
        kv_token_bytes=1,
        block_tokens=BLOCK,
        num_blocks=num_blocks,
        link=LinkSpeed(10_000.0, 0.005),
    )


def request(
    number: int, at_s: float, num_tokens: int, num_output: int, text: str = "", shared: int = 0
) -> Request:
    """The first `shared` blocks are those of the text."""
    blocks = range(full_blocks(num_tokens, num_output, BLOCK))
    names = [block_name(f"{text if i < shared else number} {i}") for i in blocks]
    return Request(number, at_s, num_tokens, num_output, tuple(names))
