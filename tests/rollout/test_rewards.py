"""Rewards: an error in a function affects its own sample only; worker processes give the same scores."""

import importlib.util
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from postlude.pool import process_pool
from postlude.pool.process_pool import _WorkerProcess, open_pool
from postlude.pool.worker_pool import CallResult, WorkerError
from postlude.rollout.rewards import Score
from postlude.rollout.verifiers import ExactReward, MathReward, extract
from postlude.user_code import UserCodeError
from tests.clock import Clock
from tests.conftest import PATIENCE
from tests.rollout.functions import (
    forking,
    length,
    misbehave,
    process_id,
    start_child_and_hang,
    start_session_and_hang,
    write_partial_reply,
)
from tests.rollout.reward_pool import RewardPool, pass_limit, score_past_hangs, wait_for_file

FAULTS = {
    "raise": ("raised", "misbehave failed: RuntimeError: no such thing (functions.py, line "),
    "exit": ("raised", "misbehave failed: SystemExit: 3"),
    "die": ("died", "misbehave ended its process with exit code 7."),
    "killed": ("died", "misbehave was ended by SIGSEGV."),
    "garbage": ("died", "misbehave wrote to the pipe of its worker process."),
    "partial": ("died", "misbehave wrote to the pipe of its worker process."),
    "forged": ("died", "misbehave wrote to the pipe of its worker process."),
    "nan": ("invalid", "misbehave returned nan, but a reward is finite."),
    "inf": ("invalid", "misbehave returned inf, but a reward is finite."),
    "-inf": ("invalid", "misbehave returned -inf, but a reward is finite."),
    "part": ("invalid", 'misbehave returned nan for "style", but a reward is finite.'),
    "none": ("invalid", "misbehave returned None, but a reward is a number or a dict of numbers."),
    "text": ("invalid", "misbehave returned '1.0', but a reward is a number or a dict of numbers."),
    "object": ("invalid", "misbehave failed: TypeError: it returned a object, but it may return numbers, text"),
    "list": ("invalid", "misbehave returned [1.0], but a reward is a number or a dict of numbers."),
    "empty": ("invalid", "misbehave returned an empty dict, but a reward is a number or a dict of numbers."),
    "huge": ("invalid", "misbehave returned inf, but a reward is finite."),
}


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[RewardPool]:
    with closing(RewardPool(misbehave, workers=2, timeout=PATIENCE, failed_reward=-1.0)) as pool:
        yield pool


Call = tuple[str, str, Mapping[str, Any]]  # prompt, completion, example


def calls(*completions: str) -> list[Call]:
    return [("p", completion, {}) for completion in completions]


def score_all(pool: RewardPool, reward_calls: Sequence[Call]) -> list[Any]:
    call_ids = [pool.submit(call) for call in reward_calls]
    results: dict[int, Any] = {}
    while len(results) < len(call_ids):
        results |= pool.poll(None)
    return [results[call_id] for call_id in call_ids]


def has_exited(pid: int, patience: float = 300.0) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True  # ended, and not yet collected by whoever adopted it
        time.sleep(0.02)
    return False


def test_worker_results_equal_local_results_in_order() -> None:
    reward_calls = [("p", "x" * (i % 17), {"bonus": i}) for i in range(1000)]
    with closing(RewardPool(length, workers=0)) as inline_pool, closing(RewardPool(length, workers=3)) as process_pool:
        expected = score_all(inline_pool, reward_calls)
        assert expected[3] == Score(6.0, {"length": 3.0, "bonus": 3.0})
        assert score_all(process_pool, reward_calls) == expected
        assert score_all(process_pool, reward_calls[::-1]) == expected[::-1]
        assert score_all(process_pool, []) == []
        assert process_pool.failures == inline_pool.failures == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_affects_only_its_own_sample(misbehaving: RewardPool, fault: str) -> None:
    kind, sentence = FAULTS[fault]
    before = misbehaving.failures.copy()
    scores = score_all(misbehaving, calls(*["fine"] * 5, fault, *["fine"] * 6))
    assert [score.reward for score in scores] == [1.0] * 5 + [-1.0] + [1.0] * 6
    assert [index for index, score in enumerate(scores) if score.error] == [5]
    assert not scores[5].excluded, "as failed_reward is set"
    assert (scores[5].error or "").startswith(sentence)
    assert misbehaving.failures - before == {kind: 1}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(process_pool, "time", clock)
    return clock


