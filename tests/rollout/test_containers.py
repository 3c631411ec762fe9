"""The command lines of containers, by programs that record them in place of docker, podman and apptainer."""

import asyncio
import itertools
import json
import os
import stat
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postlude.rollout.sandbox import Apptainer, Docker, Podman, ProcessLimits, SandboxError, open_sandbox
from postlude.rollout.sandboxes.containers import Container

LIMITS = ProcessLimits(wall_seconds=30.0, memory_bytes=1 << 30, processes=64, file_bytes=1 << 20, disk_bytes=1 << 21)
RECORD = f"""#!{sys.executable}
import json, os, sys, time
with open(os.environ["TMPDIR"] + "/calls", "a") as file:
    file.write(json.dumps([sys.argv, dict(os.environ), os.getcwd()]) + "\\n")
if sys.argv[-1] == "wait":
    time.sleep(1000)
if "missing" in sys.argv:
    sys.exit("no such image")
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file of the calls: a line of JSON for each, with arguments, environment and directory."""
    for name in ("docker", "podman", "apptainer"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RECORD)
        program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "a secret")
    return tmp_path / "calls"


def run(kind: Container, workdir: Path, *argv: str, limits: ProcessLimits = LIMITS, proxy: str | None = None) -> Any:
    with closing(open_sandbox(kind)) as sandbox:
        run = sandbox.run(argv, workdir=workdir, environment={"KEY": "the key"}, proxy=proxy, limits=limits)
        return asyncio.run(run)


def read(calls: Path) -> list[tuple[list[str], dict[str, str], str]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def values(argv: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(argv) if name == option]


@pytest.mark.parametrize("kind", [Docker, Podman])
def test_docker_and_podman(calls: Path, tmp_path: Path, kind: type[Container]) -> None:
    workdir, agent = tmp_path / "episodes" / "1", tmp_path / "agent.py"
    workdir.mkdir(parents=True)
    agent.touch()
    engine = kind("python:3", mounts=("/usr/share",), arguments=("--cpus", "1"))
    assert run(engine, workdir, "python3", str(agent)).exit_code == 0
    trial, removal, (argv, environment, _), removed = read(calls)
    assert trial[0][-4:] == ["python:3", "python3", "-c", ""]
    assert (removal[0][1:3], removed[0][1:]) == (["rm", "--force"], ["rm", "--force", *values(argv, "--name")])
    assert argv[1] == "run"
    assert argv[-5:] == ["--cpus", "1", "python:3", "python3", str(agent)]
    assert values(argv, "--network") == ["none"]
    assert values(argv, "--cap-drop") == ["ALL"]
    assert values(argv, "--entrypoint") == [""]
    assert values(argv, "--workdir") == [str(workdir)]
    assert values(argv, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert values(argv, "--mount") == [
        f"type=bind,source={workdir},destination={workdir}",
        "type=bind,source=/usr/share,destination=/usr/share,readonly",
        f"type=bind,source={agent},destination={agent},readonly",
    ]
    assert (values(argv, "--memory"), values(argv, "--memory-swap")) == ([str(1 << 30)], [str(1 << 30)])
    assert values(argv, "--pids-limit") == ["64"]
    assert values(argv, "--ulimit") == ["core=0:0", f"fsize={1 << 20}:{1 << 20}"]
    assert values(argv, "--tmpfs") == [f"/tmp:rw,exec,mode=1777,size={1 << 21}"]
    assert "KEY" in values(argv, "--env")  # its value is in no command line
    assert f"HOME={workdir}" in values(argv, "--env")
    assert (environment["KEY"], environment["HOME"]) == ("the key", os.environ["HOME"])
    assert "a secret" not in json.dumps(read(calls))
    assert "the key" not in json.dumps(argv)


def test_apptainer(calls: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "episode"
    workdir.mkdir()
    assert run(Apptainer("agent.sif", mounts=("/usr/share",)), workdir, "agent").exit_code == 0
    _, (argv, environment, _) = read(calls)
    assert argv[1] == "exec"
    assert argv[-2:] == ["agent.sif", "agent"]
    assert {"--containall", "--cleanenv", "--no-privs", "--net"} <= set(argv)
    assert values(argv, "--network") == ["none"]
    assert (values(argv, "--home"), values(argv, "--pwd")) == ([str(workdir)], [str(workdir)])
    assert values(argv, "--bind") == ["/usr/share:/usr/share:ro"]
    assert environment["APPTAINERENV_KEY"] == "the key"
    assert "a secret" not in json.dumps(read(calls))


def test_the_proxy_is_connected_by_the_images_python(calls: Path, tmp_path: Path) -> None:
    run(Docker("image"), tmp_path, "agent", "word", proxy="127.0.0.1:8000")
    argv = read(calls)[2][0]
    start = argv.index("image")
    assert argv[start + 1 : start + 5] == ["python3", "-I", "-S", "-c"]
    assert argv[start + 6 :] == [".model-proxy", "127.0.0.1:8000", "0", "agent", "word"]
    assert not (tmp_path / ".model-proxy").exists()


def test_a_container_is_removed_at_the_limit_of_time(calls: Path, tmp_path: Path) -> None:
    assert run(Docker("image"), tmp_path, "wait", limits=replace(LIMITS, wall_seconds=0.5)).reason == "timed out"
    last = read(calls)[-1]
    assert last[0][1:3] == ["rm", "--force"]
    assert last[1]["HOME"] == os.environ["HOME"]  # which finds the engine's settings


def test_what_cannot_work_is_refused(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=r"docker cannot run python3 of the image missing: no such image"):
        open_sandbox(Docker("missing"))
    with pytest.raises(ValueError, match=r"image is '--privileged', but needs the name"):
        Docker("--privileged")
    with pytest.raises(SandboxError, match=r"holds the work directory .* other episodes"):
        run(Docker("image", mounts=(str(tmp_path.parent),)), tmp_path, "agent")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"podman is not installed. Install it"):
        open_sandbox(Podman("image"))
