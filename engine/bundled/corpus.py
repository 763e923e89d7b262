"""The text every machine with CPython has: standard library source, docstrings, help topics."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import NamedTuple

LEFT_OUT = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "encodings"),
    *(
        "distutils",
        "turtledemo",
        "_bundled",
        "__pycache__",
        "pydoc_data",
        "__phello__",
        "dist-packages",
    ),
}
# Implementation modules under the names that people import.
PUBLIC_NAMES = {
    "posixpath": "os.path",
    "_pyio": "io",
    "_pydecimal": "decimal",
    "_pydatetime": "datetime",
    "_collections_abc": "collections.abc",
    "_weakrefset": "weakref",
    "concurrent.futures._base": "concurrent.futures",
    "concurrent.futures.process": "concurrent.futures",
    "concurrent.futures.thread": "concurrent.futures",
    "unittest.case": "unittest",
    "posix": "os",
}
# Packages whose modules are an implementation detail: people write `asyncio.sleep`.
FLATTENED = ("asyncio", "multiprocessing", "json")
LONGEST_SOURCE_LINES = 30
# One module or topic in this many is kept from training, to measure on.
HELD_OUT_ONE_IN = 40


class Entry(NamedTuple):
    """A documented function, class or method; `source` is empty when it is long or in C."""

    name: str
    signature: str
    doc: str
    source: str


class Module(NamedTuple):
    """One importable module with what it documents; `source` is empty for C modules."""

    name: str
    doc: str
    source: str
    entries: tuple[Entry, ...]


class Topic(NamedTuple):
    """A page of the language reference as `help()` shows it."""

    title: str
    text: str


class Corpus(NamedTuple):
    """All text of one interpreter, or one side of its training/held-out split."""

    modules: tuple[Module, ...]
    topics: tuple[Topic, ...]


def read_corpus() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    written = [m for path in python_files(root) if (m := read_module(root, path)) is not None]
    compiled = [inspect_module(module) for module in compiled_modules()]
    return Corpus(tuple(written + compiled), tuple(read_topics()))


def split_held_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Training and held-out text; a paragraph of the latter never stays in a training topic."""
    held_modules = tuple(m for m in corpus.modules if is_held_out(m.name))
    held_topics = tuple(t for t in corpus.topics if is_held_out(t.title))
    secret = {paragraph for topic in held_topics for paragraph in topic.text.split("\n\n")}
    kept_topics = (
        Topic(t.title, "\n\n".join(p for p in t.text.split("\n\n") if p not in secret))
        for t in corpus.topics
        if not is_held_out(t.title)
    )
    kept_modules = tuple(m for m in corpus.modules if not is_held_out(m.name))
    return Corpus(kept_modules, tuple(kept_topics)), Corpus(held_modules, held_topics)


def is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def python_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT.intersection(path.relative_to(root).parts):
            yield path


def read_module(root: Path, path: Path) -> Module | None:
    """None for a file that this interpreter cannot decode or parse."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None
    name = public_name(path.relative_to(root))
    entries = tuple(parsed_entries(tree.body, name, source.splitlines()))
    return Module(name, ast.get_docstring(tree) or "", source, entries)


def public_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return PUBLIC_NAMES.get(name, name)


def parsed_entries(body: list[ast.stmt], prefix: str, lines: list[str]) -> Iterator[Entry]:
    flat = next((f for f in FLATTENED if prefix.startswith(f + ".")), prefix)
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{flat}.{node.name}"
        doc = ast.get_docstring(node) or ""
        if doc and not node.name.startswith("_"):
            yield Entry(name, name + arguments(node), doc, short_source(node, lines))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from parsed_entries(node.body, name, lines)


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The argument list as it is called: without `self` or `cls`, a class by its `__init__`."""
    if isinstance(node, ast.ClassDef):
        inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        return arguments(inits[0]) if inits else ""
    text = ast.unparse(node.args)
    first, _, rest = text.partition(", ")
    return f"({rest})" if first in ("self", "cls", "self, /") else f"({text})"


def short_source(node: ast.stmt, lines: list[str]) -> str:
    last = node.end_lineno or node.lineno
    if last - node.lineno >= LONGEST_SOURCE_LINES:
        return ""
    return inspect.cleandoc("\n" + "\n".join(lines[node.lineno - 1 : last]))


def compiled_modules() -> Iterator[ModuleType]:
    """Modules written in C: importing them runs no Python code of theirs."""
    names = set(sys.builtin_module_names)
    dynamic = Path(sysconfig.get_path("stdlib"), "lib-dynload")
    names.update(module.name for module in pkgutil.iter_modules([str(dynamic)]))
    for name in sorted(names):
        if name.startswith(("_xx", "xx")) or "test" in name:
            continue
        try:
            yield importlib.import_module(name)
        except ImportError:
            continue


def inspect_module(module: ModuleType) -> Module:
    name = PUBLIC_NAMES.get(module.__name__, module.__name__.lstrip("_"))
    prefix = "" if name == "builtins" else name + "."
    entries = tuple(inspected_entries(vars(module), prefix))
    return Module(name, inspect.cleandoc(module.__doc__ or ""), "", entries)


def inspected_entries(namespace: Mapping[str, object], prefix: str) -> Iterator[Entry]:
    for key, value in sorted(namespace.items()):
        if key.startswith("_") or not callable(value):
            continue
        doc = inspect.cleandoc(value.__doc__ or "")
        if doc:
            yield Entry(prefix + key, prefix + key + inspected_arguments(value), doc, "")
        if isinstance(value, type) and not issubclass(value, BaseException):
            yield from inspected_entries(vars(value), f"{prefix}{key}.")


def inspected_arguments(value: object) -> str:
    text = str(getattr(value, "__text_signature__", None) or "")
    return re.sub(r"\(\$\w+(, /)?(, )?", "(", text)


def read_topics() -> Iterator[Topic]:
    for _, text in sorted(topics.items()):
        title, _, body = str(text).lstrip().partition("\n")
        yield Topic(title.replace('"', ""), body.lstrip("*=-~ \n").rstrip())
