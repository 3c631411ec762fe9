"""Thoughts: their markers follow from the template and the vocabulary, and what is scored is what follows them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from postlude.data.chat import Encoder
from postlude.data.thoughts import DEFAULT_MARKERS, KNOWN_MARKERS, ThoughtMarkers, answer_text
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.conversations import Conversations, PromptSource, TrajectoryGroup
from postlude.rollout.environments import SingleTurn
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.tasks import Task
from tests.data.test_turn_ends import CHATML, GPT_OSS, tokenizer

MAGISTRAL = (
    "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
    "{% endfor %}"
)
OWN = "{% if m.reasoning_content %}<hm>{{ m.reasoning_content }}</hm>\n{% endif %}"
REASONS = CHATML.replace("{{ m.content", OWN + "{{ m.content")
OPENS = REASONS.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<hm>{% endif %}")


def test_completion_without_thoughts_is_the_answer() -> None:
    think = KNOWN_MARKERS[0]
    for completion, in_thought, answer in (
        ("4", False, "4"),
        ("<think>3</think>4", False, "4"),
        ("3</think>4", False, "4"),
        ("3 <think>so</think>4", True, "4"),
        ("3 </think>or</think>4", False, "4"),
        ("4 <think>3</think>", False, "4 "),
        ("<think>4", False, ""),
        ("4", True, ""),
        ("<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", False, "4"),
        ("<|channel|>analysis<|message|>4", False, ""),
    ):
        assert think.answer(completion, in_thought=in_thought) == answer
        if not in_thought:
            for known in KNOWN_MARKERS:
                other = completion.replace(think.open, known.open).replace(think.close, known.close)
                assert known.answer(other) == answer_text(other) == answer


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (CHATML, [], DEFAULT_MARKERS),
        (None, [], DEFAULT_MARKERS),
        (CHATML, ["<think>", "</think>"], ThoughtMarkers("<think>", "</think>")),
        (MAGISTRAL, ["[THINK]", "[/THINK]"], ThoughtMarkers("[THINK]", "[/THINK]")),
        ("{# [THINK] #}" + MAGISTRAL, [], ThoughtMarkers("[THINK]", "[/THINK]")),
        (REASONS, [], ThoughtMarkers("<hm>", "</hm>")),
        (OPENS, [], ThoughtMarkers("<hm>", "</hm>")),
        (REASONS.replace("hm>", "seed:think>"), [], ThoughtMarkers("<seed:think>", "</seed:think>")),
        (OPENS.replace("hm>", "longcat_think>"), [], ThoughtMarkers("<longcat_think>", "</longcat_think>")),
        (REASONS, ["<think>", "</think>"], ThoughtMarkers("<hm>", "</hm>")),
    ],
)
def test_markers_follow_from_the_template_and_the_vocabulary(
    template: str | None, special: list[str], expected: ThoughtMarkers
) -> None:
    fast = tokenizer(template)
    fast.add_special_tokens({"additional_special_tokens": special})
    assert Encoder(tokenizer=fast).thoughts == expected


class Replies:
    """An engine that completes every prompt with the same tokens."""

    fixed_order = False

    def __init__(self, completion: Completion) -> None:
        self.completion, self._ids, self._waiting = completion, count(), list[int]()

    def submit(self, request: Request) -> int:
        self._waiting.append(next(self._ids))
        return self._waiting[-1]

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        waiting, self._waiting = self._waiting, []
        return [FinishedCompletion(request_id, 0, self.completion) for request_id in waiting]


@pytest.mark.parametrize(
    ("template", "header", "written", "stop", "answer"),
    [
        (MAGISTRAL, "", "[THINK]3?[/THINK]so 4<|endoftext|>", None, "so 4"),
        (MAGISTRAL, "", "[THINK]3? 4", None, ""),
        (MAGISTRAL, "", "so [THINK]3?[/THINK]4.\n\n", "\n\n", "so 4."),
        (MAGISTRAL, "[THINK]", "3?[/THINK]4<|endoftext|>", None, "4"),
        (MAGISTRAL, "[THINK]\n", "3?", None, ""),
        (OPENS, "", "3?</hm>4<|im_end|>", None, "4"),
        (OPENS, "", "3?", None, ""),
        (REASONS, "", "<hm>3?</hm>4<|im_end|>", None, "4"),
        (GPT_OSS, "", "<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
         None, "4"),
    ],
)  # fmt: skip
def test_rewards_get_the_answer_also_if_the_markers_are_special_tokens(
    template: str, header: str, written: str, stop: str | None, answer: str
) -> None:
    """The text of a completion lacks special tokens, and thoughts would be scored."""
    fast = tokenizer(template)
    fast.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|channel|>"]})
    tokens = fast(written, add_special_tokens=False)["input_ids"]
    text = fast.decode(tokens, skip_special_tokens=True)
    completion = Completion(tokens, [0.0] * len(tokens), [], "stop", text if stop is None else text.partition(stop)[0])
    seen: list[Any] = []

    def reward(completion: str, raw_completion: str, answer_text: str) -> float:
        seen.append((raw_completion, answer_text))
        return 0.0

    environment, encoder = SingleTurn([], FunctionReward(reward, workers=0)), Encoder(tokenizer=fast)
    conversations = Conversations(Replies(completion), budget=1000)
    prompt = [*encoder.prompt([{"role": "user", "content": "2+2?"}]), *fast(header)["input_ids"]]
    source, params = PromptSource(environment, encoder), SamplingParams(max_new_tokens=100)
    group = TrajectoryGroup.of(Task("2+2?"), 0, prompt, params, 1, source)
    conversations.start(group)
    while not group.done:
        conversations.poll(1.0)
    environment.close()
    assert seen == [(written, answer)]
