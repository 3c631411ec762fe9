"""HTTPEngine: answers from a server that speaks OpenAI's /v1/completions, such as vLLM's or a recent SGLang's.

Prompts are sent as token ids, and the server must give token ids back: text is not encoded again, since that can give
other tokens than those that were sampled. A server of text alone, such as `transformers serve`, must be asked for by
name: `text_only=tokenizer`.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from postlude.rollout.protocol import Completion, FinishReason
from postlude.rollout.sampling import Sampling, one_each
from postlude.rollout.stops import Decoder

TOKEN_PREFIX = "token_id:"  # how vLLM writes a token when asked for its id in place of its text
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
TRANSFORMERS_SERVE: Mapping[str, Any] = MappingProxyType({"generation_config": '{"do_sample": true, "top_k": 0}'})
"""The `extra` with which `transformers serve` samples from the whole vocabulary.

Without it a temperature above 0 is taken but not used, unless the model's own generation_config.json samples, and then
from the likeliest 50 tokens.
"""


class ServerError(RuntimeError):
    """The server did not give the answers asked for."""


class Tokenizer(Decoder, Protocol):
    """The part of a transformers tokenizer that stands between token ids and a server of text."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Tokens of text, with those that begin or end every text unless told otherwise."""
        ...


class HTTPEngine:
    """A RolloutEngine on the other side of HTTP. One request a prompt, `concurrency` of them at a time.

    `url` is the server's root, with or without /v1. A request that cannot connect, gets no answer within `timeout`
    seconds, or gets a status that may pass (429, 5xx, …) is sent again up to `retries` times, after `backoff` seconds
    that double each time, or after what the server's Retry-After says.

    `Completion.logprobs` are the server's and mean what they mean there; `sampled_logprobs` repeat them, since the
    protocol carries one number a token. vLLM gives those at temperature 1. For the sampling temperature, as the native
    generator gives, start it with `--logprobs-mode processed_logprobs` and leave top-k, top-p and min-p alone.

    With `text_only`, the tokenizer of the served model, text goes both ways, one request an answer. Then
    - a prompt's text must encode to just its tokens, or it is refused;
    - `Completion.tokens` are the answer's text encoded, which may be other tokens than those that were sampled;
    - where the server says "stop", the tokenizer's end-of-sequence token is added. `Sampling.stop` and `stop_tokens`
      are refused, since the server does not say which of them ended an answer;
    - `Completion.logprobs` and `sampled_logprobs` are empty, since nobody knows them. Compute them with the trainer.

    `transformers serve` needs this, and to sample at a temperature also `extra=TRANSFORMERS_SERVE`. It knows no top-k,
    min-p or ignore_eos, and refuses them. Its seed is the whole server's and is set when a request arrives, so the same
    seeds give the same answers only with `concurrency=1`. Start it without `--continuous-batching`, which keeps the
    first request's temperature for all.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        text_only: Tokenizer | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        backoff: float = 0.5,
        concurrency: int = 64,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`extra` goes into every request beside what `Sampling` asks for."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url {url!r} is no address of a server; give one such as http://localhost:8000.")
        if timeout <= 0 or retries < 0 or backoff < 0 or concurrency < 1:
            raise ValueError(
                f"timeout={timeout}, retries={retries}, backoff={backoff}, concurrency={concurrency}: give a positive "
                "timeout and concurrency, and retries and backoff of at least 0."
            )
        if text_only is not None and text_only.eos_token_id is None:
            raise ValueError("text_only's tokenizer has no eos_token_id to end answers with; set its eos_token.")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self.model = model
        self.text_only = text_only
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.concurrency = concurrency
        self.extra = dict(extra or {})
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1
    ) -> list[list[Completion]]:
        """Give `n` answers to each prompt of token ids, in the caller's order.

        `sampling` is one for all, or one a prompt. Its seed plus the prompt's place is the server's seed; with
        `text_only`, its seed plus the answer's place among all of the call.
        """
        if n < 1:
            raise ValueError(f"n={n}: give at least 1 answer a prompt.")
        samplings = one_each(sampling, len(prompts))
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place} is empty; give at least one token.")
        requests = [
            request
            for place, (prompt, own) in enumerate(zip(prompts, samplings, strict=True))
            for request in self._requests(place, [int(token) for token in prompt], own, n)
        ]
        groups: list[list[Completion]] = [[] for _ in prompts]
        with ThreadPoolExecutor(self.concurrency) as pool:
            for request, completions in zip(requests, pool.map(self._ask, requests), strict=True):
                groups[request.place] += completions
        return groups

    def _requests(self, place: int, prompt: list[int], sampling: Sampling, n: int) -> list[_Request]:
        """One for all `n` answers, or one for each from a server of text, which may not know `n`."""
        body = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        # Not in OpenAI's own protocol, so sent only where they say something.
        unusual = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": sampling.ignore_eos,
        }
        body |= {name: value for name, value in unusual.items() if value}
        if self.text_only is None:
            body |= {
                "prompt": prompt,
                "n": n,
                "seed": sampling.seed + place,
                "logprobs": 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            return [_Request(place, len(prompt), n, body | self.extra)]
        if sampling.stop or sampling.stop_tokens:
            raise ValueError(
                f"prompt {place} has stop={sampling.stop!r} and stop_tokens={sampling.stop_tokens!r}, but a server of "
                "text does not say which of them ended an answer. Leave both empty, or use a server of token ids."
            )
        body["prompt"] = _written(self.text_only, place, prompt)
        return [
            _Request(place, len(prompt), 1, body | {"seed": sampling.seed + place * n + number} | self.extra)
            for number in range(n)
        ]

    def _ask(self, request: _Request) -> list[Completion]:
        place = request.place
        answer = self._post(json.dumps(request.body).encode())
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != request.answers:
            got = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
            raise ServerError(f"{self.url} gave {got} for prompt {place}, which asked for {request.answers}.")
        read = (answer.get("usage") or {}).get("prompt_tokens", request.tokens)
        if self.text_only is not None and read != request.tokens:
            raise ServerError(
                f"{self.url} read {read} tokens in prompt {place}, which has {request.tokens}; give text_only the "
                "tokenizer of the served model."
            )
        choices.sort(key=lambda choice: choice.get("index", 0))
        return [self._completion(place, choice) for choice in choices]

    def _completion(self, place: int, choice: Mapping[str, Any]) -> Completion:
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ServerError(
                f"{self.url} ended an answer to prompt {place} for the reason {reason!r}, not stop or length."
            )
        if self.text_only is not None:
            text = choice.get("text")
            if not isinstance(text, str):
                raise ServerError(f"{self.url} gave no text for prompt {place}; a server of /v1/completions is needed.")
            return _encoded(self.text_only, text, reason)
        stated = choice.get("logprobs") or {}
        logprobs = stated.get("token_logprobs")
        if logprobs is None:
            raise ServerError(
                f"{self.url} gave no log-probs for prompt {place}; a server that supports `logprobs` is needed, or "
                "text_only=tokenizer, which does without."
            )
        tokens = choice.get("token_ids")
        if tokens is None:
            written = stated.get("tokens") or []
            if len(written) != len(logprobs) or not all(str(token).startswith(TOKEN_PREFIX) for token in written):
                raise ServerError(
                    f"{self.url} gave text but no token ids for prompt {place}, and text cannot be turned back into "
                    "the tokens that were sampled. Use a server that supports return_token_ids or "
                    "return_tokens_as_token_ids, such as vLLM, or say text_only=tokenizer to take the text's tokens."
                )
            tokens = [int(token.removeprefix(TOKEN_PREFIX)) for token in written]
        if len(tokens) != len(logprobs):
            raise ServerError(f"{self.url} gave {len(tokens)} tokens but {len(logprobs)} log-probs for prompt {place}.")
        logprobs = [float(logprob) for logprob in logprobs]
        return Completion([int(token) for token in tokens], logprobs, list(logprobs), reason, choice.get("text"))

    def _post(self, body: bytes) -> Any:
        wait = self.backoff
        for attempt in range(self.retries + 1):
            pause = wait
            try:
                request = urllib.request.Request(self.url, body, self.headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {_message(error)}"
                if error.code == 422 and self.text_only is None:  # fields it does not know
                    problem += "; a server of text alone needs text_only=tokenizer"
                if error.code not in RETRIED:
                    raise ServerError(f"{self.url} refused the request with {problem}") from error
                after = error.headers.get("Retry-After", "")
                pause = float(after) if after.isdigit() else wait
            except json.JSONDecodeError as error:
                raise ServerError(f"{self.url} answered with something that is not JSON: {error}") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, a broken one, or none in time
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if attempt < self.retries:
                time.sleep(pause)
                wait *= 2
        raise ServerError(f"{self.url} did not answer in {self.retries + 1} attempts; the last failed with {problem}")


@dataclass(frozen=True)
class _Request:
    """What is asked for one prompt, which has `tokens` tokens, and how many answers are to come back."""

    place: int
    tokens: int
    answers: int
    body: dict[str, Any]


def _written(tokenizer: Tokenizer, place: int, prompt: list[int]) -> str:
    """The text that becomes just these tokens where the server encodes it."""
    for begun in (0, 1):  # a tokenizer may begin every text with a token that must not be written then
        text = tokenizer.decode(prompt[begun:], skip_special_tokens=False)
        if list(tokenizer.encode(text)) == prompt:
            return text
    raise ValueError(
        f"prompt {place} has {len(prompt)} tokens that its text does not encode to, so a server of text would read "
        "another prompt. Encode prompts with text_only's tokenizer, or use a server of token ids."
    )


def _encoded(tokenizer: Tokenizer, text: str, reason: FinishReason) -> Completion:
    """An answer known by its text alone, without log-probs."""
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    if reason == "stop" and tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    return Completion(tokens, [], [], reason, text)


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says went wrong, on one line."""
    text = error.read(2000).decode(errors="replace").strip()
    try:
        stated = json.loads(text)
        found = next((stated[name] for name in ("error", "message", "detail") if name in stated), text)
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (json.JSONDecodeError, AttributeError, TypeError):
        return text or error.reason
