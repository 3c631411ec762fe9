"""An environment with a tool: a model learns from rewards to use a calculator.

    postlude grpo examples/calculator.yaml

A turn that begins with "?" is a tool call: the rest is calculated, and the model reads the result. Any other turn is
the final answer. Half of the warm-start examples call the tool; the other half give up with "-". Only rewards tell the
model which is better. `reply` is stateless and runs in worker processes, where it may also fail.
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
    """Returns the result of a tool call as text, or the reward of a final answer."""
    turn = completions[-1]
    if turn.startswith("?"):
        return f"={calculate(turn[1:])};"
    correct = turn == str(example["sum"])
    return {"reward": float(correct), "asked": float(len(completions) > 1)}


def calculate(expression: str) -> str:
    """Returns the value of an expression of integers, or "error" for the model to read."""
    try:
        return str(_value(ast.parse(expression[:32], mode="eval").body))
    except (SyntaxError, ValueError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"cannot calculate {ast.dump(node)}")
