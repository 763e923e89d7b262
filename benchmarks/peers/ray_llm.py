"""Ray Serve LLM's own prefill/decode application over vLLM; runs in vLLM's environment.

    python -m benchmarks.peers.ray_llm PORT MODEL MODEL_NAME CORE,CORE KV_BYTES MAX_LEN DTYPE

As it comes, on CPUs: its front is Serve's default proxy, each engine has a core of its own.
"""

import signal
import sys
import threading
from typing import Any

import ray
from ray import serve

SIDE_CHANNEL_PORTS = {"prefill_config": 20400, "decode_config": 22400}


def engine(
    model: str, name: str, core: str, port: int, kv_bytes: int, max_len: int, dtype: str
) -> Any:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return {
        "model_loading_config": {"model_id": name, "model_source": model},
        "accelerator_type": None,
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {
            "max_model_len": max_len,
            "dtype": dtype,
            "kv_cache_memory_bytes": kv_bytes,
            "kv_transfer_config": transfer,
        },
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        "experimental_configs": {"NIXL_SIDE_CHANNEL_PORT_BASE": port},
        "runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": core}},
    }


def main() -> None:
    port, model, name, cores, kv_bytes, max_len, dtype = sys.argv[1:8]
    configs = {
        key: engine(model, name, core, side_port, int(kv_bytes), int(max_len), dtype)
        for (key, side_port), core in zip(SIDE_CHANNEL_PORTS.items(), cores.split(","), strict=True)
    }
    # Ray counts CPUs; that they are more than there are lets it place everything on one machine.
    ray.init(address="local", num_cpus=16, include_dashboard=False)
    # Importing vLLM binds a process to one core, and Ray's own would inherit that.
    from ray.serve.llm import build_pd_openai_app

    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build_pd_openai_app(configs), blocking=False)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    ray.shutdown()


if __name__ == "__main__":
    main()