def test_a_call_that_hangs_is_ended_and_costs_only_its_own_sample(clock: Clock, tmp_path: Path) -> None:
    with closing(RewardPool(misbehave, workers=1, timeout=PATIENCE, failed_reward=-1.0)) as pool:
        scores = score_past_hangs(pool, clock, tmp_path, calls(*["fine"] * 5, "hang", *["fine"] * 6))
        assert [score.reward for score in scores] == [1.0] * 5 + [-1.0] + [1.0] * 6
        assert scores[5].error == "misbehave took more than 300 s and was ended."
        assert pool.failures == {"timed_out": 1}


@pytest.mark.slow
def test_all_samples_may_fail(clock: Clock, tmp_path: Path) -> None:
    with closing(RewardPool(misbehave, workers=1, timeout=PATIENCE)) as pool:
        wrong = calls("die", "hang", "nan", "killed", "raise", "hang", "die")
        scores = score_past_hangs(pool, clock, tmp_path, wrong)
        assert all(score.excluded for score in scores)
        assert pool.failures == {"died": 3, "timed_out": 2, "invalid": 1, "raised": 1}
        assert score_all(pool, calls("fine", "fine")) == [Score(1.0)] * 2


def test_the_first_failure_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), closing(RewardPool(misbehave, workers=0)) as pool:
        score_all(pool, calls("nan", "nan", "raise"))
    assert caplog.records[0].getMessage() == (
        "misbehave returned nan, but a reward is finite. The sample is left out (unless the weight is 0); such "
        "failures are counted."
    )
    assert len(caplog.records) == 2
    caplog.clear()
    with caplog.at_level(logging.WARNING), closing(RewardPool(misbehave, workers=0, failed_reward=-1.0)) as pool:
        score_all(pool, calls("nan"))
    assert "The sample gets reward -1; such failures" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_forked_child_does_not_reply_for_its_parent(workers: int) -> None:
    """Whether it calls sys.exit, raises or returns; its parent, which waits for it, gets its exit status."""
    completions = ["exit", "raise", "return"] * 3
    with closing(RewardPool(forking, workers=workers, timeout=PATIENCE)) as pool:
        assert [score.reward for score in score_all(pool, calls(*completions))] == [3.0, 1.0, 0.0] * 3


def test_a_partial_reply_delays_no_other_call(clock: Clock, tmp_path: Path) -> None:
    """A reply that never completes costs its call the timeout, and delays no other."""
    with closing(RewardPool(write_partial_reply, workers=2, timeout=PATIENCE)) as pool:
        half = pool.submit(("p", "half", {"started": str(tmp_path / "started")}))
        assert [score.reward for score in score_all(pool, calls("fine", "fine", "fine"))] == [1.0] * 3
        wait_for_file(tmp_path / "started")
        pass_limit(pool.pool, clock)
        assert pool.poll(None)[half].error == "write_partial_reply took more than 300 s and was ended."


