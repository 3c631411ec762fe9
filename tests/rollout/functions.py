"""What tests have workers call. Nothing heavy is imported here, since every worker imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VALUES = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "part": {"reward": 1.0, "style": float("nan")},
    "none": None,
    "text": "1.0",
    "object": object(),
    "list": [1.0],
    "empty": {},
    "huge": 10**400,
}


def misbehave(prompt: str, completion: str, example: Mapping[str, Any]) -> Any:
    """Does or returns what the completion says."""
    match completion:
        case "hang":
            time.sleep(60)
        case "raise":
            raise RuntimeError("no such\nthing")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGSEGV)
    return VALUES.get(completion, 1.0)


def length(prompt: str, completion: str, example: Mapping[str, Any]) -> dict[str, float]:
    return {"length": float(len(completion)), "bonus": float(example.get("bonus", 0))}


def ascii_share(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """What the answers of a model over bytes differ in before it has learned anything."""
    return sum(letter.isascii() for letter in completion) / max(1, len(completion))


def start_child_and_hang(directory: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    (Path(directory) / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def process_id(*_: Any) -> int:
    return os.getpid()


def guess(prompt: Any, completions: list[str], example: Mapping[str, Any]) -> Any:
    """A game of higher and lower that keeps nothing between turns."""
    number = int(completions[-1])
    if number == example["number"]:
        return {"reward": 1.0 / len(completions), "turns": len(completions)}
    if len(completions) == 2:
        return [{"role": "user", "content": "Think!"}]
    return "higher" if number < example["number"] else "lower"


FAULTS: dict[str, Any] = {
    "none": None,
    "object": object(),
    "no content": [{"role": "tool"}],
    "part": [{"role": "tool", "content": [{"type": "image"}]}],
    "bad role": [{"role": 3, "content": "x"}],
}


def talk(prompt: Any, completions: list[str], example: Mapping[str, Any]) -> Any:
    """A conversation of so many turns, whose answers are so long, and that fails or takes its time as it is told."""
    match example.get("fault"):
        case "raise":
            raise RuntimeError("no such tool")
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(60)
        case fault if fault in FAULTS:
            return FAULTS[fault]
    if len(completions) == 1:
        time.sleep(example.get("sleep", 0))
    if len(completions) == example["turns"]:
        return {"reward": 1.0, "turns": len(completions)}
    heard = str(len(completions)) * example["length"]
    return [{"role": "tool", "content": heard}] if example.get("role") else heard


def slow_length(prompt: str, completion: str, example: Mapping[str, Any]) -> int:
    time.sleep(0.2)
    return len(completion)


def end_parent(order: str) -> str:
    """What no function should do: take along the process that started its worker."""
    if order == "go":
        os.kill(os.getppid(), signal.SIGKILL)
    return order
