"""What the replicas of one application say, brought here by Ray, as it brings a driver all that the
workers of its own job say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.worker import global_worker


def hear(application: str, say: Callable[[str], None]) -> None:
    """From now on; of nobody else on the cluster, which this process has joined without their
    words (`log_to_driver=False`)."""
    of_replicas = f"ServeReplica:{application}:"

    def pass_on(said: Mapping[str, Any]) -> None:
        name = str(said.get("actor_name") or "")
        if name.startswith(of_replicas):
            pool = name.removeprefix(of_replicas)
            for line in said["lines"]:
                say(f"({pool} pid={said['pid']}, ip={said['ip']}) {line}")

    global_worker_stdstream_dispatcher.add_handler("kvrelay", pass_on)
    # Replicas are of the job that has started Serve, which is not always ours.
    global_worker._filter_logs_by_job = False
    reader = threading.Thread(target=global_worker.print_logs, name="replica words", daemon=True)
    # ray.shutdown() waits for it.
    global_worker.logger_thread = reader  # type: ignore[attr-defined]
    reader.start()


def hush() -> None:
    """From now on nothing of what a cluster of our own says is shown: one that is ended in the
    middle of its start tells of all that it could not finish."""
    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")  # Ray's own


def stop_listening() -> None:
    """To a head that is gone: Ray's two threads would ask it again and again without a pause, which
    took 1.65 of two cores from those who still answer."""
    global_worker.threads_stopped.set()
