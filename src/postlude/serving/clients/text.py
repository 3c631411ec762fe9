"""Text-only servers, such as `transformers serve`. Used only with `api="text"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.serving.clients.api import FINISH_REASONS, SendRequest, ServerAPI
from postlude.serving.clients.openai import COMPLETIONS, only_choice
from postlude.serving.errors import InvalidResponse

TRANSFORMERS_SERVE: Mapping[str, Any] = MappingProxyType({"generation_config": '{"do_sample": true, "top_k": 0}'})
"""The `extra` fields with which `transformers serve` samples from the whole vocabulary.

Without them it ignores the temperature, unless the model's generation_config.json samples; then it uses top-k 50.
"""


class TextAPI(ServerAPI):
    """Sends and receives text, with the tokenizer of the served model. Then

    - a prompt whose text does not encode to exactly its tokens is refused;
    - `Completion.tokens` are the encoded text, which may differ from the tokens that were sampled;
    - the tokenizer's end-of-sequence token is added where the finish reason is "stop". `SamplingParams.stop` and other
      `stop_tokens` are refused, since the server does not report which one ended a completion;
    - `Completion.logprobs` and `sampled_logprobs` are empty. Compute them with the trainer.

    `transformers serve` samples at a temperature with `extra=TRANSFORMERS_SERVE`. It refuses top-k, min-p and
    ignore_eos. Its seed belongs to the whole server, so equal seeds give equal completions only with one request at a
    time. Start it without `--continuous-batching`, which uses the first request's temperature for all.
    """

    name = "text"
    exact_tokens = False
    omits_stop_tokens = True

    def __init__(self, tokenizer: ChatTokenizer, extra: Mapping[str, Any] | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the client's tokenizer has no eos_token_id to end completions with; set its eos_token.")
        self.tokenizer, self.extra = tokenizer, dict(extra or {})

    async def detect_features(self, send: SendRequest) -> None:
        """Does nothing: the server may have no list of models."""

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        """Returns one completion."""
        sampling = request.sampling
        if sampling.stop or set(sampling.stop_tokens) - {self.tokenizer.eos_token_id}:
            raise ValueError(
                f"a request has stop={sampling.stop!r} and stop_tokens={sampling.stop_tokens!r}, but a text-only "
                "server does not report which of them ended a completion. Leave both empty, and use a tokenizer whose "
                "eos_token is what ends a turn of its chat template; or use a server that returns token ids."
            )
        optional = {"top_k": sampling.top_k, "min_p": sampling.min_p, "ignore_eos": sampling.ignore_eos}
        body = {
            "model": model,
            "prompt": _prompt_text(self.tokenizer, list(request.prompt)),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **{name: value for name, value in optional.items() if value},
            "seed": request.seed,
        }
        reply = await send("POST", COMPLETIONS, body | self.extra)
        choice = only_choice(reply)
        prompt_tokens = (reply.get("usage") or {}).get("prompt_tokens", len(request.prompt))
        if prompt_tokens != len(request.prompt):
            raise InvalidResponse(
                f"read {prompt_tokens} tokens in a prompt that has {len(request.prompt)}; give the client the "
                "tokenizer of the served model"
            )
        if not isinstance(choice.get("text"), str):
            raise InvalidResponse("gave no text; a server of /v1/completions is needed")
        reason = str(choice.get("finish_reason"))
        if reason not in FINISH_REASONS:
            raise InvalidResponse(f"ended a completion for the reason {reason!r}, not stop or length")
        return _encoded(self.tokenizer, choice["text"], FINISH_REASONS[reason])


def _prompt_text(tokenizer: ChatTokenizer, prompt: Sequence[int]) -> str:
    """Returns the text that the server encodes to exactly these tokens."""
    for skipped in (0, 1):  # a tokenizer may add a token at the beginning, which must not be in the text
        text = tokenizer.decode(prompt[skipped:], skip_special_tokens=False)
        if tokenizer(text)["input_ids"] == prompt:
            return text
    raise ValueError(
        f"a prompt has {len(prompt)} tokens that its text does not encode to, so a text-only server would read another "
        "prompt. Encode prompts with the client's tokenizer, or use a server that takes token ids."
    )


def _encoded(tokenizer: ChatTokenizer, text: str, reason: FinishReason) -> Completion:
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if reason == "stop" and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    return Completion(tokens, [], [], reason, text)
