"""AgentTranscripts: the calls of one episode of an agent, as sequences of tokens to train on.

An agent sends its whole history with every call. A call whose messages are those of an earlier call, its reply and
more continues the tokens of that call exactly: they are not encoded again. If the history differs, because the agent
rewrote, compacted or forked it, or if the chat template writes it differently now, its tokens are those that the
template makes of it, and the call begins a *branch*.

Every branch is a sequence of the tokens that the sampler read and wrote. A sampled token has mask 1 in one of them, the
first branch that it belongs to, so that each is trained on once.

Messages are compared by role, text, name and tool calls, not by the ids of calls, which clients may change. Reasoning
that is not sent back is not a difference; other reasoning is one.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from postlude.data.chat import Encoder
from postlude.data.chat_template import REASONING_KEYS, TOOL, Message
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.protocol import Completion
from postlude.rollout.environments import Transcript

if TYPE_CHECKING:
    from torch import Tensor

Branches: TypeAlias = Literal["all", "last"]
KEPT_KEYS = 64  # chats whose keys are known until they are completed
KEPT_ENCODERS = 64  # sets of options of the chat template; an encoder of each knows what is slow to find out
TOKEN = "i"  # the type of stored tokens: 4 bytes
DIGEST_BYTES = 16
UNCOMPARED = frozenset(("tool_call_id", *REASONING_KEYS))  # fields of messages


class ChatEncoders:
    """The encoders of a tokenizer, by options of the chat template. `options` are those of all calls."""

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> None:
        def encoder(options_json: str) -> Encoder:
            return Encoder(tokenizer=tokenizer, options={**options, **json.loads(options_json)})

        self._encoder = lru_cache(KEPT_ENCODERS)(encoder)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a chat, as the template writes it."""
        return self._encoder(json.dumps(options)).prompt(messages, "the request", tools=list(tools))

    def added(
        self,
        messages: Sequence[Message],
        after: Sequence[int],
        options: Mapping[str, Any],
        *,
        has_tools: bool,
        keep_reasoning: bool,
    ) -> list[int]:
        """Returns the tokens of messages that follow the sampled tokens `after`. Raises ValueError if there are none.

        A template may have another form for chats with tools, but which tools there are is written before.
        """
        encoder = self._encoder(json.dumps({**options, "tools": [TOOL]} if has_tools else options))
        return encoder.observation(messages, after, chat=True, keep_reasoning=keep_reasoning)


@dataclass(eq=False)
class SampledReply:
    """A completion, and the tokens before it that are not those of an earlier one."""

    parent: SampledReply | None
    """The completion that the prompt begins with."""
    prompt: array[int]
    """The tokens of the prompt after the parent's."""
    completion: Completion
    trained: bool
    length: int
    """The number of tokens up to its end."""
    routing: Tensor | None = None
    """The experts of its tokens and of the parent's last one, which was no input before."""
    children: int = 0

    def path(self) -> list[SampledReply]:
        """Returns the completions up to this one, in their order."""
        replies: list[SampledReply] = [self]
        while (parent := replies[-1].parent) is not None:
            replies.append(parent)
        return replies[::-1]

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for reply in self.path():
            tokens += reply.prompt
            tokens += reply.completion.tokens
        return tokens


@dataclass(eq=False)
class ChatTurn:
    """A reply in a chat."""

    before: ChatTurn | None
    """The reply that the chat went on from."""
    added: tuple[Message, ...]
    """The messages between."""
    message: Message
    """The reply, as the agent got it."""
    reply: SampledReply

    def messages(self) -> list[Message]:
        """Returns the chat, with the reply."""
        return list(self._backwards())[::-1]

    def has_thoughts_of(self, messages: Sequence[Message]) -> bool:
        """Whether these messages, otherwise the same, have the same reasoning, or none, in each place."""
        pairs = zip(self._backwards(), reversed(messages), strict=True)
        return all(_reasoning(message) in ("", _reasoning(known)) for known, message in pairs)

    def _backwards(self) -> Iterator[Message]:
        turn: ChatTurn | None = self
        while turn is not None:
            yield turn.message
            yield from reversed(turn.added)
            turn = turn.before


class _ChatKeys(NamedTuple):
    messages: tuple[Message, ...]
    tools: Sequence[Message]
    options: Mapping[str, Any]
    keys: list[bytes]


