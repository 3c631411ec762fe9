"""Ranks start, and stop with one error line that names the failed rank, under every launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from postlude.error_output import print_error
from postlude.world.failure_report import RankError
from postlude.world.launcher import launch, ranks
from postlude.world.rendezvous import host_store
from tests.listening import listening_addresses
from tests.plain_ranks import PATIENCE, PlainRanks, fork_launched_ranks

SHORT = 3.0  # seconds of a collective that one rank does not come to, when all have started


def add_up(factor: int, launcher: int) -> tuple[tuple[int, float, str], set[str]]:
    """Returns a result, and the addresses that the ranks and their launcher listen on, with groups of every kind."""
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    dist.new_group([0, 1], backend="gloo")
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    addresses = listening_addresses({launcher, *pids}) if sys.platform == "linux" else {"127.0.0.1"}
    dist.barrier()
    with ranks() as rank:
        return (rank.index * factor, total.item(), str(rank)), addresses


def misbehave_on_one_rank(fault: str, failing_rank: int, directory: str) -> None:
    """One rank fails, the others wait in a collective."""
    rank = dist.get_rank()
    pid_file = Path(directory, f"pid-{rank}")
    pid_file.write_text(str(os.getpid()))
    dist.barrier()
    group = None
    if fault == "sleep":
        dist.all_reduce(torch.ones(3), group=(group := dist.new_group()))  # its sockets take time
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT), group)
    if rank == failing_rank:
        if fault == "raise":
            raise ValueError("no such column")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(7)
        if fault == "sleep":
            time.sleep(3 * PATIENCE)  # who waits for it, waits in vain
        if fault == "return":
            return
    dist.all_reduce(torch.ones(3), group=group)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_results_are_in_rank_order_and_a_run_on_one_machine_listens_on_loopback_only() -> None:
    before = signal.getsignal(signal.SIGINT)
    results = launch(add_up, 10, os.getpid(), nproc=2, device="cpu")
    assert [addresses for _, addresses in results] == [{"127.0.0.1"}] * 2, "a socket can be reached from outside"
    device = "device=device(type='cpu')"
    assert [result for result, _ in results] == [
        (10 * rank, 1.0, f"Rank(index={rank}, size=2, {device})") for rank in range(2)
    ]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: no such column"),
        ("kill", "rank 1 of 2 was killed by SIGKILL."),
        pytest.param("exit", "rank 1 of 2 ended with exit code 7 and no result.", marks=pytest.mark.thorough),
    ],
)
def test_failed_rank_ends_all_ranks_and_is_named(fault: str, sentence: str, tmp_path: Path, capfd, monkeypatch) -> None:
    fork_launched_ranks(monkeypatch)
    with pytest.raises(RankError) as failure:
        launch(misbehave_on_one_rank, fault, 1, str(tmp_path), nproc=2, timeout=PATIENCE, device="cpu")
    assert str(failure.value).startswith(sentence)
    assert not any(alive(int(pid.read_text())) for pid in tmp_path.glob("pid-*"))
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert "FAILED" not in printed.err + printed.out
    if fault == "raise":
        assert 'raise ValueError("no such column")' in failure.value.traceback


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "failing_rank", "sentence"),
    [
        ("raise", 1, "rank 1 of 3 failed: ValueError: no such column"),
        ("kill", 1, "rank 1 of 3 does not answer any more: it was killed or lost."),
        ("return", 1, "rank 1 of 3 finished without coming to this collective."),
        ("sleep", 1, "rank 1 of 3 did not come: it is in misbehave_on_one_rank "),
        ("raise", 0, "rank 0 of 3 failed: ValueError: no such column"),  # rank 0 holds the store
        (
            "kill",
            0,
            "rank 0 of 3 does not answer any more: it was killed or lost, and with it the store of failure reports.",
        ),
    ],
)
def test_surviving_ranks_name_the_failed_rank_without_an_agent(
    fault: str, failing_rank: int, sentence: str, tmp_path: Path
) -> None:
    with PlainRanks(3, PATIENCE, misbehave_on_one_rank, fault, failing_rank, str(tmp_path)) as three:
        for message in (three.error_of(rank) for rank in range(3) if rank != failing_rank):
            assert message.startswith(sentence) if fault == "sleep" else message == sentence, message


@pytest.mark.slow
def test_error_line_is_last_under_torchrun(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "postlude", "report", nowhere], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    sentence = f"postlude report: {nowhere} has no metrics.jsonl, so it is not the directory of a run."
    assert done.returncode != 0
    assert done.stderr.splitlines().count(sentence) == 1
    *_, last, line = done.stderr.rstrip().splitlines()
    assert set(line) == {"="}  # of torchrun's table
    assert last.strip() == f"traceback : {sentence}"


@pytest.mark.parametrize("first", ["0", "1"])
def test_first_failed_rank_of_a_machine_prints_the_error(first: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """torchrun may end the others first."""
    for rank in sorted("01", key=lambda rank: rank != first):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / rank / "error.json"))
        print_error(f"rank {rank}.")
    assert capsys.readouterr().err == f"rank {first}.\n"
    assert len(list(tmp_path.glob("attempt_0/*/error.json"))) == 2


@pytest.fixture
def _no_environment(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_environment")
def test_one_rank_needs_no_environment() -> None:
    with ranks(device="cpu") as rank:
        assert (rank.index, rank.size, rank.device) == (0, 1, torch.device("cpu"))
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 1
        assert dist.get_backend() == "gloo"
    assert not dist.is_initialized()
    with pytest.raises(KeyError, match="mine"), ranks(device="cpu"):
        raise KeyError("mine")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("_no_environment")
def test_existing_process_group_is_not_changed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ranks(device="cpu") as rank:
            assert (rank.index, rank.size) == (0, 1)
        with pytest.raises(KeyError), ranks(device="cpu"):
            raise KeyError("mine")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_environment")
def test_incomplete_torchrun_environment_gives_clear_error(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"), ranks():
        pass
    with pytest.raises(ValueError, match="at least one rank"):
        launch(add_up, nproc=0)


STOPPED = """
import signal, sys, time
from pathlib import Path
from postlude.world.launcher import launch
from tests.test_launcher import wait_for_a_signal

