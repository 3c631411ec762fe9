"""ServedModel: a model's name, tokenizer, chat template and room, which all routes that serve it share."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import copy
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from postlude.data.chat import Encoder, Prompt
from postlude.data.chat_template import ChatTemplate
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import TokenBytes
from postlude.data.tool_calls import ToolCallFormat, detect_format
from postlude.data.tool_grammar import ToolGrammar
from postlude.serving.http.errors import HTTPError
from postlude.serving.server.chat_calls import ChatCall, ChatRecorder

DECODED = 256  # tokens at once, where the end of a thought is searched
PROMPT_END = 16  # tokens in which a template may open a thought
SHORT_CHARACTERS = 4096  # of prompts that are encoded in less time than a thread needs to take over
Result = TypeVar("Result")


class ClientTurns:
    """A lock whose next holder is of the client that has waited longest since its last turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns
        self._held = False

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn of the client, and holds it."""
        if self._held:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():  # it had just been given the turn
                    self._pass_on()
                raise
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            futures = self._waiting.pop(client)
            future = futures.popleft()
            if futures:
                self._waiting[client] = futures  # behind the others
            if not future.cancelled():
                future.set_result(None)
                return
        self._held = False


class ServedModel:
    """A model under its name. `max_length` is the maximum number of tokens of prompt and completion together."""

    def __init__(self, name: str, tokenizer: ChatTokenizer | None, max_length: int) -> None:
        self.name, self.max_length = name, max_length
        self._tokenizer = tokenizer
        self._encoding = ClientTurns()  # a tokenizer is not thread-safe

    def named(self, adapter: str | None) -> ServedModel:
        """Returns this model under the name of the adapter that a request uses, if it uses one."""
        named = copy.copy(self)
        named.name = self.name if adapter is None else adapter
        return named

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises ValueError if there is none."""
        if self._tokenizer is None:
            raise ValueError("this server has no tokenizer; send token ids to /generate.")
        return self._tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, {})

    def template_has(self, name: str) -> bool:
        """Whether the chat template has this option, or role."""
        return re.search(rf"\b{re.escape(name)}\b", self.template.source()) is not None

    @cached_property
    def tool_format(self) -> ToolCallFormat:
        """The format in which the template writes calls. Raises ValueError if it is not known."""
        return detect_format(self.template)

    @cached_property
    def tool_grammar(self) -> ToolGrammar:
        return ToolGrammar(self.template, self.tool_format)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def kept_tokens(self, *, with_calls: bool) -> Mapping[int, str]:
        """Returns the special tokens that markers of thoughts and, with tools, of calls have in them, by id."""
        return self._thought_tokens | (self._call_tokens if with_calls else {})

    @cached_property
    def _thought_tokens(self) -> dict[int, str]:
        return self._special_in(self.template.thoughts.open, self.template.thoughts.close)

    @cached_property
    def _call_tokens(self) -> dict[int, str]:
        return self._special_in(*self.tool_format.openings, *self.tool_format.closings)

    def _special_in(self, *markers: str) -> dict[int, str]:
        special = {id: str(token) for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return {id: token for id, token in special.items() if any(token in marker for marker in markers)}

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought."""
        end = self.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
        return self.template.thoughts.opened(end) is not None

    def count_thought(self, completion: Sequence[int]) -> int:
        """Returns the number of tokens up to the end of a completion's thought; all if it has no end."""
        close = self.template.thoughts.close

        def has_end(tokens: Sequence[int]) -> bool:
            return close in self.tokenizer.decode(tokens, skip_special_tokens=False)

        for start in range(0, len(completion), DECODED):
            first = max(0, start - len(close.encode()))  # the end may have begun before
            part = completion[first : start + DECODED]
            if has_end(part):
                lengths = range(len(part) + 1)
                return first + bisect.bisect_left(lengths, True, key=lambda length: has_end(part[:length]))
        return len(completion)

    def text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=True)

    async def encode(
        self,
        prompt: Prompt,
        client: tuple[str, ...],
        *,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Returns the tokens of a prompt: text, or messages with the assistant's header. What cannot be is refused."""
        length = self.checked_length(prompt)
        encoder = Encoder(tokenizer=self.tokenizer, options=options) if options else self._encoder
        try:
            return await self.run(client, partial(encoder.prompt, prompt, tools=list(tools)), length, tools)
        except Exception as error:  # a template may raise anything
            raise HTTPError(400, f"the prompt cannot be encoded: {error}") from error

    def checked_length(self, prompt: Prompt) -> int:
        """Returns the characters of a prompt. Refuses one that is too long, whatever its tokens are."""
        length = len(prompt) if isinstance(prompt, str) else sum(len(turn.get("content") or "") for turn in prompt)
        if length > self._max_characters:
            raise HTTPError(
                400,
                f"the prompt has {length} characters, which are more than {self.max_length} tokens: shorten it.",
                "context_length_exceeded",
            )
        return length

    async def run(
        self, client: tuple[str, ...], encode: Callable[[], Result], characters: int, tools: Sequence[Any] = ()
    ) -> Result:
        """Returns what `encode` returns, which may use the tokenizer, at the client's turn.

        A thread runs it, unless the prompt, with its tools, is short.
        """
        async with self._encoding.turn(client[0] if client else ""):
            if characters + sum(len(str(tool)) for tool in tools) <= SHORT_CHARACTERS:
                return encode()
            encoding = asyncio.ensure_future(asyncio.to_thread(encode))
            try:
                return await asyncio.shield(encoding)
            except asyncio.CancelledError:
                await asyncio.wait([encoding])  # it has the tokenizer
                raise

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(tokenizer=self.tokenizer)

    @cached_property
    def _max_characters(self) -> int:
        """The length of a text that has more tokens than fit, whatever they are."""
        return self.max_length * max(map(len, self.tokenizer.get_vocab()))


class TemplatePrompts(ChatRecorder):
    """Writes prompts with the chat template, and records nothing."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    async def prompt(self, call: ChatCall) -> list[int]:
        """Returns the tokens of the messages, with the assistant's header."""
        return await self.model.encode(call.messages, call.client, options=call.options, tools=call.tools)

    def completed(self, *call: object) -> None:
        """Does nothing."""

    def text_completed(self, *completion: object) -> None:
        """Does nothing."""
