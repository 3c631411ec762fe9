"""The calls of an agent as sequences: what the sampler read and wrote, each sampled token trained on once."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.data.chat import Encoder
from postlude.generate.protocol import Completion
from postlude.hf.load import byte_tokenizer
from postlude.rollout import agent_transcripts
from postlude.rollout.agent_transcripts import AgentTranscripts, ChatEncoders

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # removes the reasoning of earlier turns once the user asks again, as Qwen3's does
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "?", "parameters": {"type": "object"}}}
Message = dict[str, Any]


def encoders(template: str = TEMPLATE) -> ChatEncoders:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ChatEncoders(tokenizer, {})


def encoder(template: str = TEMPLATE, **options: Any) -> Encoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer=tokenizer, options=options)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def call(identity: str, **arguments: Any) -> Message:
    return {"type": "function", "id": identity, "function": {"name": "add", "arguments": arguments}}


@dataclass
class Recorded:
    """A call as the sampler saw it."""

    messages: list[Message]
    tools: Sequence[Message]
    prompt: list[int]
    completion: Completion
    reply: Message


@dataclass
class Agent:
    """Makes calls. Its sampler's tokens are no encoding of the messages that it gets."""

    transcripts: AgentTranscripts
    calls: list[Recorded] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def ask(self, messages: list[Message], reply: Message, tools: Sequence[Message] = (), **settings: Any) -> Recorded:
        """Makes one call."""
        prompt = self.transcripts.prompt(copy.deepcopy(messages), tools)
        return self.sampled(messages, reply, tools, prompt, **settings)

    def sampled(
        self, messages: list[Message], reply: Message, tools: Sequence[Message], prompt: list[int], **settings: Any
    ) -> Recorded:
        number = next(self.numbers)
        tokens = [1000 + number, *random.Random(number).choice([(), (65,), (259,), (66, 67, 259)])]
        completion = Completion(tokens, [-1.0 - number] * len(tokens), [0.0] * len(tokens), "stop", "?")
        self.transcripts.completed(messages, tools, {}, prompt, completion, copy.deepcopy(reply), **settings)
        self.calls.append(Recorded(copy.deepcopy(messages), tools, prompt, completion, reply))
        return self.calls[-1]

    def check_masks(self) -> None:
        """Checks that every sampled token is trained on once, after exactly what the sampler read before it."""
        wanted = sorted((recorded.prompt, recorded.completion.tokens) for recorded in self.calls)
        trained = []
        for transcript in self.transcripts.transcripts():
            assert len(transcript.tokens) == len(transcript.mask) == len(transcript.logprobs)
            remaining = {(*recorded.prompt, *recorded.completion.tokens): recorded for recorded in self.calls}
            place = 0
            while place < len(transcript.tokens):
                if not transcript.mask[place]:
                    assert transcript.logprobs[place] == 0.0
                    place += 1
                    continue
                ends = [
                    end
                    for end in range(place + 1, len(transcript.tokens) + 1)
                    if (recorded := remaining.get(tuple(transcript.tokens[:end])))
                    and recorded.prompt == transcript.tokens[:place]
                ]
                recorded = remaining[tuple(transcript.tokens[: ends[0]])]
                assert transcript.mask[place : ends[0]] == [1] * len(recorded.completion.tokens)
                assert transcript.logprobs[place : ends[0]] == recorded.completion.logprobs
                trained.append((recorded.prompt, recorded.completion.tokens))
                place = ends[0]
        assert sorted(trained) == wanted
        assert sum(len(transcript.tokens) for transcript in self.transcripts.transcripts()) == self.transcripts.tokens


QUESTION = [{"role": "system", "content": "Add."}, user("1+1?")]


def continues(agent: Agent, messages: Sequence[Message], before: Recorded, tools: Sequence[Message] = ()) -> bool:
    """Whether a call continues the tokens of one before it."""
    prompt = agent.transcripts.prompt(messages, tools)
    return prompt[: len(before.prompt) + len(before.completion.tokens)] == [*before.prompt, *before.completion.tokens]


def test_a_call_that_extends_a_chat_continues_its_tokens() -> None:
    agent = Agent(AgentTranscripts(encoders()))
    first = agent.ask(QUESTION, answer("two"))
    assert first.prompt == encoder().prompt(QUESTION)
    second = agent.ask([*QUESTION, answer("two"), user("And?")], answer("three"))
    added = encoder().observation([user("And?")], first.completion.tokens, chat=True)
    assert second.prompt == [*first.prompt, *first.completion.tokens, *added]
    (transcript,) = agent.transcripts.transcripts()
    assert transcript.tokens == [*second.prompt, *second.completion.tokens]
    agent.check_masks()
    assert agent.transcripts.turns[-1].messages() == [*QUESTION, answer("two"), user("And?"), answer("three")]


