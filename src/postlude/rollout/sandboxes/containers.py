"""`Docker`, `Podman` and `Apptainer`: programs in containers of an image, made by their commands."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from postlude.rollout.sandboxes.isolation import (
    DIRECT,
    Launch,
    Program,
    check_mounts,
    first_process,
    is_below,
    named_files,
)
from postlude.rollout.sandboxes.process import ProcessLimits, SandboxError

CHECK_SECONDS = 900.0  # the image may have to be loaded
INHERITED = re.compile(r"LANG|LANGUAGE|LC_\w+|TZ")
FOR_COMMANDS = re.compile(
    r"PATH|HOME|USER|XDG_\w+|TMPDIR|DOCKER_\w+|CONTAINER_\w+|CONTAINERS_\w+|APPTAINER_(?!BIND|ENV)\w+"
)


@dataclass(frozen=True)
class Container(ABC):
    """A container for each program: the image read-only, the work directory, and of the network the model's URL alone.

    The image needs python3, and what the program needs.
    """

    image: str
    """The image, as the command names it."""
    mounts: tuple[str, ...] = ()
    """Directories and files that programs may read, besides the image, at the same paths."""
    arguments: tuple[str, ...] = ()
    """More arguments of the command, before the image."""

    command: ClassVar[str]
    """The command that makes containers."""

    def __post_init__(self) -> None:
        check_mounts(self.mounts)
        if not self.image or self.image.startswith("-"):
            raise ValueError(f"image is {self.image!r}, but needs the name of an image.")

    def check(self) -> None:
        """Raises `SandboxError` if the command is missing, or cannot run python3 of the image."""
        if shutil.which(self.command) is None:
            raise SandboxError(f"{self.command} is not installed. Install it, or choose another sandbox.kind.")
        if missing := [mount for mount in self.mounts if not os.path.exists(mount)]:
            raise SandboxError(f"sandbox.mounts has {missing[0]}, but that does not exist here.")
        program = Program(("python3", "-c", ""), Path("/"), {}, None, ProcessLimits())
        launch = self._launch(program, ())
        try:
            ended = _run(launch.argv, launch.environment)
            output = ended.stderr.decode(errors="replace").strip()
            problem = output or f"it ended with code {ended.returncode}" if ended.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"it took more than {CHECK_SECONDS:g} s"
        finally:
            for command in launch.cleanup:
                _run(command, launch.environment)
        if problem:
            raise SandboxError(
                f"{self.command} cannot run python3 of the image {self.image}: {problem[-1000:]}. Try `{self.command} "
                f"{'exec' if self.command == 'apptainer' else 'run'} {self.image} python3 --version`."
            )

    def launch(self, program: Program) -> Launch:
        for mount in self.mounts:
            if is_below(str(program.workdir.resolve()), [os.path.realpath(mount)]):
                raise SandboxError(
                    f"sandbox.mounts has {mount}, which holds the work directory {program.workdir} and so those of "
                    "other episodes. Put the run elsewhere, or change sandbox.mounts."
                )
        return self._launch(program, (*self.mounts, *named_files(program, self.mounts)))

    @abstractmethod
    def _launch(self, program: Program, readable: tuple[str, ...]) -> Launch:
        """Returns the command line with these mounts."""

    def _argv(self, program: Program) -> tuple[str, ...]:
        """Returns the command line inside."""
        return program.argv if program.proxy is None else first_process("python3", program)


@dataclass(frozen=True)
class DockerLike(Container):
    """What the commands of Docker and Podman have in common."""

    def _launch(self, program: Program, readable: tuple[str, ...]) -> Launch:
        name = f"postlude-{secrets.token_hex(8)}"
        limits, workdir = program.limits, str(program.workdir)
        variables = program_variables(program.environment)
        if workdir != "/":
            variables["HOME"] = workdir
        options = [
            *("--rm", "--name", name, "--init", "--network", "none", "--log-driver", "none", "--entrypoint", ""),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--security-opt", "label=disable"),  # SELinux would forbid the work directory and the proxy's socket
            *("--user", f"{os.getuid()}:{os.getgid()}", *self._user_options()),
            *("--ulimit", "core=0:0", "--tmpfs", f"/tmp:rw,exec,mode=1777{_size(limits)}"),
        ]
        if limits.processes is not None:
            options += ["--pids-limit", str(limits.processes)]
        if limits.memory_bytes is not None:
            options += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        if limits.file_bytes is not None:
            options += ["--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}"]
        if workdir != "/":
            options += ["--workdir", workdir, "--mount", _mount(workdir)]
        for path in readable:
            options += ["--mount", f"{_mount(path)},readonly"]
        environment = command_environment()
        for variable, value in variables.items():  # without a value it is the command's own: others see command lines
            options += ["--env", f"{variable}={value}" if variable in environment else variable]
        return Launch(
            (self.command, "run", *options, *self.arguments, self.image, *self._argv(program)),
            {**variables, **environment},
            program.workdir,
            cleanup=((self.command, "rm", "--force", name),),
            in_cgroup=True,
            proxy=program.proxy,
        )

    def _user_options(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Docker(DockerLike):
    """Docker containers."""

    command: ClassVar[str] = "docker"


@dataclass(frozen=True)
class Podman(DockerLike):
    """Podman containers."""

    command: ClassVar[str] = "podman"

    def _user_options(self) -> tuple[str, ...]:
        """Lets this user have the same id inside, if podman runs without root."""
        return ("--userns", "keep-id") if os.getuid() else ()


@dataclass(frozen=True)
class Apptainer(Container):
    """Apptainer containers."""

    command: ClassVar[str] = "apptainer"

    def _launch(self, program: Program, readable: tuple[str, ...]) -> Launch:
        workdir = str(program.workdir)
        options = ["--containall", "--cleanenv", "--no-privs", "--no-eval", "--net", "--network", "none"]
        options += ["--home", workdir, "--pwd", workdir] if workdir != "/" else ["--no-home"]
        for path in readable:
            options += ["--bind", f"{path}:{path}:ro"]
        variables = {f"APPTAINERENV_{name}": value for name, value in program_variables(program.environment).items()}
        return Launch(
            (self.command, "exec", *options, *self.arguments, self.image, *self._argv(program)),
            {**command_environment(), **variables},
            program.workdir,
            proxy=program.proxy,
        )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_SECONDS, check=False
    )


def program_variables(added: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a program besides those of its image."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    return {**inherited, **DIRECT, **added}


def command_environment() -> dict[str, str]:
    """Returns the environment variables of the command that makes containers."""
    return {name: value for name, value in os.environ.items() if FOR_COMMANDS.fullmatch(name)}


def _size(limits: ProcessLimits) -> str:
    sizes = [size for size in (limits.memory_bytes, limits.disk_bytes) if size]
    return f",size={min(sizes)}" if sizes else ""


def _mount(path: str) -> str:
    if "," in path or '"' in path:
        raise SandboxError(f"{path} has a comma or a quote, so that it cannot be mounted in a container. Rename it.")
    return f"type=bind,source={path},destination={path}"
