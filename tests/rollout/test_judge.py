"""Judge rewards: the prompt, parsing of scores, and replies without a score."""

import re
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest

from postlude.rollout import judge as module
from postlude.rollout.environments import SingleTurn
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.judge import JudgeReward
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from postlude.rollout.verdict import Verdict
from tests.rollout.episodes import step
from tests.rollout.judge_server import judge_server

TEMPLATE = "Q: {prompt}\nA: {completion}\nGold: {gold}\nWrite {{score}} as Score: n"
TASKS = [
    Task([{"role": "system", "content": "Be {kind}."}, {"role": "user", "content": "2+2?"}], {"gold": "4"}, "line 1"),
    Task("3+3?", {"gold": "6"}, "line 2"),
]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.01)


def scores(reward: JudgeReward, *texts: str) -> list[Score]:
    environment = SingleTurn(TASKS, reward)
    with closing(environment):
        episodes = [environment.reset(TASKS[place % 2]) for place in range(len(texts))]
        return [result.score or Score(0.0) for result in step(environment, episodes, texts)]


def test_a_judge_gets_the_template_and_its_score_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judge_server(lambda body, number: f"score: 1? No. Score: {len(body['messages'][1]['content'])}.5") as server:
        reward = JudgeReward(
            server.url,
            "big",
            TEMPLATE,
            system="Grade.",
            key_variable="JUDGE_KEY",
            extra={"seed": 3},
            temperature=0.5,
            max_new_tokens=9,
        )
        first, second = scores(reward, "four {braces}", "6")
    questions = [
        "Q: system: Be {kind}.\n\nuser: 2+2?\nA: four {braces}\nGold: 4\nWrite {score} as Score: n",
        "Q: 3+3?\nA: 6\nGold: 6\nWrite {score} as Score: n",
    ]
    assert [first, second] == [Score(len(question) + 0.5) for question in questions]
    bodies = sorted(server.bodies, key=lambda body: -len(body["messages"][1]["content"]))
    assert bodies == [
        {
            "model": "big",
            "temperature": 0.5,
            "max_tokens": 9,
            "seed": 3,
            "messages": [{"role": "system", "content": "Grade."}, {"role": "user", "content": question}],
        }
        for question in questions
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["path"] == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("verdict", "answer", "score"),
    [
        (Verdict(), "Score: 3\nScore: -0.25", -0.25),
        (Verdict(r"\[\[(\w+)\]\]", {"yes": 1.0, "no": 0.0}), "[[yes]] or [[No]]", 0.0),
        (Verdict(lowest=0.0, highest=10.0), "SCORE : 10", 10.0),
        (Verdict(), "Score: **8**", 8.0),
        (Verdict(), "**Score:** 8/10", 8.0),
        (Verdict(), '{"score": .5}', 0.5),
        (Verdict(), "I like it", r"has no match of '(?i)score"),
        (Verdict(r"\[\[(\w+)\]\]", {"yes": 1.0}), "[[maybe]]", "says 'maybe', which is none of yes"),
        (Verdict(r"<(.*)>"), "<good>", "says 'good', which is no number"),
        (Verdict(r"<(.*)>"), "<nan>", "says nan, which is not between -inf and inf"),
        (Verdict(lowest=0.0, highest=10.0), "Score: 11", "says 11, which is not between 0 and 10"),
    ],
)
def test_a_score_is_the_first_group_of_the_last_match(verdict: Verdict, answer: str, score: float | str) -> None:
    if isinstance(score, str):
        with pytest.raises(ValueError, match=re.escape(score)):
            verdict.read(answer)
    else:
        assert verdict.read(answer) == score


def test_a_judge_may_read_the_whole_transcript() -> None:
    with judge_server(lambda body, number: "Score: 1") as server:
        reward = JudgeReward(server.url, "m", "{prompt}\n\n{transcript}")
        turns = [AssistantTurn("<think>?</think>4?"), AssistantTurn("5")]
        reward.submit(Episode(TASKS[0], turns, [[{"role": "tool", "content": "No."}]]))
        assert [score.reward for _, score in reward.poll(None)] == [1.0]
        reward.close()
    (body,) = server.bodies
    expected = "system: Be {kind}.\n\nuser: 2+2?\n\nassistant: 4?\n\ntool: No.\n\nassistant: 5"
    assert body["messages"][0]["content"] == expected


