"""Functions that tests run in worker processes. Imports nothing heavy, since every worker imports it."""

import contextlib
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
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


def huge(completion: str) -> float:
    """Returns rewards whose square no float32 holds."""
    return 1e37 * (len(completion.encode()) + 1)


def misbehave(prompt: str, completion: str, example: Mapping[str, Any]) -> Any:
    """Does or returns what the completion names."""
    match completion:
        case "hang":
            hang(example.get("started"))
        case "raise":
            raise RuntimeError("no such\nthing")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "garbage":
            write_to_pipes(b"garbage")
        case "partial":
            write_to_pipes(struct.pack("!i", 100) + b"{")
        case "forged":
            reply_body = json.dumps({"value": 1000.0}).encode()
            write_to_pipes(struct.pack("!i", len(reply_body)) + reply_body)
    return VALUES.get(completion, 1.0)


def hang(started: str | None) -> None:
    """Creates a file, so that the call is known to have begun, and does not return."""
    if started is not None:
        Path(started).touch()
    time.sleep(600)


def write_to_pipes(data: bytes) -> None:
    """Writes a forged result, as code written by a model could."""
    for entry in Path(
        "/proc/self/fd"
    ).iterdir():  # their numbers depend on what the process that started this one has open
        with contextlib.suppress(OSError):
            if int(entry.name) > 2 and stat.S_ISFIFO(entry.stat().st_mode):
                os.write(int(entry.name), data)


def write_partial_reply(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    if completion == "half":
        write_to_pipes(struct.pack("!i", 100) + b"{")
        hang(example["started"])
    return 1.0


def forking(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """Forks a child that ends like a sandbox does, or does not end by itself."""
    child = os.fork()
    if child == 0:
        if completion == "exit":
            sys.exit(3)
        if completion == "raise":
            raise RuntimeError
        return 1000.0
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def at_step(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    """As TRL's functions read it."""
    done = trainer_state.global_step / trainer_state.max_steps
    return [len(completions) + done + trainer_state.epoch for _ in completions]


def length(prompt: str, completion: str, example: Mapping[str, Any]) -> dict[str, float]:
    return {"length": float(len(completion)), "bonus": float(example.get("bonus", 0))}


def ascii_share(prompt: str, completion: str, example: Mapping[str, Any]) -> float:
    """Returns a property in which completions of an untrained byte model differ."""
    return sum(letter.isascii() for letter in completion) / max(1, len(completion))


def start_child_and_hang(directory: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (Path(directory) / "pids").write_text(f"{os.getpid()} {child.pid}")
    hang(f"{directory}/started")


def start_session_and_hang(directory: str) -> None:
    """Starts tools in a new session, one of them through a process that has exited."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    done = subprocess.run(["sh", "-c", "setsid sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, check=True)
    (Path(directory) / "pids").write_text(f"{os.getpid()} {child.pid} {int(done.stdout)}")
    hang(f"{directory}/started")


def start_detached_session(directory: str) -> int:
    """Leaves a process without parent, environment and session of its worker, and returns its id."""
    script = "setsid sleep 600 >&- 2>&- & echo $!"
    done = subprocess.run(["/bin/sh", "-c", script], stdout=subprocess.PIPE, check=True, env={"PATH": "/usr/bin:/bin"})
    return int(done.stdout)


def detach_and_kill_supervisors(directory: str, generations: int) -> None:
    """Writes the id of a detached process to a file, then kills a supervisor: its parent, or the parent of that."""
    (Path(directory) / "pid").write_text(str(start_detached_session(directory)))
    victim = os.getppid()
    for _ in range(generations - 1):
        victim = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(victim, signal.SIGKILL)
    time.sleep(600)


def use(what: str, amount: int) -> Any:
    """Uses an amount of something that is limited."""
    if what == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if what == "reply":
        return "x" * amount
    if what == "memory":
        return len(bytearray(amount))
    if what == "file":
        with tempfile.TemporaryFile() as file:
            file.truncate(amount)
    if what == "processes":
        for _ in range(amount):
            subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return "done"


def read_variables(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


def process_id(*_: Any) -> int:
    return os.getpid()


def guess(prompt: Any, completions: list[str], example: Mapping[str, Any]) -> Any:
    """A guessing game without state between turns."""
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


def scripted_conversation(prompt: Any, completions: list[str], example: Mapping[str, Any]) -> Any:
    """A conversation with a given number of turns and reply length, which fails or is slow as told."""
    match example.get("fault"):
        case "raise":
            raise RuntimeError("no such tool")
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(60)
        case fault if fault in FAULTS:
            return FAULTS[fault]
    while len(completions) == 1 and "until" in example and not os.path.exists(example["until"]):
        time.sleep(0.01)
    if len(completions) == example["turns"]:
        return {"reward": 1.0, "turns": len(completions)}
    heard = str(len(completions)) * example["length"]
    return [{"role": "tool", "content": heard}] if example.get("role") else heard


def slow_length(prompt: str, completion: str, example: Mapping[str, Any]) -> int:
    time.sleep(0.2)
    return len(completion)


def end_parent(order: str) -> str:
    """Kills the process that started its worker."""
    if order == "go":
        os.kill(os.getppid(), signal.SIGKILL)
    return order
