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


def python_calls(code: str, *, in_lines: bool = False) -> list[PythonCall] | None:
    """Of a call or a list of calls, or of several with lines of their own; None for anything
    else."""
    try:
        statements = ast.parse(code).body
        if len(statements) > 1 and not in_lines:
            return None
        return [call for one in statements for call in _calls(one)]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _calls(statement: ast.stmt) -> list[PythonCall]:
    if not isinstance(statement, ast.Expr):
        raise TypeError("a statement that is no expression")
    node = statement.value
    return [PythonCall.read(one) for one in (node.elts if isinstance(node, ast.List) else [node])]


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
