"""An environment with a tool: a model learns from rewards to ask a calculator.

    postlude grpo recipes/calculator.yaml

A turn that begins with "?" is a call: the rest is calculated, and the model reads the result. Any other turn is the
answer. Half of the examples of the warm start ask, the other half give up with "-"; that asking earns something, only
rewards tell. `reply` keeps nothing between turns and runs in processes of its own, where it may also fail.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def reply(prompt: str, completions: list[str], example: Mapping[str, Any]) -> str | dict[str, float]:
    """The result of a call as text to read, or what an answer earns."""
    said = completions[-1]
    if said.startswith("?"):
        return f"={calculate(said[1:])};"
    right = said == str(example["sum"])
    return {"reward": float(right), "asked": float(len(completions) > 1)}


def calculate(expression: str) -> str:
    """An expression of whole numbers; what it cannot be is an error, for the model to read."""
    try:
        return str(_value(ast.parse(expression[:32], mode="eval").body))
    except (SyntaxError, ValueError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.dump(node)} is nothing to calculate")
