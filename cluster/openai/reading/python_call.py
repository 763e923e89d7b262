"""Tool calls as Python writes them: f(a=1, b="x"). They are parsed and never run."""

from __future__ import annotations

import ast
import json
from typing import NamedTuple

# What schemas say, and so models do.
_JSON_WORDS = {"true": True, "false": False, "null": None}


class PythonCall(NamedTuple):
    name: str
    arguments: str  # JSON

    @classmethod
    def read(cls, node: ast.expr) -> PythonCall:
        """ValueError or TypeError for what is no call, or whose arguments are not all named
        literals that JSON has too."""
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("no call with named arguments")
        values = {}
        for word in node.keywords:
            if word.arg is None:
                raise ValueError("arguments without names")
            values[word.arg] = ast.literal_eval(_JsonWords().visit(word.value))
        return cls(_name(node.func), json.dumps(values, ensure_ascii=False, allow_nan=False))


def python_calls(code: str) -> list[PythonCall] | None:
    """Of a call or a list of calls; None for anything else."""
    try:
        node = ast.parse(code, mode="eval").body
        return [
            PythonCall.read(one) for one in (node.elts if isinstance(node, ast.List) else [node])
        ]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=of, attr=name):
            return f"{_name(of)}.{name}"
    raise ValueError("a call of no name")