def test_neither_judge_nor_policy_is_read_in_its_thoughts() -> None:
    def reply(body: Any, number: int) -> str:
        return f"<think>Score: 9</think>Score: {len(body['messages'][0]['content'])}<think>Score: 9"

    with judge_server(reply) as server:
        template = "{completion}|{raw_completion}"
        (score,) = scores(JudgeReward(server.url, "m", template), "<think>Say 9</think>6")
    assert score == Score(len("6|<think>Say 9</think>6"))


def test_reply_without_a_score_fails_or_gets_the_default_score() -> None:
    with judge_server(lambda body, number: "Score: 2" if "good" in str(body) else "I cannot say.") as server:
        good, bad = scores(JudgeReward(server.url, "m", TEMPLATE), "good", "bad")
        assert (good, bad.excluded, bad.components) == (Score(2.0), True, {"invalid": 1.0})
        assert bad.error is not None
        assert bad.error.startswith(
            f"the judge m at {server.url} answered 'I cannot say.' for line 2, which has no match of "
        )
        _, bad = scores(JudgeReward(server.url, "m", TEMPLATE, unparsable_reward=-1.0), "good", "bad")
        assert bad == Score(-1.0, {"unparsable": 1.0})
        reward = JudgeReward(server.url, "m", TEMPLATE)
        reward.trial_call(TASKS[0], AssistantTurn("good"))
        with pytest.raises(
            ValueError, match=r"answered 'I cannot say\.' on trial on line 1, .*set unparsable_reward\."
        ):
            reward.trial_call(TASKS[0], AssistantTurn("bad"))
        reward.close()


def test_a_request_to_a_busy_judge_is_retried_and_a_refusal_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.2)

    def answer(body: dict[str, Any], number: int) -> Any:
        if "refuse" in str(body):
            return 400, {"error": "no such model"}
        return (429, {}) if number < 2 else "Score: 7"

    with judge_server(answer) as server:
        start = time.monotonic()
        assert scores(JudgeReward(server.url, "m", TEMPLATE, retries=2), "x") == [Score(7.0)]
        assert len(server.bodies) == 3
        assert time.monotonic() - start >= 0.2 + 0.4, "the time before a retry doubles"
        (refused,) = scores(JudgeReward(server.url, "m", TEMPLATE, retries=2), "refuse")
        assert len(server.bodies) == 4, "it is not asked again"
        assert "failed on line 1: it replies with status 400: no such model" in str(refused.error)
    with judge_server(lambda body, number: (503, {})) as server:
        (failed,) = scores(JudgeReward(server.url, "m", TEMPLATE, retries=1), "x")
        assert len(server.bodies) == 2
        assert "failed on line 1: it replies with status 503: {}; it was asked 2 times" in str(failed.error)


def test_requests_run_concurrently_up_to_the_limit_and_timeout() -> None:
    released = threading.Event()

    def answer(body: dict[str, Any], number: int) -> str:
        if "slow" in str(body["messages"]):
            released.wait(60)
        time.sleep(0.05)
        return "Score: 1"

    with judge_server(answer) as server:
        judged = scores(JudgeReward(server.url, "m", TEMPLATE, concurrency=3), *["x"] * 12)
        assert [score.error for score in judged] == [None] * 12
        (slow,) = scores(JudgeReward(server.url, "m", TEMPLATE, timeout=0.5, retries=0), "slow")
        released.set()
    assert server.max_running == 3
    assert "failed on line 1: it gave no reply within 0.5 s" in str(slow.error)


def test_invalid_judge_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        ValueError, match=r"failed on trial on line 1: it cannot be reached: Connection refused; it was"
    ):
        JudgeReward(url, "m", TEMPLATE).trial_call(TASKS[0], AssistantTurn("x"))
    with pytest.raises(
        ValueError, match=r"the template '\{question\}' cannot be filled .*line 1 has: gold, prompt, comp"
    ):
        JudgeReward(url, "m", "{question}").trial_call(TASKS[0], AssistantTurn("x"))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="key_variable is NO_SUCH_KEY, but there is no such environment variable"):
        JudgeReward(url, "m", TEMPLATE, key_variable="NO_SUCH_KEY").trial_call(TASKS[0], AssistantTurn("x"))
    with pytest.raises(ValueError, match=r"pattern 'score' has no group in parentheses"):
        Verdict("score")
    with pytest.raises(ValueError, match=r"pattern '\(' is no regular expression"):
        Verdict("(")