if __name__ == "__main__":
    print(launch(wait_for_a_signal, sys.argv[1], sys.argv[2], nproc=2, device="cpu", grace=float(sys.argv[3])))
"""


def wait_for_a_signal(fault: str, directory: str) -> list[int]:
    """Reports that this rank runs, and waits for a signal; `good` ranks then take time to save."""
    received: list[int] = []
    if fault in ("save", "deaf"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: received.append(number))
    Path(directory, f"here-{dist.get_rank()}").touch()
    while fault == "deaf" or not received:
        time.sleep(0.01)
    time.sleep(0.3)
    Path(directory, f"saved-{dist.get_rank()}").touch()
    return received


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "number", "code", "saved"),
    [
        ("save", signal.SIGTERM, 0, True),
        pytest.param("die", signal.SIGINT, -signal.SIGINT, False, marks=pytest.mark.thorough),
        pytest.param("deaf twice", signal.SIGTERM, -signal.SIGTERM, False, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_is_forwarded_to_ranks_that_may_save(
    fault: str, number: signal.Signals, code: int, saved: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, str(script), fault.split(maxsplit=1)[0], str(tmp_path), str(PATIENCE)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while len(list(tmp_path.glob("here-*"))) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        os.killpg(process.pid, number)  # as a terminal does
        if fault == "deaf twice":
            time.sleep(0.3)
            process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code
    assert len(list(tmp_path.glob("saved-*"))) == (2 if saved else 0)
    assert out == (f"[[{number}], [{number}]]\n" if saved else "")
    assert "Traceback" not in err or number == signal.SIGINT  # Python's own, of the one process that is left
    assert err.count("Traceback") <= 1
    assert "elastic" not in err


def test_the_store_listens_on_its_address_alone() -> None:
    store = host_store("127.0.0.1", 0, 10.0)
    again = host_store("127.0.0.1", store.port, 10.0)  # of this process: the same store
    store.set("key", "value")
    assert again.get("key") == b"value"
    if sys.platform == "linux":
        listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        assert re.findall(rf"(\w+):{store.port:04X} \w+:\w+ 0A", listening) == ["0100007F"]
