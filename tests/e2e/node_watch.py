"""Which nodes a Ray cluster takes for alive: a JSON list of their addresses, after each change the
Unix time and the list. Runs on the head, until its standard input ends.

python -m tests.e2e.node_watch ADDRESS
"""

import json
import sys
import threading
import time

import ray

PERIOD_S = 0.2


def main() -> None:
    threading.Thread(target=_watch, daemon=True).start()
    sys.stdin.read()


def _watch() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False)
    before = None
    while True:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = sorted(node["NodeManagerAddress"] for node in nodes if node["Alive"])
        if alive != before:
            sys.stdout.write(json.dumps([time.time(), alive]) + "\n")
            sys.stdout.flush()
            before = alive
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    main()
