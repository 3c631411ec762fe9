"""What an agent is: a program, a coroutine function, or a service. Each is given a task, and the URL of its model."""

from __future__ import annotations

import inspect
import json
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from postlude.pool.worker_pool import CallResult
from postlude.rollout.sandboxes.process import GIB, MIB, ProcessLimits, ProcessResult, SandboxError
from postlude.user_code import describe_error, load_callable

if TYPE_CHECKING:
    from postlude.rollout.sandbox import Sandbox
    from postlude.rollout.sandboxes.isolation import Isolation

LOOPBACK = "127.0.0.1"
TASK_FILE, REWARD_FILE = "task.json", "reward.json"  # in the work directory
REWARD_BYTES = MIB  # the largest reward file that is read
SHOWN_OUTPUT = 400  # characters of an agent's last output in a message


@dataclass(frozen=True)
class AgentLimits:
    """What each episode of an agent may use."""

    seconds: float = 600.0
    """Seconds of an episode."""
    model_calls: int = 256
    """Completions that it may ask for. More are refused."""
    tokens: int = 1_000_000
    """Tokens of all its calls together, each counted once. When they are used up, calls are refused."""
    concurrent_calls: int = 64
    """Completions that it may wait for at a time. More are refused with status 429, after which clients retry."""
    memory_gib: float | None = None
    """Gibibytes of memory of a command and all that it starts; none does not limit it."""
    processes: int = 512
    """Processes and threads of a command at a time."""
    file_gib: float = 1.0
    """Largest file that a command may write, in gibibytes."""
    disk_gib: float = 4.0
    """Gibibytes of all files in the work directory."""
    output_mib: float = 1.0
    """Mebibytes of a command's standard output that are kept: the last ones."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, but an agent needs more than 0.")

    def of_processes(self) -> ProcessLimits:
        return ProcessLimits(
            wall_seconds=self.seconds,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * GIB),
            processes=self.processes,
            output_bytes=int(self.output_mib * MIB),
            file_bytes=int(self.file_gib * GIB),
            disk_bytes=int(self.disk_gib * GIB),
        )


@dataclass(frozen=True)
class AgentClient:
    """Where an episode's agent finds its model, and where it may write: what a function of yours gets.

    `AsyncOpenAI(**client.openai)` and `AsyncAnthropic(**client.anthropic)` ask for completions of the trained model.
    """

    url: str
    api_key: str = field(repr=False)
    workdir: Path

    @property
    def openai(self) -> dict[str, str]:
        """The arguments of OpenAI's clients."""
        return {"base_url": f"{self.url}/v1", "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """The arguments of Anthropic's clients."""
        return {"base_url": self.url, "api_key": self.api_key}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that clients read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class Agent(Protocol):
    """Works on tasks."""

    name: str
    """What messages call it."""
    host: str | None = None
    """If the agent's episodes run elsewhere, the address of this machine at which they reach their model. They have
    work directories there, and none here."""
    start_seconds: float = 0.0
    """How long an episode may wait before it starts."""
    lost_workers: int | None = None
    """Processes that were lost with their episodes. None where that cannot happen."""

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        """Returns the reward of an episode, as `read_score` reads it, or None; or how it failed.

        Cancelling this ends all that it started.
        """

    def close(self) -> None:
        """Releases what it holds."""


@runtime_checkable
class AgentWorkers(Protocol):
    """Runs agents in other processes, also on other machines."""

    def open_agent(self, make: Callable[[], Agent], name: str, count: int, concurrency: int) -> Agent:
        """Returns the agent that `make` returns in each of `count` processes, which have `concurrency` episodes."""


class FunctionAgent(Agent):
    """A coroutine function: `async def run(task, client)`. Cancelling it is how it ends at its limit of time."""

    def __init__(self, function: Callable[[Mapping[str, Any], AgentClient], Awaitable[Any]], name: str) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"{name} is no coroutine function, so that it could not be ended. Write it as async def, with an "
                "asynchronous client; or make it a program, and give it as command."
            )
        self.function, self.name = function, name

    @classmethod
    def load(cls, reference: str) -> FunctionAgent:
        return cls(load_callable(reference), reference)

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        import asyncio  # noqa: PLC0415 - so that an error in a config is found without it

        limit = asyncio.timeout(limits.seconds)
        try:
            async with limit:
                return CallResult(await self.function(task, client))
        except Exception as error:
            if limit.expired():
                return CallResult(failure="timed_out", error=f"{self.name} took more than {limits.seconds:g} s.")
            return CallResult(failure="raised", error=describe_error(error))

    def close(self) -> None:
        """Does nothing."""


