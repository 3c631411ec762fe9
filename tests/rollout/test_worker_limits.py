"""What a call uses, leaves behind or does to its parent costs its own call, and workers get no secrets."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from postlude.pool.limits import WorkerLimits
from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import WorkerError
from tests.rollout.functions import detach_and_kill_supervisors, read_variables, start_detached_session, use
from tests.rollout.test_rewards import has_exited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has all limits")
LIMIT = 300.0


def test_a_process_without_session_and_environment_of_its_worker_ends_with_it() -> None:
    with closing(open_pool(start_detached_session, count=1, timeout=LIMIT)) as pool:
        (result,) = pool.call_all([("",)])
        assert isinstance(result.value, int), result.error
        assert not has_exited(result.value, patience=0.0)
    assert has_exited(result.value)


@pytest.mark.parametrize("generations", [1, 2])
def test_a_call_that_kills_a_supervisor_leaves_no_process(tmp_path: Path, generations: int) -> None:
    with closing(open_pool(detach_and_kill_supervisors, count=1, timeout=LIMIT)) as pool:
        (result,) = pool.call_all([(str(tmp_path), generations)])
        assert result.failure == "died", result
        assert has_exited(int((tmp_path / "pid").read_text()))


MIB = 1 << 20
FAULTS = {
    "parent": (0, "died", "was ended by SIGKILL"),
    "reply": (MIB + 1, "invalid", "but the limit is 1048576 (worker_limits.reply_mib)"),
    "memory": (512 * MIB, "raised", "MemoryError"),
    "file": (2 * MIB, "raised", "File too large"),
    "processes": (9, "died", "had more than 8 processes (worker_limits.processes), and was ended"),
}


def test_what_exceeds_a_limit_fails_its_own_call() -> None:
    limits = WorkerLimits(memory_gib=0.25, file_gib=1 / 1024, processes=8, reply_mib=1.0)
    with closing(open_pool(use, count=1, timeout=LIMIT, limits=limits)) as pool:
        calls = [call for what, (amount, _, _) in FAULTS.items() for call in ((what, amount), ("nothing", 0))]
        results = pool.call_all(calls)
    assert [result.value for result in results[1::2]] == ["done"] * len(FAULTS)
    for result, (_, failure, sentence) in zip(results[::2], FAULTS.values(), strict=True):
        assert (result.failure, sentence in str(result.error)) == (failure, True), result


def test_workers_get_no_secrets_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_API_KEY", "MY_SETTING"):
        monkeypatch.setenv(name, f"value of {name}")
    limits = WorkerLimits(secrets=("MY_API_KEY",))
    with closing(open_pool(read_variables, count=1, timeout=LIMIT, limits=limits)) as pool:
        given, withheld = pool.call_all([("MY_API_KEY", "MY_SETTING"), ("HF_TOKEN",)])
    assert given.value == ["value of MY_API_KEY", "value of MY_SETTING"]
    assert withheld.failure == "raised"
    assert "workers do not get HF_TOKEN, a secret, unless worker_limits.secrets names it" in str(withheld.error)
    with closing(open_pool(read_variables, count=1, timeout=LIMIT, limits=None)) as pool:
        assert pool.call_all([("HF_TOKEN",)])[0].value == ["value of HF_TOKEN"]


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="processes is 0, but a worker needs more than 0"):
        WorkerLimits(processes=0)
    with pytest.raises((ValueError, WorkerError), match="secrets has NO_SUCH_KEY, but there is no such environment"):
        open_pool(read_variables, count=1, timeout=LIMIT, limits=WorkerLimits(secrets=("NO_SUCH_KEY",)))
