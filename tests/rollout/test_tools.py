"""Tools: a call gets its result or an error message; a completion without a call ends the episode."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.hf.load import byte_tokenizer
from postlude.recipes.checks.environment import _turns
from postlude.recipes.config.environments import ToolSettings
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.environments import TurnResult, read_turn
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.rewards import Score
from postlude.rollout.tools import ToolReply, load_tools, tool_schema
from tests.rollout.episodes import step

TOOLS = '''
import asyncio


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def wait(words: list[str], seconds: float) -> dict:
    await asyncio.sleep(seconds)
    return {"waited": words}


def right(prompt, completion, example):
    return float(completion == example["answer"])
'''
WRITES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2?", "answer": "3"}\n')
    return path


def test_tool_call_gets_its_result_and_final_answer_is_scored(file: Path) -> None:
    reply = ToolReply((f"{file}:add", f"{file}:wait"))
    for completion, heard in {
        call("add", a=1, b=2): ["3"],
        f"Let me see. {call('add', a=1)}\n{call('add', a=5, b=5)}": ["2", "10"],
        call("wait", words=["é"], seconds=0): ['{"waited": ["é"]}'],
        "<tool_call>{add}</tool_call>": ['error: a call is {"name": "...", "arguments": {...}}'],
        '<tool_call>{"name": "add"': ['error: a call is {"name": "...", "arguments": {...}}'],
        call("multiply"): ["error: there is no tool 'multiply'; there are add, wait"],
        call("add", a="x"): ['error: TypeError: can only concatenate str (not "int") to str'],
    }.items():
        assert reply([], [completion], {}) == [{"role": "tool", "content": content} for content in heard]
    assert reply([], ["", "3"], {}) is None


def test_tool_call_within_reasoning_is_ignored(file: Path) -> None:
    """In closed or open reasoning, started in the prompt or not; a call after it counts."""
    rows = file.with_name("rows.jsonl")
    settings = ToolSettings(path=rows, chat=True, tools=(f"{file}:add",), reward="exact", max_turns=2, workers=0)
    thought, spoken = call("add", a=1, b=2), call("add", a=4)
    answers = [
        f"<think>{thought}</think>3",
        f"{thought}</think>3",
        f"3<think>{thought}",
        f"<think>a</think>3<think>{thought}",
    ]
    calls = [f"<think>{thought}</think>{spoken}", f"{thought}</think>{spoken}", f"{spoken}<think>{thought}</think>"]
    hidden = AssistantTurn(f"{thought}3", answer="3")  # the markers are special tokens, which the text lacks
    with closing(settings.build(seed=0)) as environment:
        episodes = [environment.reset(environment.tasks[0]) for _ in range(8)]
        results = step(environment, episodes, [*answers, *calls, hidden])
    for completion, result in zip(answers, results, strict=False):
        assert (result.done, result.score and result.score.reward) == (True, 1.0), completion
    for completion, result in zip(calls, results[4:], strict=False):
        assert result.observation == [{"role": "tool", "content": "5"}], completion
    assert results[-1].done


def test_a_tool_schema_has_the_docstring_and_the_types(file: Path) -> None:
    tools = load_tools([f"{file}:add", f"{file}:wait"])
    assert tool_schema("add", tools["add"]) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
    assert tool_schema("wait", tools["wait"])["function"]["parameters"]["properties"] == {
        "words": {"type": "array"},
        "seconds": {"type": "number"},
    }
    with pytest.raises(ValueError, match="two tools are called add"):
        load_tools([f"{file}:add", f"{file}:add"])


def settings(file: Path, *lines: str) -> ToolSettings:
    chosen = ("--environment.kind=tools", f"--environment.tools=['{file}:add']", f"--environment.reward={file}:right")
    rows = (f"--environment.path={file.parent / 'rows.jsonl'}", "--environment.max_turns=2", "--environment.workers=0")
    environment = load(EvalConfig, None, [*chosen, *rows, *lines]).environment
    assert isinstance(environment, ToolSettings)
    return environment


def test_tools_are_configured_and_rendered_in_the_prompt(file: Path) -> None:
    with pytest.raises(ValueError, match="tools are called in messages, but prompts are text"):
        settings(file).build(0)
    chosen = settings(file, "--environment.chat=true")
    environment = chosen.build(0)
    silent, knowing = byte_tokenizer(), byte_tokenizer()
    knowing.chat_template = WRITES_TOOLS + str(silent.chat_template)
    with pytest.raises(
        ValueError, match=r"the chat template does not write which tools there are \(.*:add\). Describe"
    ):
        _turns(environment, silent, chosen)
    _turns(environment, silent, settings(file, "--environment.chat=true", "--environment.system=Use add."))
    _turns(environment, knowing, chosen)
    encoding = PromptEncoding(knowing, SamplingSettings(max_new_tokens=8), SequenceLimit(1000))
    prompt = encoding.encoder(environment).prompt(environment.tasks[0].prompt)
    assert "Add two numbers." in knowing.decode(prompt)
    episodes = [environment.reset(environment.tasks[0]) for _ in range(2)]
    assert step(environment, episodes, [call("add", a=1, b=2), "4"]) == [
        TurnResult(observation=[{"role": "tool", "content": "3"}]),
        TurnResult(Score(0.0)),
    ]
    assert step(environment, episodes[:1], ["3"]) == [TurnResult(Score(1.0))]
    environment.close()


def test_several_rewards_score_the_end_of_a_conversation(file: Path) -> None:
    """The last completion is scored, what the reply returned is added, and an episode that the reply fails is not."""
    file.write_text(
        "def reply(prompt, completions, example):\n"
        "    if completions[-1] == 'fail': raise ValueError\n"
        "    return 'go on' if len(completions) == 1 else 2.0 if completions[-1] == 'bonus' else None\n"
        "def lengths(completions, **columns): return [len(text) for text in completions]\n"
    )
    chosen = ("kind=conversation", f"reply={file}:reply", f"path={file.parent / 'rows.jsonl'}", "workers=0")
    rewards = f"{{right: exact, long: {{kind: function, function: '{file}:lengths', weight: 0.5}}}}"
    words = [f"--environment.{word}" for word in (*chosen, "max_turns=3", f"rewards={rewards}")]
    environment = load(EvalConfig, None, words).environment.build(0)
    with closing(environment):
        environment.trial_call(environment.tasks[0], AssistantTurn("3"))
        episodes = [environment.reset(environment.tasks[0]) for _ in range(3)]
        goes_on = TurnResult(observation="go on")
        assert step(environment, episodes, ["", "", "fail"])[:2] == [goes_on, goes_on]
        assert [episode.score is not None and episode.score.excluded for episode in episodes] == [False, False, True]
        results = step(environment, episodes[:2], ["3", "bonus"])
        assert [result.score and result.score.reward for result in results] == [1.5, 4.5]
        assert dict(getattr(results[0].score, "components", {})) == {"right": 1.0, "long": 1.0}
    grouped = f"{{right: {{kind: function, function: '{file}:lengths', group: true}}}}"
    with pytest.raises(ValueError, match=r"has group: true, .* would never be complete\. Set group to false"):
        load(EvalConfig, None, [*words[:-1], f"--environment.rewards={grouped}"]).environment.build(0)
    with pytest.raises(ConfigError, match="it has both reward and rewards"):
        load(EvalConfig, None, [*words, "--environment.reward=exact"])
    with pytest.raises(ValueError, match="returned None, but a reward is a number"):
        read_turn(None)  # without a reward, None is no score


def test_a_reward_that_does_not_apply_leaves_what_the_episode_returned(file: Path) -> None:
    file.write_text(
        "def reply(prompt, completions, example): return 2.0 if completions[-1] == 'own' else None\n"
        "def inapplicable(completions): return [None for _ in completions]\n"
    )
    chosen = ("kind=conversation", f"reply={file}:reply", f"path={file.parent / 'rows.jsonl'}", "workers=0")
    words = [f"--environment.{word}" for word in (*chosen, "max_turns=3", f"reward={file}:inapplicable")]
    environment = load(EvalConfig, None, words).environment.build(0)
    with closing(environment):
        own, none = step(environment, [environment.reset(environment.tasks[0]) for _ in range(2)], ["own", "none"])
    assert own == TurnResult(Score(2.0))
    assert none.score is not None
    assert none.score.excluded
