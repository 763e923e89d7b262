"""A worker as `kvrelay worker` makes it, by what a GPU machine has: no command line, no metrics.

python -m benchmarks.gpu.worker_process MODEL ROLE CONNECTOR

Says on a line where it is; its log, on standard error, says by what it is linked. Lives until it
is killed.
"""

import asyncio
import logging
import sys

from cluster.make_worker import start_worker
from cluster.worker_config import WorkerConfig
from engine.engine import Engine
from protos.rpc import Plane

KNOBS = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}


async def serve(config: WorkerConfig, engine: Engine) -> None:
    worker = await start_worker(config, Plane.load(config.rpc), engine)
    sys.stdout.write(f"{await worker.serve()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    model, role, connector = sys.argv[1:]
    engine_options = {**KNOBS, "model": model}
    made = WorkerConfig.from_mapping(
        {"role": role, "connector": connector, "engine": engine_options}
    )
    asyncio.run(serve(made, Engine.create(made.engine)))
