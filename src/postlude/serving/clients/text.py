"""Servers of text alone, such as `transformers serve`: taken where nothing better is there, and asked for by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.generate.stop_strings import Detokenizer
from postlude.serving.clients.api import FINISH, Ask, ServerAPI
from postlude.serving.clients.openai import PATH, only_choice, sampling_words
from postlude.serving.errors import InvalidResponse

TRANSFORMERS_SERVE: Mapping[str, Any] = MappingProxyType({"generation_config": '{"do_sample": true, "top_k": 0}'})
"""The `extra` with which `transformers serve` samples from the whole vocabulary.

Without it a temperature above 0 is taken but not used, unless the model's own generation_config.json samples, and then
from the likeliest 50 tokens.
"""


class Tokenizer(Detokenizer, Protocol):
    """The part of a transformers tokenizer that stands between token ids and a server of text."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Tokens of text, with those that begin or end every text unless told otherwise."""
        ...


class TextAPI(ServerAPI):
    """Text goes both ways, by the tokenizer of the served model. Then

    - a prompt's text must encode to just its tokens, or it is refused;
    - `Completion.tokens` are the answer's text encoded, which may be other tokens than those that were sampled;
    - where the server says "stop", the tokenizer's end-of-sequence token is added. `SamplingParams.stop` and
    `stop_tokens`
      are refused, since the server does not say which of them ended an answer;
    - `Completion.logprobs` and `sampled_logprobs` are empty, since nobody knows them. Compute them with the trainer.

    `transformers serve` samples at a temperature with `extra=TRANSFORMERS_SERVE`. It knows no top-k, min-p or
    ignore_eos, and refuses them. Its seed is the whole server's and is set when a request arrives, so the same seeds
    give the same answers only one request at a time. Start it without `--continuous-batching`, which keeps the first
    request's temperature for all.
    """

    name = "text"
    leaves_out_stops = True

    def __init__(self, tokenizer: Tokenizer, extra: Mapping[str, Any] | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("text_only's tokenizer has no eos_token_id to end answers with; set its eos_token.")
        self.tokenizer, self.extra = tokenizer, dict(extra or {})

    async def meet(self, ask: Ask) -> None:
        """It may have no list of models; its first answer shows that it is there."""

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer."""
        sampling = request.sampling
        if sampling.stop or sampling.stop_tokens:
            raise ValueError(
                f"a request has stop={sampling.stop!r} and stop_tokens={sampling.stop_tokens!r}, but a server of text "
                "does not say which of them ended an answer. Leave both empty, or use a server of token ids."
            )
        prompt = _written(self.tokenizer, list(request.prompt))
        body = {"model": model, "prompt": prompt, **sampling_words(sampling), "seed": request.seed}
        answer = await ask("POST", PATH, body | self.extra)
        choice = only_choice(answer)
        read = (answer.get("usage") or {}).get("prompt_tokens", len(request.prompt))
        if read != len(request.prompt):
            raise InvalidResponse(
                f"read {read} tokens in a prompt that has {len(request.prompt)}; give text_only the tokenizer of the "
                "served model"
            )
        if not isinstance(choice.get("text"), str):
            raise InvalidResponse("gave no text; a server of /v1/completions is needed")
        if choice.get("finish_reason") not in FINISH:
            raise InvalidResponse(f"ended an answer for the reason {choice.get('finish_reason')!r}, not stop or length")
        return _encoded(self.tokenizer, choice["text"], FINISH[choice["finish_reason"]])


def _written(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The text that becomes just these tokens where the server encodes it."""
    for begun in (0, 1):  # a tokenizer may begin every text with a token that must not be written then
        text = tokenizer.decode(prompt[begun:], skip_special_tokens=False)
        if list(tokenizer.encode(text)) == prompt:
            return text
    raise ValueError(
        f"a prompt has {len(prompt)} tokens that its text does not encode to, so a server of text would read another "
        "prompt. Encode prompts with text_only's tokenizer, or use a server of token ids."
    )


def _encoded(tokenizer: Tokenizer, text: str, reason: FinishReason) -> Completion:
    """An answer known by its text alone, without log-probs."""
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    if reason == "stop" and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    return Completion(tokens, [], [], reason, text)
