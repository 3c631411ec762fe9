"""Programs in sandboxes: results, limits, environments, and that nothing they start outlives them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from postlude.rollout.sandbox import ProcessLimits, ProcessResult, Sandbox, SandboxError, open_sandbox
from tests.rollout.test_rewards import has_exited as exits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
LIMITS = ProcessLimits(wall_seconds=300.0)
MIB = 1 << 20
PATIENCE = 120.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = open_sandbox()
    yield sandbox
    sandbox.close()


def run(
    sandbox: Sandbox,
    workdir: Path,
    *argv: str,
    limits: ProcessLimits = LIMITS,
    environment: Mapping[str, str] | None = None,
) -> ProcessResult:
    return asyncio.run(sandbox.run(argv, workdir=workdir, environment=environment or {}, proxy=None, limits=limits))


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-I", "-S", "-c", code


def test_a_program_has_a_result(sandbox: Sandbox, tmp_path: Path) -> None:
    result = run(sandbox, tmp_path, "sh", "-c", "echo out; echo error >&2; pwd; exit 3")
    assert (result.exit_code, result.signal, result.reason) == (3, None, "exited")
    assert (result.stdout.decode(), result.stderr) == (f"out\n{tmp_path}\n", b"error\n")
    assert result.describe(LIMITS) == "ended with code 3"
    result = run(sandbox, tmp_path, "sh", "-c", "kill -TERM $$")
    assert (result.exit_code, result.signal, result.describe(LIMITS)) == (None, 15, "was ended by signal 15")


def test_what_cannot_be_started_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"no-such-program cannot be started in .*: No such file or directory"):
        run(sandbox, tmp_path, "no-such-program")


def test_the_environment_has_no_secrets(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "OPENAI_API_KEY", "HTTPS_PROXY", "MY_SETTING"):
        monkeypatch.setenv(name, f"secret value of {name}")
    monkeypatch.setenv("LC_TIME", "C")
    result = run(sandbox, tmp_path, "env", environment={"MY_SETTING": "mine"})
    variables = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    assert (variables["MY_SETTING"], variables["LC_TIME"], variables["HOME"]) == ("mine", "C", str(tmp_path))
    assert b"secret" not in result.stdout
    parents = "; ".join(
        f"tr '\\0' '\\n' < /proc/{pid}/environ" for pid in ("$PPID", "$(ps -o ppid= $PPID | tr -d ' ')")
    )
    assert b"secret" not in run(sandbox, tmp_path, "sh", "-c", parents).stdout


FLOOD = "import os\nwhile True: os.write(1, b'x' * 65536)"
FAULTS = {
    "timed out": (python("import time; time.sleep(1000)"), {"wall_seconds": 1.0}),
    "output limit": (python(FLOOD), {"printed_bytes": 64 * MIB}),
    "process limit": (
        python("import os, time\nfor _ in range(20): os.fork() or time.sleep(1000)\nos.wait()"),
        {"processes": 8},
    ),
    "memory limit": (
        python("import os, time\nfor _ in range(6): os.fork() or [bytearray(50 << 20), time.sleep(1000)]\nos.wait()"),
        {"memory_bytes": 200 * MIB},
    ),
    "file limit": (("sh", "-c", "head -c 3000000 /dev/zero > file"), {"file_bytes": 2 * MIB}),
    "disk limit": (
        python("import os, time\nfor i in range(40): open(str(i), 'wb').write(bytes(1 << 20))\ntime.sleep(1000)"),
        {"disk_bytes": 16 * MIB},
    ),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_limit_ends_a_program(sandbox: Sandbox, tmp_path: Path, reason: str) -> None:
    argv, changes = FAULTS[reason]
    limits = replace(LIMITS, **changes)
    result = run(sandbox, tmp_path, *argv, limits=limits)
    assert (result.reason, result.exit_code) == (reason, None), result
    assert result.describe(limits).endswith(", and was ended")
    assert len(result.stdout) <= limits.output_bytes


def test_the_last_part_of_what_is_printed_is_kept(sandbox: Sandbox, tmp_path: Path) -> None:
    program = "import os\nfor _ in range(1024): os.write(1, b'x' * 65536)\nos.write(1, b'the end')"
    result = run(sandbox, tmp_path, *python(program), limits=replace(LIMITS, output_bytes=100))
    assert (result.stdout, result.exit_code) == (b"x" * 93 + b"the end", 0)


DETACH = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("pid", "w").write(str(os.getpid()))
        os.rename("pid", "started")
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists("started"): time.sleep(0.01)
if sys.argv[1:]: time.sleep(1000)
"""


def test_a_process_in_another_session_ends_with_its_program(sandbox: Sandbox, tmp_path: Path) -> None:
    assert run(sandbox, tmp_path, *python(DETACH)).exit_code == 0
    assert not runs(int((tmp_path / "started").read_text()))


def wait_for(file: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


def test_cancelling_ends_all(sandbox: Sandbox, tmp_path: Path) -> None:
    async def cancel() -> int:
        argv = (*python(DETACH), "stay")
        task = asyncio.create_task(sandbox.run(argv, workdir=tmp_path, environment={}, proxy=None, limits=LIMITS))
        pid = await asyncio.to_thread(wait_for, tmp_path / "started")
        assert runs(pid)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        return pid

    assert not runs(asyncio.run(cancel()))


TRAINER = """
import asyncio, sys
from pathlib import Path
from postlude.rollout.sandbox import ProcessLimits, open_sandbox
sandbox = open_sandbox()
limits = ProcessLimits(wall_seconds=300.0)
asyncio.run(sandbox.run(sys.argv[2:], workdir=Path(sys.argv[1]), environment={}, proxy=None, limits=limits))
"""


def test_killing_the_trainer_leaves_nothing(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path), *python(DETACH), "stay"])
    pid = wait_for(tmp_path / "started")
    trainer.kill()
    trainer.wait()
    assert exits(pid, PATIENCE)


KILL_SUPERVISORS = f"""
import os, signal
parent = lambda pid: int(open(f"/proc/{{pid}}/stat").read().rpartition(") ")[2].split()[1])
inner = os.getppid()
outer = parent(inner)
{DETACH}
"""


@pytest.mark.parametrize("killed", ["inner", "outer"])
def test_a_program_that_kills_a_supervisor_leaves_no_process(sandbox: Sandbox, tmp_path: Path, killed: str) -> None:
    result = run(sandbox, tmp_path, *python(f"{KILL_SUPERVISORS}\nos.kill({killed}, signal.SIGKILL)\ntime.sleep(1000)"))
    assert result.reason == "lost"
    assert not runs(int((tmp_path / "started").read_text()))


def test_a_killed_server_of_supervisors_is_started_again(tmp_path: Path) -> None:
    sandbox = open_sandbox()
    print_server = "ps -o ppid= $(ps -o ppid= $PPID)"  # the parent of the outer supervisor
    first = int(run(sandbox, tmp_path, "sh", "-c", print_server).stdout)
    os.kill(first, signal.SIGKILL)
    second = int(run(sandbox, tmp_path, "sh", "-c", print_server).stdout)
    assert second not in (first, os.getpid())
    sandbox.close()
    assert exits(second, PATIENCE)
