"""What traffic is like: lengths, rate, and what caches of several sizes find again."""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.simulate.arguments import source_of
from benchmarks.simulate.likeness import describe
from benchmarks.simulate.report import likeness_table
from benchmarks.simulate.synthetic import GENERATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(words: argparse.Namespace) -> Mapping[str, Any]:
    requests = source_of(words).requests(words.speed)
    found = describe(requests).figures()
    imitated = {} if words.trace else GENERATORS[words.synthetic]().imitated
    print(f"{len(requests):,} requests\n\n{likeness_table(found, imitated)}")
    return found
