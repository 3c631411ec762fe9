"""What programs in a bubblewrap sandbox cannot do, and what they can."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from postlude.rollout.agent_programs import CommandAgent
from postlude.rollout.sandbox import Bubblewrap, ProcessLimits, ProcessResult, Sandbox, SandboxError, open_sandbox
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_agents

MIB = 1 << 20
LIMITS = ProcessLimits(wall_seconds=60.0, memory_bytes=400 * MIB, processes=64)
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY")


def works() -> bool:
    try:
        open_sandbox(Bubblewrap()).close()
    except SandboxError:
        return False
    return True


pytestmark = pytest.mark.skipif(not works(), reason="bubblewrap does not work here")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(open_sandbox(Bubblewrap())) as sandbox:
        yield sandbox


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Returns the work directory of an episode in a run directory, with a neighbour."""
    for name in ("run/episodes/0", "run/episodes/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("the run's")
    (tmp_path / "run/episodes/0/answer").write_text("the neighbour's")
    return tmp_path / "run/episodes/1"


class Reply(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps({"path": self.path, "size": len(body)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Returns the addresses of two servers on loopback: the proxy, and another one."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Reply) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy, other = (f"127.0.0.1:{server.server_address[1]}" for server in servers)
    yield proxy, other
    for server in servers:
        server.shutdown()
        server.server_close()


def run(
    sandbox: Sandbox,
    workdir: Path,
    code: str,
    *arguments: str,
    proxy: str | None = None,
    limits: ProcessLimits = LIMITS,
) -> ProcessResult:
    argv = (sys.executable, "-I", "-S", "-c", code, *arguments)
    return asyncio.run(sandbox.run(argv, workdir=workdir, environment={}, proxy=proxy, limits=limits))


def printed(result: ProcessResult) -> object:
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


TRY = """
import errno, json, os, signal, socket, sys
def attempt(function, *arguments):
    try:
        return repr(function(*arguments))
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(5)
        client.connect(address)
"""
CALL = """
import concurrent.futures, http.client, json, sys
def call(size):
    connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
    sizes = []
    for _ in range(2):
        connection.request("POST", "/v1/responses", body=bytes(size))
        sizes.append(json.load(connection.getresponse())["size"])
    connection.close()
    return sizes
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(json.dumps(list(pool.map(call, range(0, 8 << 20, 1 << 20)))))
"""


def test_the_proxy_is_reached_at_its_address(sandbox: Sandbox, workdir: Path, servers: tuple[str, str]) -> None:
    result = run(sandbox, workdir, CALL, servers[0], proxy=servers[0])
    assert printed(result) == [[size, size] for size in range(0, 8 << 20, 1 << 20)]
    assert list(workdir.iterdir()) == []  # the socket of the handover is removed


def test_nothing_else_of_the_network_is_reached(sandbox: Sandbox, workdir: Path, servers: tuple[str, str]) -> None:
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0postlude-test-{os.getpid()}")
    abstract.listen()
    code = f"""{TRY}
other = ("127.0.0.1", int(sys.argv[1].rpartition(":")[2]))
print(json.dumps([
    attempt(connect, socket.AF_INET, other),
    attempt(connect, socket.AF_INET, ("192.0.2.1", 80)),
    attempt(connect, socket.AF_INET6, ("2001:db8::1", 80)),
    attempt(socket.getaddrinfo, "example.com", 80),
    attempt(connect, socket.AF_UNIX, "\\0postlude-test-" + sys.argv[2]),
    attempt(connect, socket.AF_UNIX, ".model-proxy"),
    os.listdir("/sys") if os.path.exists("/sys") else [],
    [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]],
]))"""
    with closing(abstract):
        result = run(sandbox, workdir, code, servers[1], str(os.getpid()), proxy=servers[0])
    outcomes = printed(result)
    assert isinstance(outcomes, list)
    assert outcomes[:3] == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]
    assert outcomes[3] == "gaierror"
    assert outcomes[4:] == ["ECONNREFUSED", "ENOENT", [], ["lo"]]
    without = run(
        sandbox, workdir, f"{TRY}print(json.dumps(attempt(connect, socket.AF_INET, {servers[0].split(':')!r})))"
    )
    assert b"ECONNREFUSED" in without.stdout or without.exit_code  # no proxy: not even its address


def test_files_outside_are_not_there(sandbox: Sandbox, workdir: Path, tmp_path: Path) -> None:
    home = Path.home()
    code = f"""{TRY}
import glob
run, home = {str(tmp_path / "run")!r}, {str(home)!r}
write = lambda path: open(path, "w").close()
print(json.dumps({{
    "seen": [attempt(open, path) for path in (run + "/config.yaml", run + "/episodes/0/answer", "/etc/shadow")],
    "neighbours": os.listdir(run + "/episodes"),
    "home": [file for file in glob.glob(home + "/**", recursive=True) if os.path.isfile(file)
             and not any(file.startswith(path) for path in {[sys.prefix, sys.base_prefix]!r})],
    "written": [attempt(write, path) for path in ("/file", "/usr/file", "/etc/passwd", "/dev/file",
                sys.prefix + "/file", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj",
                "/var/tmp/file", "/dev/shm/file", "file")],
    "devices": sorted(os.listdir("/dev")),
}}))"""
    outcome = printed(run(sandbox, workdir, code))
    assert isinstance(outcome, dict)
    assert outcome["seen"] == ["ENOENT"] * 3
    assert (outcome["neighbours"], outcome["home"]) == (["1"], [])
    assert outcome["written"] == [*["EROFS"] * 7, *["None"] * 3]
    assert [file.name for file in workdir.iterdir()] == ["file"]
    assert not {"kmsg", "mem", "kvm", "fuse", "sda", "vda", "nvidia0"} & set(outcome["devices"])


def test_secrets_and_processes_outside_are_not_there(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    code = f"""{TRY}
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
read = lambda path: open(path, "rb").read()
everything = b"".join(read(f"/proc/{{pid}}/{{file}}") for pid in pids for file in ("environ", "cmdline"))
libc.ptrace(16, int(sys.argv[1]), 0, 0)
print(json.dumps({{
    "pids": len(pids), "secret": b"a " + b"secret" in everything, "key": b"key-of-" + b"the" in everything,
    "kill": attempt(os.kill, int(sys.argv[1]), 0), "ptrace": errno.errorcode[ctypes.get_errno()],
    "user namespace": libc.unshare(0x10000000), "setuid": attempt(os.setuid, 12345),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")],
    "no new privileges": [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")],
}}))"""

    async def both() -> ProcessResult:
        wait = (sys.executable, "-I", "-S", "-c", "import time; open('started', 'w'); time.sleep(1000)")
        neighbour = workdir.parent / "0"
        environment = {"OPENAI_API_KEY": "key-of-the-neighbour"}
        other = asyncio.ensure_future(
            sandbox.run(wait, workdir=neighbour, environment=environment, proxy=None, limits=LIMITS)
        )
        while not (neighbour / "started").exists():
            await asyncio.sleep(0.01)
        argv = (sys.executable, "-I", "-S", "-c", code, str(os.getpid()))
        result = await sandbox.run(argv, workdir=workdir, environment={}, proxy=None, limits=LIMITS)
        other.cancel()
        await asyncio.wait([other])
        return result

    assert printed(asyncio.run(both())) == {
        "pids": 2,
        "secret": False,
        "key": False,
        "kill": "ESRCH",
        "ptrace": "ESRCH",
        "user namespace": -1,
        "setuid": "EINVAL",
        "capabilities": ["0000000000000000"] * 5,
        "no new privileges": ["1"],
    }


AGENT = """
import json, os, urllib.request
def ask(text):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
reply = ask(json.load(open("task.json"))["prompt"])
episodes = [name for name in os.listdir("..") if name.startswith("work-")]
json.dump({"reward": float(reply == "two"), "episodes": len(episodes)}, open("reward.json", "w"))
"""


def test_an_agent_is_trained_from_its_sandbox(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    engine = RecordingEngine(lambda prompt, request: "two")
    agent = CommandAgent([sys.executable, str(tmp_path / "agent.py")], open_sandbox(Bubblewrap()))
    trajectories = run_agents(agent, engine, groups=2, samples=2)
    assert [(t.reward, t.components) for t in trajectories] == [(1.0, {"episodes": 1.0})] * 4
    check_tokens(trajectories, engine)


DETACH = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open("beat", "w").write(str(time.monotonic()))
            time.sleep(0.01)
    os._exit(0)
os.wait()
while not os.path.exists("beat"): time.sleep(0.01)
"""
BOMB = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
HOG = """
import mmap, time
memory = mmap.mmap(-1, 600 << 20)
for _ in range(600): memory.write(bytes(1 << 20))
time.sleep(1000)
"""
FILL = """
import errno
for path in ("/tmp/file", "/dev/shm/file"):
    try:
        with open(path, "wb") as file:
            for _ in range(600): file.write(bytes(1 << 20))
        print("filled")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_no_process_is_left(sandbox: Sandbox, workdir: Path) -> None:
    assert run(sandbox, workdir, DETACH).exit_code == 0
    beat = (workdir / "beat").stat().st_mtime_ns
    time.sleep(0.1)
    assert (workdir / "beat").stat().st_mtime_ns == beat


@pytest.mark.parametrize(("reason", "code"), [("process limit", BOMB), ("memory limit", HOG)])
def test_a_limit_ends_it(sandbox: Sandbox, workdir: Path, reason: str, code: str) -> None:
    assert run(sandbox, workdir, code).reason == reason


def test_directories_in_memory_are_limited(sandbox: Sandbox, workdir: Path) -> None:
    result = run(sandbox, workdir, FILL, limits=replace(LIMITS, memory_bytes=100 * MIB))
    assert result.stdout.decode().split() == ["ENOSPC", "ENOSPC"], result


def test_megabytes_of_output(sandbox: Sandbox, workdir: Path) -> None:
    code = "import os\nfor _ in range(1024): os.write(1, b'x' * 65536)\nos.write(1, b'the end')"
    result = run(sandbox, workdir, code, limits=replace(LIMITS, output_bytes=10))
    assert (result.stdout, result.exit_code) == (b"xxxthe end", 0)


def test_a_signal_is_an_exit_code(sandbox: Sandbox, workdir: Path) -> None:
    result = run(sandbox, workdir, "import os; os.kill(os.getpid(), 9)")
    assert result.exit_code == 128 + signal.SIGKILL
    result = run(sandbox, workdir, "open('f', 'wb').write(bytes(3000000))", limits=replace(LIMITS, file_bytes=MIB))
    assert b"File too large" in result.stderr


def test_files_of_the_command_line_and_mounts_can_be_read(workdir: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/text").write_text("mounted")
    (tmp_path / "agent.py").write_text("import sys; print(open(sys.argv[1]).read()); open(__file__, 'w')")
    with closing(open_sandbox(Bubblewrap(mounts=(str(tmp_path / "data"),)))) as mounted:
        argv = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "data/text")]
        result = asyncio.run(mounted.run(argv, workdir=workdir, environment={}, proxy=None, limits=LIMITS))
    assert result.stdout == b"mounted\n"
    assert b"Read-only file system" in result.stderr


def test_what_is_not_in_the_sandbox_is_named(sandbox: Sandbox, workdir: Path, tmp_path: Path) -> None:
    shutil.copy("/bin/sh", tmp_path / "tool")
    with pytest.raises(SandboxError, match=r"the program .*/tool is not in the sandbox. Add it"):
        asyncio.run(sandbox.run([str(tmp_path / "tool")], workdir=workdir, environment={}, proxy=None, limits=LIMITS))
    above = open_sandbox(Bubblewrap(mounts=(str(tmp_path),)))
    with closing(above), pytest.raises(SandboxError, match=r"holds the work directory .* other episodes"):
        run(above, workdir, "")
    with pytest.raises(SandboxError, match=r"the proxy is at 192.0.2.1:80, but"):
        run(sandbox, workdir, "", proxy="192.0.2.1:80")
    with pytest.raises(SandboxError, match=r"Unknown option --nonsense. Correct sandbox.arguments."):
        open_sandbox(Bubblewrap(arguments=("--nonsense",)))
    with pytest.raises(SandboxError, match=r"sandbox.mounts has /no/such, but that does not exist"):
        open_sandbox(Bubblewrap(mounts=("/no/such",)))
    result = asyncio.run(sandbox.run(["no-such"], workdir=workdir, environment={}, proxy=None, limits=LIMITS))
    assert (result.exit_code, result.stderr) == (
        127,
        b"no-such cannot be started in the sandbox: No such file or directory.\n",
    )


OPEN = "from postlude.rollout.sandbox import Bubblewrap, open_sandbox; open_sandbox(Bubblewrap())"
FORBIDDEN = {
    "forbids user namespaces to this user": "echo 0 > /proc/sys/user/max_user_namespaces",
    "hides parts of /proc": "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys",
    "bwrap is not installed": "PATH=/nowhere",
}


@pytest.mark.parametrize("message", FORBIDDEN)
def test_why_bubblewrap_does_not_work_is_said(message: str) -> None:
    """In a user namespace, what containers forbid can be forbidden."""
    script = f'{FORBIDDEN[message]}; exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable, OPEN]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert message in ended.stderr