class CommandAgent(Agent):
    """A program, started in a sandbox for each episode, in a work directory of its own.

    Its words may have {task_file}, {workdir} and {url}. The reward is the content of `reward.json` in the work
    directory, or else the last line of standard output that is a number or an object in JSON.
    """

    def __init__(self, command: Sequence[str], sandbox: Sandbox) -> None:
        self.command = tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in command)
        self.sandbox, self.name = sandbox, Path(self.command[0]).name

    @classmethod
    def open(cls, command: Sequence[str], isolation: Isolation | None) -> CommandAgent:
        """Returns the agent, with a sandbox of this kind."""
        from postlude.rollout.sandbox import open_sandbox  # noqa: PLC0415 - only for commands

        return cls(command, open_sandbox(isolation))

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        task_file = client.workdir / TASK_FILE
        task_file.write_text(json.dumps(task, ensure_ascii=False, default=str))
        values = {"{task_file}": str(task_file), "{workdir}": str(client.workdir), "{url}": client.url}
        process_limits = limits.of_processes()
        try:
            result = await self.sandbox.run(
                [_filled(word, values) for word in self.command],
                workdir=client.workdir,
                environment=client.environment,
                proxy=urlsplit(client.url).netloc,
                limits=process_limits,
            )
        except SandboxError as error:
            return CallResult(failure="died", error=str(error))
        if result.reason != "exited" or result.exit_code != 0:
            message = f"{self.name} {result.describe(process_limits)}.{_last_output(result)}"
            return CallResult(failure="timed_out" if result.reason == "timed out" else "died", error=message)
        try:
            return CallResult(_read_reward(client.workdir / REWARD_FILE, result.stdout))
        except ValueError as error:
            return CallResult(failure="invalid", error=f"{self.name} {error}")

    def close(self) -> None:
        self.sandbox.close()


class ServiceAgent(Agent):
    """A service that runs an episode for each POST, and replies with its reward in JSON."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"environment.url is {url!r}; give the address of a service, such as http://localhost:9000/run."
            )
        self.server, self.path = (
            f"{parts.scheme}://{parts.netloc}",
            (parts.path or "/") + (parts.query and f"?{parts.query}"),
        )
        self.name = f"the agent at {url}"

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        """Sends the task with the variables that clients read, and waits for the reply."""
        from postlude.serving.clients.connection import CONNECTION_ERRORS, ServerConnection  # noqa: PLC0415
        from postlude.serving.errors import InvalidResponse, ServerUnavailable  # noqa: PLC0415

        task = json.loads(json.dumps(task, default=str))
        body = {"task": task, "url": client.url, "workdir": str(client.workdir), "environment": client.environment}
        try:
            with closing(ServerConnection(self.server)) as connection:  # of this episode alone: nothing is sent twice
                reply = await connection.request("POST", self.path, body, timeout=limits.seconds)
            if reply.status != 200:
                text = reply.body[:SHOWN_OUTPUT].decode(errors="replace")
                return CallResult(failure="died", error=f"{self.name} replied with status {reply.status}: {text}")
            return CallResult(reply.json())
        except ServerUnavailable as error:
            late = "no reply within" in str(error)
            return CallResult(failure="timed_out" if late else "died", error=f"{self.name} {error}.")
        except (InvalidResponse, *CONNECTION_ERRORS) as error:
            return CallResult(failure="died", error=f"{self.name} {error}.")

    def close(self) -> None:
        """Does nothing."""


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _last_output(result: ProcessResult) -> str:
    """Returns a sentence with the end of what a program printed."""
    output = (result.stderr.strip() or result.stdout.strip()).decode(errors="replace")
    if not output:
        return ""
    return f" Its last output: {'…' if len(output) > SHOWN_OUTPUT else ''}{output[-SHOWN_OUTPUT:]}"


def _read_reward(path: Path, stdout: bytes) -> Any:
    """Returns the value of the reward file, else of the last line that has one; None if there is none."""
    data = _read_file(path)
    if data is not None:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"wrote a {REWARD_FILE} that is not JSON: {error}") from error
    for line in reversed(stdout.splitlines()):
        text = line.strip()
        if text[:1] in (b"{", b"-") or text[:1].isdigit():
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                continue
            return value
    return None


def _read_file(path: Path) -> bytes | None:
    """Returns the content of a file that the agent may have made; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"left a {REWARD_FILE} that cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > REWARD_BYTES:
            raise ValueError(f"left a {REWARD_FILE} that is no file of at most {REWARD_BYTES} bytes")
        return file.read(REWARD_BYTES)