@pytest.mark.slow
@pytest.mark.parametrize("function", [start_child_and_hang, start_session_and_hang])
def test_a_hung_worker_is_killed_with_its_child_processes(
    clock: Clock, tmp_path: Path, function: Callable[[str], None]
) -> None:
    if function is start_session_and_hang and sys.platform != "linux":
        pytest.skip("processes of other sessions are adopted on Linux alone")
    workers = open_pool(function, count=1, timeout=PATIENCE)
    call_id = workers.submit((str(tmp_path),))
    wait_for_file(tmp_path / "started")
    pass_limit(workers, clock)
    assert workers.poll(None)[call_id].failure == "timed_out"
    assert all(has_exited(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    workers.close()


def test_closing_ends_the_workers() -> None:
    pool = RewardPool(process_id, workers=2)
    pids = {int(score.reward) for score in score_all(pool, calls(*["x"] * 64))}
    pool.close()
    pool.close()  # which changes nothing
    assert all(has_exited(pid) for pid in pids)
    with pytest.raises(WorkerError, match="the workers of process_id were closed"):
        score_all(pool, calls("x"))


TRAINER = """
import os, signal
from postlude.pool.process_pool import open_pool
from tests.rollout.functions import process_id
workers = open_pool(process_id, count=1, timeout=60.0)
print(workers.call_all([()])[0].value, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_do_not_outlive_a_trainer_that_was_killed() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert has_exited(int(done.stdout))


def test_worker_without_its_trainer_ends_silently() -> None:
    (calls, sent), (received, replies) = os.pipe(), os.pipe()
    function = {"secret": "s", "sys_path": sys.path, "pickled": pickle.dumps(len), "file": None, "limits": None}
    with Connection(sent, readable=False) as pool:
        pool.send_bytes(pickle.dumps(function))
    os.close(received)
    command = [sys.executable, "-c", "from postlude.pool.supervisor import main; main()", str(calls), str(replies), "0"]
    done = subprocess.run(command, pass_fds=(calls, replies), capture_output=True, text=True, check=False)
    os.close(calls)
    os.close(replies)
    assert (done.returncode, done.stderr) == (0, "")


def test_arguments_that_cannot_be_sent_leave_the_pool_usable() -> None:
    with closing(open_pool(length, count=2, timeout=30.0)) as workers:
        bad = [*calls(*["x"] * 20), ("p", "x", {"function": lambda: None})]
        with pytest.raises(WorkerError, match=r"cannot be sent to a worker process .* or use workers=0"):
            workers.call_all(bad)
        assert [outcome.value["length"] for outcome in workers.call_all(calls("a", "bb", "ccc"))] == [1.0, 2.0, 3.0]


def numbers(prompt: str, completion: str, example: Mapping[str, Any]) -> Any:
    kinds = {"numpy": np.float32(0.5), "torch": torch.tensor(0.5), "bool": True, "int": 2}
    return kinds.get(completion) or {"reward": np.int64(3), "seen": True}


def test_all_number_types_are_accepted() -> None:
    with closing(RewardPool(numbers, workers=0)) as pool:
        scores = score_all(pool, calls("numpy", "torch", "bool", "int", "dict"))
    assert scores == [Score(0.5), Score(0.5), Score(1.0), Score(2.0), Score(3.0, {"seen": 1.0})]


FILE = """
from dataclasses import dataclass
import sys

@dataclass
class Length:
    weight: float
    def __call__(self, prompt, completion, example):
        print("noise on stdout")
        return self.weight * len(completion)

reward = Length(2.0)
torch_is_here = lambda prompt, completion, example: "torch" in sys.modules
order = lambda prompt, completion, example: hash("a string") % 1000
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FILE)
    return tmp_path / "rewards.py"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_is_loaded_by_its_path(file: Path, workers: int) -> None:
    with closing(RewardPool(f"{file}:reward", workers=workers)) as pool:
        assert score_all(pool, calls("abc")) == [Score(6.0)]


def test_worker_imports_no_torch_and_has_a_fixed_hash_seed(file: Path) -> None:
    with closing(RewardPool(f"{file}:torch_is_here", workers=1)) as pool:
        assert score_all(pool, calls("x")) == [Score(0.0)]
    scores = []
    for _ in range(2):
        with closing(RewardPool(f"{file}:order", workers=1)) as pool:
            scores += score_all(pool, calls("x"))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rewards.py:rewrad", r"rewards\.py has no rewrad; did you mean reward\?"),
        ("reward.py:reward", r"there is no file .*reward\.py; did you mean .*rewards\.py\?"),
        ("rewards.py:number", "number in .* is of type int, which cannot be called"),
        ("rewards.py", r"names no function\. Write it as path/to/file\.py:name"),
        ("broken.py:reward", r"broken\.py cannot be run: ZeroDivisionError: division by zero \(broken\.py, line 1\)"),
    ],
)
def test_function_that_cannot_be_loaded_gives_clear_error(file: Path, name: str, sentence: str, workers: int) -> None:
    (file.parent / "broken.py").write_text("1 / 0")
    with pytest.raises((WorkerError, UserCodeError), match=sentence):
        RewardPool(f"{file.parent}/{name}", workers=workers)


def test_file_that_exits_at_import_gives_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os; os._exit(4)")
    with pytest.raises(WorkerError, match=r"cannot be loaded: it ended its process with exit code 4"):
        RewardPool(f"{tmp_path}/ends.py:reward", workers=1)


