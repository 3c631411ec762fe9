"""The tokens that end an assistant's turn, as its chat template writes them.

They are not always the end-of-sequence token: a base model's may be <|endoftext|> where its template ends turns with
<|im_end|>. Masks, generation, requests to servers and exports all ask `turn_ends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from postlude.data.chat_template import CALL, NAME, PLACEHOLDER, QUESTION, TOOL, ChatTemplate, Message, Tools
from postlude.data.chat_tokenizer import ChatTokenizer


def turn_ends(tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Returns the tokens that end a turn: that of an answer, and that of tool calls if it is another.

    A template ends a turn with a special token, or with none: then the result is empty, and a model that is trained on
    such turns does not end them. `options` are those of the template. A tokenizer without a template has the plain one.
    """
    template = ChatTemplate(tokenizer, options or {})
    special = special_tokens(tokenizer)

    def tokens_after(content: str, *messages: Message, tools: Tools = None) -> list[int]:
        """The tokens that the template writes after the last `content`; none if it does not write that."""
        _, found, text = template.try_render([QUESTION, *messages], tools).rpartition(content)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if found and text else []

    answer: Message = {"role": "assistant", "content": PLACEHOLDER}
    last = tokens_after(PLACEHOLDER, answer)
    # Some templates write more after the last turn of all (Phi-3's <|endoftext|>), or another token (gpt-oss's
    # <|return|>). What they write before a next message too ends a turn.
    both = zip(last, tokens_after(PLACEHOLDER, answer, QUESTION), strict=False)
    shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], both) if token in special]
    ends = shared[-1:] or [token for token in last if token in special][:1]
    if not ends:
        return ()
    for content in ("", None):
        call: Message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        after_call = [token for token in tokens_after(NAME, call, tools=[TOOL]) if token in special]
        if not set(ends).intersection(after_call):
            ends += after_call[-1:]
    return tuple(ends)


def special_tokens(tokenizer: ChatTokenizer) -> frozenset[int]:
    """Returns the end-of-sequence token and every token outside the ordinary vocabulary."""
    end = tokenizer.eos_token_id
    return frozenset([] if end is None else [end]) | frozenset(tokenizer.get_added_vocab().values())