THOUGHTFUL = answer("", reasoning_content="Let me add.", tool_calls=[call("call_1", a=1.0, b=[2])])
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
ECHOES = {
    "as it was": THOUGHTFUL,
    "without reasoning": {name: value for name, value in THOUGHTFUL.items() if name != "reasoning_content"},
    "reasoning null": THOUGHTFUL | {"reasoning_content": None},
    "content null": THOUGHTFUL | {"content": None},
    "other ids": THOUGHTFUL | {"tool_calls": [call("toolu_9", a=1.0, b=[2])]},
    "no ids": THOUGHTFUL | {"tool_calls": [{"function": {"name": "add", "arguments": {"b": [2], "a": 1}}}]},
}
CHANGES = {
    "a space": THOUGHTFUL | {"content": " "},
    "other reasoning": THOUGHTFUL | {"reasoning_content": "Let me add. "},
    "other arguments": THOUGHTFUL | {"tool_calls": [call("call_1", a=1.5, b=[2])]},
    "true is not 1": THOUGHTFUL | {"tool_calls": [call("call_1", a=True, b=[2])]},
    "another tool": THOUGHTFUL | {"tool_calls": [{"function": {"name": "sub", "arguments": {"a": 1, "b": [2]}}}]},
    "no calls": answer("", reasoning_content="Let me add."),
    "another role": THOUGHTFUL | {"role": "user"},
    "a name": THOUGHTFUL | {"name": "helper"},
}


@pytest.mark.parametrize("change", ECHOES)
def test_what_clients_do_not_keep_is_no_difference(change: str) -> None:
    agent = Agent(AgentTranscripts(encoders()))
    first = agent.ask(QUESTION, THOUGHTFUL, [TOOL])
    assert continues(agent, [*QUESTION, ECHOES[change], RESULT], first, [TOOL])


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_begins_a_branch(change: str) -> None:
    agent = Agent(AgentTranscripts(encoders()))
    first = agent.ask(QUESTION, THOUGHTFUL, [TOOL])
    messages = [*QUESTION, CHANGES[change], RESULT]
    assert not continues(agent, messages, first, [TOOL])
    assert agent.transcripts.prompt(messages, [TOOL]) == encoder().prompt(messages, tools=[TOOL])