class AgentTranscripts:
    """The calls of one episode so far. With `keep_reasoning` a call is continued although the template would now remove
    reasoning from it."""

    def __init__(self, encoders: ChatEncoders, *, keep_reasoning: bool = False) -> None:
        self.encoders, self.keep_reasoning = encoders, keep_reasoning
        self.replies: list[SampledReply] = []
        self.turns: list[ChatTurn] = []
        """The replies in chats, in their order."""
        self.tokens = 0
        """The tokens of all branches together."""
        self._keys: dict[int, _ChatKeys] = {}  # by the identity of the messages
        self._turns_by_chat: dict[bytes, list[ChatTurn]] = {}
        self._replies_by_tokens: dict[bytes, SampledReply] = {}
        self._lengths: list[int] = []  # of the keys of `_replies_by_tokens`, sorted

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the tokens of a call's chat. Raises ValueError if it cannot be encoded."""
        options = options or {}
        turn, count = self._continued(messages, self._chat_keys(messages, tools, options))
        if turn is not None and count < len(messages):
            try:
                added = self.encoders.added(
                    messages[count:],
                    turn.reply.completion.tokens,
                    options,
                    has_tools=bool(tools),
                    keep_reasoning=self.keep_reasoning,
                )
                return [*turn.reply.tokens(), *added]
            except ValueError:
                pass  # the template writes the history differently now, or refuses it with its reason below
        return self.encoders.prompt(messages, tools, options)

    def completed(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        options: Mapping[str, Any] | None,
        prompt: Sequence[int],
        completion: Completion,
        message: Message,
        *,
        trained: bool = True,
    ) -> None:
        """Adds a completion of a call, and the message that the agent gets for it."""
        keys = self._chat_keys(messages, tools, options or {})
        self._keys.pop(id(messages), None)  # which would keep every message of every call
        before, count = self._continued(messages, keys)
        turn = ChatTurn(before, tuple(messages[count:]), message, self._add(prompt, completion, trained=trained))
        self.turns.append(turn)
        self._turns_by_chat.setdefault(_next_key(keys[-1], message), []).append(turn)

    def text_completed(self, prompt: Sequence[int], completion: Completion, *, trained: bool = True) -> None:
        self._add(prompt, completion, trained=trained)

    def transcripts(self, branches: Branches = "all") -> tuple[Transcript, ...]:
        """Returns a transcript of each branch with tokens to train on, or of the last one alone."""
        ends = [reply for reply in self.replies if not reply.children]
        if branches == "last":
            ends = ends[-1:]
        transcripts, trained = list[Transcript](), set[SampledReply]()
        for end in ends:
            path = end.path()
            new = {reply for reply in path if reply.trained and reply.completion.tokens} - trained
            while path and path[-1] not in new:  # what follows the last trained token is not needed
                path.pop()
            if path:
                transcripts.append(_transcript(path, new))
            trained |= new
        return tuple(transcripts)

    def _chat_keys(
        self, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]
    ) -> list[bytes]:
        """Returns the keys of a chat, which are needed before it is sampled and after."""
        known = self._keys.get(id(messages))  # which it refers to, so that no others get this identity
        if known is not None and known.tools is tools and known.options == options:
            return known.keys
        keys = _chat_keys(messages, tools, options)
        if isinstance(messages, tuple):  # which stays as it is
            while len(self._keys) >= KEPT_KEYS:
                self._keys.pop(next(iter(self._keys)), None)
            self._keys[id(messages)] = _ChatKeys(messages, tools, options, keys)
        return keys

    def _continued(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[ChatTurn | None, int]:
        """Returns the longest chat that these messages begin with, and the number of its messages."""
        for count in range(len(messages), 0, -1):
            if turns := self._turns_by_chat.get(keys[count]):
                ids = _ids(messages[count - 1])
                same = [turn for turn in turns if turn.has_thoughts_of(messages[:count])]
                if same:  # of several equal replies that with the same ids of calls, else the last
                    return next((turn for turn in reversed(same) if _ids(turn.message) == ids), same[-1]), count
        return None, 0

    def _add(self, prompt: Sequence[int], completion: Completion, *, trained: bool) -> SampledReply:
        tokens = array(TOKEN, prompt)
        parent = self._parent(tokens)
        start = 0 if parent is None else parent.length
        length = len(tokens) + len(completion.tokens)
        routing = None if completion.routing is None else completion.routing[max(0, start - 1) :].clone()
        reply = SampledReply(parent, tokens[start:], completion, trained, length, routing)
        self.tokens += length - start if parent is None or not parent.children else length
        if parent is not None:
            parent.children += 1
        self.replies.append(reply)
        tokens.extend(completion.tokens)
        if self._replies_by_tokens.setdefault(_digest(tokens), reply) is reply:
            place = bisect.bisect_left(self._lengths, length)
            if self._lengths[place : place + 1] != [length]:
                self._lengths.insert(place, length)
        return reply

    def _parent(self, tokens: array[int]) -> SampledReply | None:
        """Returns the longest reply that the tokens begin with."""
        digest, start, parent = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None
        view = memoryview(tokens)
        for length in self._lengths:
            if length > len(tokens):
                break
            digest.update(view[start:length])
            start = length
            parent = self._replies_by_tokens.get(digest.copy().digest(), parent)
        return parent


def _transcript(path: Sequence[SampledReply], trained: set[SampledReply]) -> Transcript:
    """Returns the tokens of a branch. Those of the replies in `trained` are trained on."""
    transcript = Transcript(list(path[0].prompt))
    for number, reply in enumerate(path):
        if number:
            transcript.add_observation(reply.prompt)
        if reply in trained:
            completion = reply.completion
            transcript.add_completion(
                completion.tokens, completion.policy_logprobs, sampling_mask=completion.sampling_mask
            )
        else:
            transcript.add_observation(reply.completion.tokens)
    routing = [reply.routing for reply in path if reply.routing is not None]
    if len(routing) == len(path):
        import torch  # noqa: PLC0415 - the routing is a tensor

        transcript.routing = torch.cat([*(part[:-1] for part in routing[:-1]), routing[-1]])
    return transcript


def _chat_keys(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> list[bytes]:
    """Returns a key of the chat before each message, and after the last: of its messages, tools and options."""
    keys = [hashlib.blake2b(_json([list(tools), dict(options)]), digest_size=DIGEST_BYTES).digest()]
    for message in messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    """Returns the key of a chat after one more message."""
    parts = {name: value for name, value in message.items() if value and name not in UNCOMPARED}
    if calls := message.get("tool_calls"):
        parts["tool_calls"] = [call.get("function", call) for call in calls]
    return hashlib.blake2b(key + _json(parts), digest_size=DIGEST_BYTES).digest()


def _json(value: Any) -> bytes:
    return json.dumps(_comparable(value), sort_keys=True).encode()


def _comparable(value: Any) -> Any:
    """Returns a value in which equal numbers look equal: some clients write 1.0 as 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {name: _comparable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reasoning(message: Message) -> str:
    return next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")


def _ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _digest(tokens: array[int]) -> bytes:
    return hashlib.blake2b(tokens, digest_size=DIGEST_BYTES).digest()
