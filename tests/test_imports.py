"""Who may import whom: layers downward only, and each heavy dependency in its own place.

Layers are checked over every import; the torch rule over what importing a module runs, our own
modules in between included. An import inside a function costs only whoever calls it.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    {"cluster"},
    {"router", "decode_worker"},
    {"prefill_worker"},  # a decode worker hands out and computes prompts like one
    {"engine", "kv_transfer"},
    {"kv_cache", "protos"},
)
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}

# A name stands for the module and, if it is a package, for all that is in it.
ALLOWED_IN = {
    "ray": ("cluster",),
    "nixl": ("kv_transfer.nixl",),
    "llguidance": ("engine.grammar.library",),
    "prometheus_client": ("cluster.metrics",),
    "grpc": (
        "protos",
        "kv_transfer",
        "decode_worker.service",
        "cluster.session",
        "cluster.replicas.token_service",
        "router.subscriber",
    ),
}

# Importing these must not import torch, nor what brings it along: the router, the policies and
# all that the HTTP ingress runs.
WITHOUT_TORCH = (
    "cluster",
    "router",
    "protos",
    "kv_cache",
    "engine.checkpoint",
    "engine.config",
    "engine.control_groups",
    "engine.errors",
    "engine.fingerprint",
    "engine.generation_defaults",
    "engine.grammar",
    "engine.machine",
    "engine.memory",
    "engine.model_source",
    "engine.models.describe",
    "engine.models.interface",
    "engine.models.parse_config",
    "engine.request",
    "engine.sampling",
    "engine.scheduler",
    "engine.step",
    "engine.text",
    "engine.watchdog",
)
# What time it is, and who runs beside them, these are told: so they can be simulated and replayed.
WITHOUT_CLOCK = (
    "kv_cache",
    "router",
    "engine.scheduler",
    "engine.sampling",
    "engine.step_times",
    "engine.watchdog",
)
MAY_USE_CLOCK = ("router.subscriber",)
CLOCKS = ("time", "datetime", "threading", "asyncio")
MAY_USE_TORCH = ("kv_cache.slab", "engine.grammar.table")
BRINGS_TORCH = ("torch", "transformers", "safetensors.torch", "triton")
OF_THE_FRONT = ("jinja2", "tokenizers", "starlette", "uvicorn", "prometheus_client")


def is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in RANK:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


def imported(node: ast.AST) -> Iterator[str]:
    """Full names: `from a import b` may mean the module a.b, so both are given."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute, so that a reader can search for them"
        assert node.module
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def all_imports(module: str) -> list[tuple[int, str]]:
    """With their lines, wherever they are."""
    return [
        (getattr(node, "lineno", 0), name)
        for node in ast.walk(tree(module))
        for name in imported(node)
    ]


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported: no function bodies, no types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (n for branch in child.orelse for n in [branch, *run_on_import(branch)])
            continue
        yield child
        yield from run_on_import(child)


@cache
def direct_imports(module: str) -> frozenset[str]:
    names = {name for node in run_on_import(tree(module)) for name in imported(node)}
    parents = {module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)}
    return frozenset(names | (parents & modules().keys()))


def path_to(start: str, heavy: tuple[str, ...]) -> list[str] | None:
    """The chain of imports by which `start` loads one of these."""
    came_from = {start: ""}
    queue = [start]
    for module in queue:
        for name in sorted(direct_imports(module) - came_from.keys()):
            came_from[name] = module
            if is_in(name, heavy):
                chain = [name]
                while came_from[chain[-1]]:
                    chain.append(came_from[chain[-1]])
                return chain[::-1]
            if name in modules():
                queue.append(name)
    return None


def test_layers_import_downward_only() -> None:
    wrong = []
    for module in modules():
        package = module.split(".")[0]
        for line, name in all_imports(module):
            target = name.split(".")[0]
            if target == package:
                continue
            if target in ("tests", "benchmarks") or RANK.get(target, len(LAYERS)) <= RANK[package]:
                wrong.append(f"{module}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dependency", ALLOWED_IN)
def test_dependency_stays_in_its_place(dependency: str) -> None:
    wrong = [
        module
        for module in modules()
        if not is_in(module, ALLOWED_IN[dependency])
        if any(is_in(name, (dependency,)) for _, name in all_imports(module))
    ]
    assert not wrong, f"{dependency} is imported by {wrong}"


def test_policies_and_ingress_load_no_torch() -> None:
    pure = [m for m in modules() if is_in(m, WITHOUT_TORCH) and not is_in(m, MAY_USE_TORCH)]
    chains = [" -> ".join(chain) for m in pure if (chain := path_to(m, BRINGS_TORCH))]
    assert not chains, "\n".join(chains)


def test_status_loads_no_front() -> None:
    """What it takes is nearly all imports; what of them is Ray's and Serve's is not ours to say."""
    assert path_to("cluster.status.gather", OF_THE_FRONT) is None


def test_policies_have_no_clock_and_no_threads() -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module in modules()
        if is_in(module, WITHOUT_CLOCK) and not is_in(module, MAY_USE_CLOCK)
        for line, name in all_imports(module)
        if is_in(name, CLOCKS)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_names_what_exists() -> None:
    allowed = [name for names in ALLOWED_IN.values() for name in names]
    existing = [
        name
        for name in (*WITHOUT_TORCH, *MAY_USE_TORCH, *WITHOUT_CLOCK, *MAY_USE_CLOCK, *allowed)
        if (ROOT / name.split(".")[0]).is_dir()
    ]
    assert not [name for name in existing if name not in modules()]