def test_the_keys_of_a_chat_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is sampled, and not again for its completions."""
    computed: list[int] = []
    chat_keys = agent_transcripts._chat_keys

    def counting(*chat: Any) -> list[bytes]:
        computed.append(len(chat[0]))
        return chat_keys(*chat)

    monkeypatch.setattr(agent_transcripts, "_chat_keys", counting)
    transcripts, messages = AgentTranscripts(encoders()), tuple(QUESTION)
    prompt = transcripts.prompt(messages)
    transcripts.completed(messages, (), None, prompt, Completion([65], [-1.0], [-1.0], "stop"), answer("A"))
    assert (computed, transcripts._keys) == ([2], {})
    again = transcripts.prompt([*messages, answer("A"), user("And?")])
    assert (again[: len(prompt) + 1], computed) == ([*prompt, 65], [2, 4])


def test_other_tools_or_options_begin_a_branch() -> None:
    agent = Agent(AgentTranscripts(encoders()))
    first = agent.ask(QUESTION, answer("two"), [TOOL])
    messages = (*QUESTION, answer("two"), user("And?"))  # of a tuple the keys are kept
    assert continues(agent, messages, first, [TOOL])
    assert not continues(agent, messages, first)
    other = {**TOOL, "function": {**TOOL["function"], "description": "adds"}}  # type: ignore[dict-item]
    assert not agent.transcripts.turns[0].before
    assert agent.transcripts.prompt(messages, [other]) == encoder().prompt(messages, tools=[other])
    with_option = agent.transcripts.prompt(messages, [TOOL], {"enable_thinking": False})
    assert with_option == encoder().prompt(messages, tools=[TOOL])


def test_a_template_that_now_writes_the_history_differently_begins_a_branch() -> None:
    """It removes the reasoning of the first turn when the user asks again, as it would where the agent is used."""
    reply = answer("two", reasoning_content="hm")
    messages = [*QUESTION, reply, user("And?")]
    agent = Agent(AgentTranscripts(encoders(FORGETFUL)))
    first = agent.ask(QUESTION, reply)
    assert agent.transcripts.prompt(messages) == encoder(FORGETFUL).prompt(messages)
    assert continues(agent, [*QUESTION, reply, RESULT], first), "the template keeps it before a tool's message"
    agent.ask(messages, answer("three"))
    assert len(agent.transcripts.transcripts()) == 2
    agent.check_masks()
    keeping = Agent(AgentTranscripts(encoders(FORGETFUL), keep_reasoning=True))
    assert continues(keeping, messages, keeping.ask(QUESTION, reply))


def test_shared_tokens_are_trained_on_in_the_first_branch() -> None:
    agent = Agent(AgentTranscripts(encoders()))
    first = agent.ask(QUESTION, answer("two"))
    start = [*QUESTION, answer("two")]
    left = agent.ask([*start, user("left")], answer("l"))
    right = agent.ask([*start, user("right")], answer("r"))
    transcripts = agent.transcripts.transcripts()
    assert [transcript.tokens for transcript in transcripts] == [
        [*recorded.prompt, *recorded.completion.tokens] for recorded in (left, right)
    ]
    prompt, sampled = len(first.prompt), len(first.completion.tokens)
    for transcript, mask in zip(transcripts, (1, 0), strict=True):
        assert transcript.mask[prompt : prompt + sampled] == [mask] * sampled
    agent.check_masks()
    (last,) = agent.transcripts.transcripts("last")
    assert last.tokens == transcripts[1].tokens
    assert last.mask[prompt : prompt + sampled] == [1] * sampled


def test_tokens_that_are_not_trained_on_have_no_branch_of_their_own() -> None:
    agent = Agent(AgentTranscripts(encoders()))
    agent.ask(QUESTION, answer("greedy"), trained=False)
    assert agent.transcripts.transcripts() == ()
    kept = agent.ask([*QUESTION, answer("greedy"), user("And?")], answer("kept"))
    agent.ask([*kept.messages, answer("kept"), user("So?")], answer("greedy too"), trained=False)
    (transcript,) = agent.transcripts.transcripts()
    assert transcript.tokens == [*kept.prompt, *kept.completion.tokens]
    assert transcript.mask == [0] * len(kept.prompt) + [1] * len(kept.completion.tokens)


def test_equal_completions_of_a_prompt_are_trained_on_each() -> None:
    transcripts = AgentTranscripts(encoders())
    for logprob in (-1.0, -2.0):
        transcripts.text_completed([1, 2], Completion([3], [logprob], [logprob], "stop", "?"))
    transcripts.text_completed([1, 2, 3, 4], Completion([5], [-3.0], [-3.0], "stop", "?"))
    assert [(transcript.tokens, transcript.logprobs) for transcript in transcripts.transcripts()] == [
        ([1, 2, 3], [0.0, 0.0, -2.0]),
        ([1, 2, 3, 4, 5], [0.0, 0.0, -1.0, 0.0, -3.0]),
    ]


def test_completions_of_text_continue_by_their_tokens() -> None:
    transcripts = AgentTranscripts(encoders())
    completions = [Completion([65 + place], [-1.0], [-1.0], "stop", "?") for place in range(3)]
    transcripts.text_completed([1, 2], completions[0])
    transcripts.text_completed([1, 2, 65, 3], completions[1])
    transcripts.text_completed([1, 2, 66], completions[2])
    assert [(transcript.tokens, transcript.mask) for transcript in transcripts.transcripts()] == [
        ([1, 2, 65, 3, 66], [0, 0, 1, 0, 1]),
        ([1, 2, 66, 67], [0, 0, 0, 1]),
    ]
    assert transcripts.tokens == 9


def test_equal_replies_are_told_apart_by_the_ids_of_their_calls() -> None:
    agent = Agent(AgentTranscripts(encoders()))
    replies = [answer("", tool_calls=[call(f"call_{number}", a=1)]) for number in range(3)]
    recorded = [agent.ask(QUESTION, reply, [TOOL]) for reply in replies]
    for reply, before in zip(replies, recorded, strict=True):
        assert continues(agent, [*QUESTION, reply, RESULT], before, [TOOL])
    other_ids = answer("", tool_calls=[call("?", a=1)])
    assert continues(agent, [*QUESTION, other_ids, RESULT], recorded[2], [TOOL])


def test_the_routing_of_a_branch_is_that_of_the_passes_that_sampled_it() -> None:
    transcripts = AgentTranscripts(encoders())

    def sampled(prompt: list[int], tokens: list[int], mark: int) -> Completion:
        routing = torch.full((len(prompt) + len(tokens), 1, 1), mark, dtype=torch.int16)
        routing[-1] = -1
        completion = Completion(tokens, [0.0] * len(tokens), [0.0] * len(tokens), "stop", "?", routing=routing)
        transcripts.text_completed(prompt, completion)
        return completion

    sampled([1, 2], [3, 4], 7)
    sampled([1, 2, 3, 4, 5], [6], 8)
    sampled([9], [9], 9)
    first, second = transcripts.transcripts()
    assert first.routing is not None
    assert first.routing[:, 0, 0].tolist() == [7, 7, 7, 8, 8, -1]
    assert second.routing is not None
    assert second.routing[:, 0, 0].tolist() == [9, -1]


# --- any agent


def plain(message: Message, *, thoughts: bool) -> Any:
    """A message in a form that is compared, written in another way than in the code."""
    calls = [(made["function"]["name"], made["function"]["arguments"]) for made in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content") or "" if thoughts else ""
    return message["role"], message.get("content") or "", repr(calls).replace("1.0", "1"), reasoning


def same(known: Message, echoed: Message) -> bool:
    thoughts = bool(echoed.get("reasoning_content"))
    return bool(plain(known, thoughts=thoughts) == plain(echoed, thoughts=thoughts))


def extended(calls: Sequence[Recorded], messages: list[Message]) -> tuple[Recorded | None, int]:
    """The longest call, of several the last, that these messages continue."""
    best: tuple[Recorded | None, int] = None, 0
    for recorded in calls:
        chat = [*recorded.messages, recorded.reply]
        matches = len(chat) < len(messages) and all(map(same, chat, messages))
        if matches and len(chat) >= best[1]:
            best = recorded, len(chat)
    return best


TEXTS = st.sampled_from(["a", "b", " a", ""])


def echo(reply: Message, change: str) -> Message:
    """Returns a reply as an agent may send it back."""
    echoed = copy.deepcopy(reply)
    match change:
        case "no thoughts":
            echoed.pop("reasoning_content", None)
        case "new ids":
            for made in echoed.get("tool_calls", []):
                made["id"] = "new"
        case "space":
            echoed["content"] = (echoed["content"] or "") + " "
        case "other thoughts":
            echoed["reasoning_content"] = "other"
    return echoed


def next_messages(draw: st.DrawFn, calls: list[Recorded]) -> list[Message]:
    """Returns the messages of another call: of a new chat, or of one that goes on in some way from an earlier one."""
    if not calls or not draw(st.integers(0, 9)):
        return [user(draw(TEXTS))]
    recorded = calls[draw(st.integers(0, len(calls) - 1))]
    reply = echo(
        recorded.reply, draw(st.sampled_from(["as it is", "no thoughts", "new ids", "space", "other thoughts"]))
    )
    messages = [*recorded.messages, reply, user(draw(TEXTS))]
    match draw(st.sampled_from(["append"] * 6 + ["repeat", "rewrite", "compact"])):
        case "repeat":
            return recorded.messages
        case "rewrite":
            messages[draw(st.integers(0, len(messages) - 1))] = user("rewritten")
        case "compact":
            return [user("In short: b"), *recorded.messages[-1:], reply, user("?")]
    return messages


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[list[int]], Agent]:
    """Draws an agent that appends, forks, rewrites, compacts, repeats and echoes in its own ways."""
    agent, prompts = Agent(AgentTranscripts(encoders_once)), list[list[int]]()
    for _ in range(draw(st.integers(1, 8))):
        messages = next_messages(draw, agent.calls)
        fields: Message = {}
        if draw(st.booleans()):
            fields["reasoning_content"] = draw(st.sampled_from(["x", "y"]))
        if draw(st.booleans()):
            fields["tool_calls"] = [call("call_1", a=draw(st.sampled_from([1, 1.0, 2])))]
        known, count = extended(agent.calls, messages)
        agent.ask(messages, answer(draw(TEXTS), **fields))
        if known is None:
            prompts.append(encoder_once.prompt(messages))
        else:
            after = known.completion.tokens
            added = encoder_once.observation(messages[count:], after, chat=True)
            prompts.append([*known.prompt, *after, *added])
    return prompts, agent


encoders_once, encoder_once = encoders(), encoder()


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_branches_are_those_of_a_simple_model(drawn: tuple[list[list[int]], Agent]) -> None:
    prompts, agent = drawn
    assert [recorded.prompt for recorded in agent.calls] == prompts
    agent.check_masks()
    whole = [[*recorded.prompt, *recorded.completion.tokens] for recorded in agent.calls]
    ends = [
        tokens
        for place, tokens in enumerate(whole)
        if not any(later.prompt[: len(tokens)] == tokens for later in agent.calls[place + 1 :])
    ]
    assert [transcript.tokens for transcript in agent.transcripts.transcripts()] == ends
    (last,) = agent.transcripts.transcripts("last")
    assert last.tokens == ends[-1]
    assert sum(last.mask) <= sum(len(recorded.completion.tokens) for recorded in agent.calls)
