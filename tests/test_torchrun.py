"""torchrun for a scheduler's jobs: signals reach the ranks, which have time to save, and their exit code is its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from postlude.world.torchrun import main
from tests.conftest import PATIENCE, SERVER

RANK = """
import os, signal, sys, time
from pathlib import Path
fault, directory, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
received = []
def note(number, _):
    received.append(number)
    (directory / f"received-{rank}-{len(received)}").touch()
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
(directory / f"here-{rank}").touch()
if fault == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "mistake":
    sys.exit(2)
while not received and fault != "killed":
    time.sleep(0.01)
while not (directory / "may-end").exists() and fault != "killed":  # as long as a save takes
    time.sleep(0.01)
(directory / f"saved-{rank}").touch()
if fault == "full disk" and rank == "1":
    sys.exit(1)
sys.exit(0 if fault in ("finished", "killed") else 128 + received[0])
"""


def run_main(arguments: list[str]) -> None:
    sys.exit(main(arguments))


def start(fault: str, place: Path, *options: str) -> SERVER.Process:  # type: ignore[name-defined]
    (place / "rank.py").write_text(RANK)
    words = ["--standalone", "--nproc-per-node", "2", *options, str(place / "rank.py"), fault, str(place)]
    process = SERVER.Process(target=run_main, args=(words,))
    process.start()
    return process


def wait_for(place: Path, pattern: str, number: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(list(place.glob(pattern))) < number:
        assert time.monotonic() < end, f"there are no {number} {pattern}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "number", "code"),
    [
        ("interrupted", signal.SIGTERM, 143),
        ("interrupted", signal.SIGUSR1, 138),
        ("full disk", signal.SIGTERM, 1),
        ("finished", signal.SIGTERM, 0),
    ],
)
def test_a_signal_reaches_the_ranks_and_its_code_is_returned(
    fault: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = start(fault, tmp_path, "--max-restarts", "3")
    wait_for(tmp_path, "here-*", 2)
    for count in (2, 4):  # twice, as a scheduler may before it kills; a rank that is about to end would be ended by it
        os.kill(process.pid, number)
        wait_for(tmp_path, "received-*", count)
    assert process.is_alive(), "it does not wait for its ranks"
    (tmp_path / "may-end").touch()
    process.join(PATIENCE)
    assert process.exitcode == code
    assert len(list(tmp_path.glob("saved-*"))) == 2


@pytest.mark.parametrize(("fault", "code"), [("mistake", 2), ("killed", 137)])
def test_the_exit_code_is_that_of_the_first_rank_that_failed(fault: str, code: int, tmp_path: Path) -> None:
    process = start(fault, tmp_path)
    process.join(PATIENCE)
    assert process.exitcode == code


def test_a_node_that_finds_no_other_says_so(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-conf"]
    command = [sys.executable, "-m", "postlude.world.torchrun", *words, "join_timeout=1", "rank.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    sentence = "the 2 nodes did not all come together at localhost:0 (RendezvousTimeoutError)."
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, sentence), done.stderr
    assert "Traceback" not in done.stderr