def test_a_function_of_a_module_that_workers_cannot_import_is_loaded_by_its_file(file: Path) -> None:
    file.write_text("def reward(prompt, completion, example):\n    return 5.0\n")
    spec = importlib.util.spec_from_file_location("nowhere_to_be_found", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nowhere_to_be_found"] = module
    spec.loader.exec_module(module)
    with closing(RewardPool(module.reward, workers=1)) as pool:
        assert score_all(pool, calls("x")) == [Score(5.0)]


def test_function_that_workers_cannot_load_is_refused() -> None:
    with (
        Path(__file__).open("rb") as opened,
        pytest.raises(WorkerError, match=r"<lambda> cannot be sent to another process.* Or use workers=0"),
    ):
        RewardPool(lambda *_: float(opened.closed), workers=1)
    for workers in (0, 1):
        with closing(RewardPool(lambda *_: 1.0, workers=workers)) as pool:
            assert score_all(pool, calls("x")) == [Score(1.0)]


SCRIPT = """
from postlude.pool.process_pool import open_pool
def reward(prompt, completion, example):
    return 4.0
GUARD
    workers = open_pool(reward, count=1, timeout=60.0)
    print(workers.call_all([("p", "c", {})])[0].value)
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_script_can_use_its_own_function_with_a_main_guard(tmp_path: Path, guard: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", guard))
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, check=False)
    if guard == "if True:":
        assert 'put what it does itself under `if __name__ == "__main__":`' in done.stderr
    else:
        assert done.stdout == "4.0\n", done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": -1}, "workers is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"failed_reward": float("nan")}, "failed_reward is nan"),
    ],
)
def test_invalid_settings_give_clear_errors(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RewardPool(length, **settings)


def test_answer_is_taken_from_the_last_tag() -> None:
    assert extract("<answer>1</answer> no <answer>\n 2\n</answer>!", "answer") == "2"
    assert extract("no tag", "answer") is None
    assert extract(" all ", None) == "all"


MATH = [
    (r"so \boxed{\frac{1}{2}}.", "0.5", 1.0, 1.0),
    ("the answer is 1/2", r"$\frac{2}{4}$", 1.0, 1.0),
    (r"\boxed{3}", "work work\n#### 3", 1.0, 1.0),
    (r"it is $x^2 + 2x + 1$", "(x+1)^2", 1.0, 1.0),
    (r"\boxed{1,000}", "1000", 1.0, 1.0),
    (r"\boxed{4}", r"\boxed{3}", 0.0, 1.0),
    ("I cannot say", "3", 0.0, 0.0),
    (r"<think>so \boxed{3}. Wait: 4.</think> The answer is \boxed{4}.", "4", 1.0, 1.0),
    (r"<think>\boxed{4}</think> So the answer is 5.", "4", 0.0, 1.0),
    (r"\boxed{4}, I think.</think> So the answer is 5.", "4", 0.0, 1.0),  # the prompt began the thought
    (r"<think>it is \boxed{4}", "4", 0.0, 0.0),
    (r"\boxed{3} is a step to \boxed{\frac{8}{2}}, but \boxed{", "4", 1.0, 1.0),
    ("", "3", 0.0, 0.0),
]


@pytest.mark.slow
def test_mathematical_answers_are_compared_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    with closing(RewardPool(MathReward(), workers=1, timeout=PATIENCE)) as pool:
        scores = score_all(pool, [("p", completion, {"answer": answer}) for completion, answer, _, _ in MATH])
        assert [(score.reward, score.components["parsed"], score.error) for score in scores] == [
            (reward, parsed, None) for _, _, reward, parsed in MATH
        ]
        failed = score_all(pool, [("p", "3", {"answer": ""}), ("p", "3", {"anwser": "3"})])
        assert [score.reward for score in failed] == [0.0, 0.0]
        assert "'' holds no mathematical answer" in str(failed[0].error)
        assert 'the example has no "answer"; it has: anwser' in str(failed[1].error)


def test_exact_answers_are_compared_as_text() -> None:
    """Surrounding spaces do not count, and a number in a row is compared as text."""
    with closing(RewardPool(ExactReward(), workers=0)) as pool:
        rows = [("14", "14"), ("<think>?</think> 14\n", 14), ("14.0", "14"), ("so 14", "14"), ("", "14")]
        scores = score_all(pool, [("p", completion, {"answer": answer}) for completion, answer in rows])
        assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0]
        (failed,) = score_all(pool, [("p", "3", {"anwser": "3"})])
        assert 'the example has no "answer"; it has: anwser' in str(failed.error)


def test_mathematical_answer_may_be_in_a_tag() -> None:
    pytest.importorskip("math_verify")
    judge = MathReward(column="gold", tag="answer")
    cases = {"<answer>x + 1</answer>": 1.0, "<answer>$1+x$</answer>": 1.0, "x + 1": 0.0, "<answer>x</answer>": 0.0}
    assert {text: judge("p", text, {"gold": "1 + x"})["reward"] for text in cases} == cases


def test_missing_math_verify_package_gives_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="needs the package math-verify: pip install math-verify"):
        RewardPool(MathReward(), workers=0)


def test_a_reply_to_another_call_is_refused() -> None:
    """It has the worker's secret but another call id: replies of an earlier call must not score this one."""
    process = _WorkerProcess.__new__(_WorkerProcess)
    process.sent, process.forged, process.ended, process.timeout = deque([3, 4]), False, False, 1.0
    process.removed = frozenset()
    results: dict[int, CallResult] = {}
    with mock.patch.object(process, "receive", return_value=[{"id": 3, "value": 1.0}, {"id": 3, "value": 2.0}]):
        assert not process.collect(results)
    assert (list(results), list(process.sent), process.forged) == ([3], [4], True)
