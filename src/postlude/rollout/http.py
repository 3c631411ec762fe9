"""HTTPEngine: answers from a server that speaks OpenAI's /v1/completions, such as vLLM's or SGLang's.

Prompts are sent as token ids, and the server must give token ids back: text is never encoded again, since that can give
other tokens than those that were sampled.
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
from typing import Any

from postlude.rollout.protocol import Completion
from postlude.rollout.sampling import Sampling, one_each

TOKEN_PREFIX = "token_id:"  # how vLLM writes a token when asked for its id in place of its text
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ServerError(RuntimeError):
    """The server did not give the answers asked for."""


class HTTPEngine:
    """A RolloutEngine on the other side of HTTP. One request a prompt, `concurrency` of them at a time.

    `url` is the server's root, with or without /v1. A request that cannot connect, gets no answer within `timeout`
    seconds, or gets a status that may pass (429, 5xx, …) is sent again up to `retries` times, after `backoff` seconds
    that double each time, or after what the server's Retry-After says.

    `Completion.logprobs` are the server's and mean what they mean there; `sampled_logprobs` repeat them, since the
    protocol carries one number a token. vLLM gives those at temperature 1. For the sampling temperature, as the native
    generator gives, start it with `--logprobs-mode processed_logprobs` and leave top-k, top-p and min-p alone.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
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
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self.model = model
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

        `sampling` is one for all, or one a prompt. Its seed plus the prompt's place is the server's seed.
        """
        if n < 1:
            raise ValueError(f"n={n}: give at least 1 answer a prompt.")
        samplings = one_each(sampling, len(prompts))
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place} is empty; give at least one token.")
        bodies = [
            self._body(place, prompt, own, n)
            for place, (prompt, own) in enumerate(zip(prompts, samplings, strict=True))
        ]
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._ask, range(len(bodies)), bodies))

    def _body(self, place: int, prompt: Sequence[int], sampling: Sampling, n: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [int(token) for token in prompt],
            "n": n,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed + place,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        # Not in OpenAI's own protocol, so sent only where they say something.
        unusual = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": sampling.ignore_eos,
        }
        return body | {name: value for name, value in unusual.items() if value} | self.extra

    def _ask(self, place: int, body: Mapping[str, Any]) -> list[Completion]:
        answer = self._post(json.dumps(body).encode())
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != body["n"]:
            got = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
            raise ServerError(f"{self.url} gave {got} for prompt {place}, which asked for {body['n']}.")
        choices.sort(key=lambda choice: choice.get("index", 0))
        return [self._completion(place, choice) for choice in choices]

    def _completion(self, place: int, choice: Mapping[str, Any]) -> Completion:
        stated = choice.get("logprobs") or {}
        logprobs = stated.get("token_logprobs")
        if logprobs is None:
            raise ServerError(
                f"{self.url} gave no log-probs for prompt {place}; a server that supports `logprobs` is needed."
            )
        tokens = choice.get("token_ids")
        if tokens is None:
            written = stated.get("tokens") or []
            if len(written) != len(logprobs) or not all(str(token).startswith(TOKEN_PREFIX) for token in written):
                raise ServerError(
                    f"{self.url} gave text but no token ids for prompt {place}, and text cannot be turned back into "
                    "the tokens that were sampled. Use a server that supports return_token_ids or "
                    "return_tokens_as_token_ids, such as vLLM."
                )
            tokens = [int(token.removeprefix(TOKEN_PREFIX)) for token in written]
        if len(tokens) != len(logprobs):
            raise ServerError(f"{self.url} gave {len(tokens)} tokens but {len(logprobs)} log-probs for prompt {place}.")
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise ServerError(
                f"{self.url} ended an answer to prompt {place} for the reason {reason!r}, not stop or length."
            )
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


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says went wrong, on one line."""
    text = error.read(2000).decode(errors="replace").strip()
    try:
        stated = json.loads(text)
        found = stated.get("error", stated.get("message", text))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (json.JSONDecodeError, AttributeError):
        return text or error.reason
