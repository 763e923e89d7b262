"""vLLM under measure; runs in an environment of its own, made by setup_vllm.sh.

Its scheduler and its model run in processes of their own, which is its default and was the fastest
way here; a step is the wait for its next tokens.
"""

import vllm
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from benchmarks.child import SideInfo, arguments, serve
from benchmarks.workloads import MAX_LEN


class VllmSide:
    def __init__(self, llm: vllm.LLM) -> None:
        self._engine = llm.llm_engine
        self._serial = 0
        self._indices: dict[str, int] = {}

    def add(self, index: int, prompt: list[int], num_output: int) -> None:
        self._serial += 1
        request_id = str(self._serial)
        self._indices[request_id] = index
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> dict[int, int]:
        return {
            self._indices[output.request_id.split("-")[0]]: len(output.outputs[0].token_ids)
            for output in self._engine.step()
        }


def start() -> tuple[VllmSide, SideInfo]:
    args = arguments()
    llm = vllm.LLM(
        args.model,
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        kv_cache_memory_bytes=args.kv_bytes,
        disable_log_stats=True,
    )
    weight_bytes = llm.llm_engine.model_config.dtype.itemsize
    return VllmSide(llm), SideInfo(
        vllm.__version__, args.num_parameters * weight_bytes, args.kv_bytes
    )


if __name__ == "__main__":
    serve(start)
