"""`Bubblewrap`: programs in namespaces of their own, made by bwrap.

They see the system's programs and this Python, read-only, their work directory, and a /tmp of their own. Directories
that are not named here are not there: the homes, the run directory, other episodes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from postlude.rollout.sandboxes.isolation import (
    ROOT_LINKS,
    SYSTEM_ROOTS,
    Launch,
    Program,
    check_mounts,
    first_process,
    is_below,
    named_files,
    program_environment,
)
from postlude.rollout.sandboxes.process import ProcessLimits, SandboxError

OLDEST = (0, 8)  # which limits the size of /tmp and forbids more user namespaces
NAMESPACES = (
    "--unshare-user",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-ipc",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
SYSTEM = ("/usr", "/nix/store", "/gnu/store")
SETTINGS = (  # of /etc that hold no secrets
    *("alternatives", "ca-certificates", "crypto-policies", "fonts", "group", "host.conf", "hosts", "ld.so.cache"),
    *("ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic", "mime.types", "nsswitch.conf", "os-release"),
    *("passwd", "pki/ca-trust/extracted", "pki/tls/cert.pem", "pki/tls/certs", "protocols", "services", "shells"),
    *("ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone"),
)
CHECK_SECONDS = 60.0
NO_NAMESPACES = (
    "This machine forbids user namespaces to this user. On a machine of yours, allow them (sysctl "
    "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, on Ubuntu an AppArmor profile for bwrap or "
    "kernel.apparmor_restrict_unprivileged_userns=0). In a container, start that with --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined. Or choose another sandbox.kind."
)
NO_PROC = (
    "The container around this process hides parts of /proc, so that no other /proc can be mounted. Start it with "
    "--security-opt systempaths=unconfined (Docker), --security-opt unmask=ALL (Podman) or procMount: Unmasked "
    "(Kubernetes). Or choose another sandbox.kind."
)
CAUSES = (
    (r"namespace|uid map|RTM_NEW|loopback|setting up gid|capset", NO_NAMESPACES),
    (r"mount proc|/proc", NO_PROC),
    (r"Can't find source path", "Correct sandbox.mounts or sandbox.arguments."),
    (r"Unknown option|Unexpected", "Correct sandbox.arguments."),
)


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces of their own: the system read-only, the work directory, and of the network the model's URL alone."""

    mounts: tuple[str, ...] = ()
    """Directories and files that programs may read, besides the system and this Python, at the same paths."""
    arguments: tuple[str, ...] = ()
    """More arguments of bwrap."""

    def __post_init__(self) -> None:
        check_mounts(self.mounts)

    def check(self) -> None:
        """Raises `SandboxError` if bwrap is missing or cannot work on this machine."""
        if shutil.which("bwrap") is None:
            raise SandboxError(
                "bwrap is not installed. Install it (apt install bubblewrap, dnf install bubblewrap), or choose "
                "another sandbox.kind."
            )
        version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False).stdout.strip()
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            raise SandboxError(
                f"{version or 'bwrap'} is too old. Install bubblewrap 0.8 or newer, or choose another sandbox.kind."
            )
        if missing := [mount for mount in self.mounts if not os.path.exists(mount)]:
            raise SandboxError(f"sandbox.mounts has {missing[0]}, but that does not exist here.")
        command = [*self._options(ProcessLimits()), "--remount-ro", "/", "--", sys.executable, "-I", "-S", "-c", ""]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS, check=False
        )
        if ended.returncode:
            raise SandboxError(_why_not(ended.stderr.strip() or f"it ended with code {ended.returncode}"))

    def launch(self, program: Program) -> Launch:
        environment = program_environment(program.workdir, program.environment)
        for name in ("TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"):  # of directories that may not be there
            if name not in program.environment:
                environment.pop(name, None)
        self._check(program, environment)
        workdir = str(program.workdir)
        argv = (
            *self._options(program.limits),
            *(word for path in named_files(program, self._readable()) for word in ("--ro-bind", path, path)),
            *("--bind", workdir, workdir, "--remount-ro", "/", "--chdir", workdir),
            "--",
            *first_process(os.path.realpath(sys.executable), program, _most_processes(program.limits)),
        )
        return Launch(argv, environment, program.workdir, proxy=program.proxy)

    def _options(self, limits: ProcessLimits) -> tuple[str, ...]:
        """Returns the command and the options that do not depend on the work directory."""
        sizes = [size for size in (limits.memory_bytes, limits.disk_bytes) if size]
        size = ("--size", str(min(sizes))) if sizes else ()
        system = [("--ro-bind-try", path, path) for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS))]
        return (
            *("bwrap", *NAMESPACES, "--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--new-session"),
            *(word for words in (*system, *_root_links()) for word in words),
            *(
                "--dev",
                "/dev",
                "--remount-ro",
                "/dev",
                *size,
                "--tmpfs",
                "/dev/shm",
                "--proc",
                "/proc",
                "--remount-ro",
                "/proc",
            ),
            *(*size, "--tmpfs", "/tmp", "--symlink", "/tmp", "/var/tmp"),
            *(word for path in self._readable() for word in ("--ro-bind", path, path)),
            *self.arguments,
        )

    def _readable(self) -> tuple[str, ...]:
        """Returns the directories and files that are the same inside, besides the system's and the work directory."""
        return (*_python_paths(), *self.mounts)

    def _check(self, program: Program, environment: Mapping[str, str]) -> None:
        """Raises for what would fail inside, or would show other episodes."""
        for directory in self._readable():
            if program.workdir.resolve().is_relative_to(os.path.realpath(directory)):
                raise SandboxError(
                    f"{directory}, which programs in the sandbox may read, holds the work directory {program.workdir} "
                    "and so those of other episodes. Put the run elsewhere, or change sandbox.mounts."
                )
        path = shutil.which(program.argv[0], path=environment.get("PATH"))
        roots = (*SYSTEM_ROOTS, *self._readable(), str(program.workdir))
        for name, shown in ((path, roots), (path and os.path.realpath(path), map(os.path.realpath, roots))):
            if name and not is_below(name, shown):
                raise SandboxError(
                    f"the program {name} is not in the sandbox. Add it, or a directory above it, to sandbox.mounts."
                )


def _root_links() -> Iterator[tuple[str, ...]]:
    for name in ROOT_LINKS:
        path = Path(name)
        if path.is_symlink():
            yield "--symlink", os.readlink(path), str(path)
        elif path.exists():
            yield "--ro-bind", str(path), str(path)


def _python_paths() -> tuple[str, ...]:
    """Returns the directories of this Python and its environment outside of /usr, also those that links lead to."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix)
    paths = dict.fromkeys([*prefixes, *map(os.path.realpath, prefixes)])
    return tuple(path for path in paths if not Path(path).is_relative_to("/usr"))


def _most_processes(limits: ProcessLimits) -> int:
    """Returns a limit that the kernel keeps before the supervisor looks; 0 for none.

    Before Linux 5.14 it would count the processes of this user outside too.
    """
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return 2 * limits.processes + 16 if limits.processes and version >= (5, 14) else 0


def _why_not(printed: str) -> str:
    """Returns why bwrap does not work, and what can be done, from what it printed."""
    line = next((line for line in printed.splitlines() if line.startswith("bwrap: ")), printed)
    fix = next((fix for pattern, fix in CAUSES if re.search(pattern, line)), "Choose another sandbox.kind.")
    return f"bubblewrap cannot make a sandbox here: {line.removeprefix('bwrap: ').rstrip('.')}. {fix}"
