"""Routing at scale, simulated.

python -m benchmarks.simulate compare --trace FILE --speed 3.5
python -m benchmarks.simulate compare --ideal --trace FILE
python -m benchmarks.simulate peak --trace FILE --policy cost --policy round-robin
python -m benchmarks.simulate colocated --trace FILE --budgets 512,2048,8192
python -m benchmarks.simulate routers --trace FILE --counts 1,2,4,8
python -m benchmarks.simulate cells --workers 1000
python -m benchmarks.simulate describe --synthetic sessions --seconds 3537
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.simulate import arguments
from benchmarks.simulate.commands import cells, colocated, compare, describe, peak, routers
from engine.errors import ConfigError

Command = Callable[[argparse.Namespace], Mapping[str, Any]]


def main() -> int:
    words = _parser().parse_args()
    try:
        found = words.command(words)
        if words.json:
            words.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.simulate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module, speed in (
        (compare, None),
        (peak, 3.0),
        (colocated, 3.0),
        (routers, 1.0),
        (cells, 1.0),
        (describe, 1.0),
    ):
        name = module.__name__.rpartition(".")[2]
        summary = (module.__doc__ or "").splitlines()[0]
        one = commands.add_parser(name, help=summary, description=summary)
        arguments.add_traffic(one, speed)
        if module is not describe:
            arguments.add_cluster(one)
        arguments.add_output(one, pictures=module not in (cells, describe))
        module.add_arguments(one)
        one.set_defaults(command=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
