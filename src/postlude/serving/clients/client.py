"""GenerationClient: a rollout engine on the other side of HTTP, of one server or several."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from postlude.generate.counter_rng import rng_key
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.stop_strings import completion_text
from postlude.serving.clients.api import ServerAPI
from postlude.serving.clients.llama_cpp import LlamaCppAPI
from postlude.serving.clients.openai import OpenAIAPI
from postlude.serving.clients.postlude import PostludeAPI
from postlude.serving.clients.remote_server import RemoteServer, Weights
from postlude.serving.clients.server_pool import Counts, ServerPool
from postlude.serving.clients.sglang import SGLangAPI
from postlude.serving.clients.text import TextAPI, Tokenizer
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerError, ServerUnavailable
from postlude.serving.weights.checksum_comparison import ChecksumComparison
from postlude.serving.weights.coordinator import TransferCoordinator

SERVER_APIS = ("auto", "postlude", "vllm", "sglang", "llama.cpp", "openai", "text")
# By who /v1/models says that a model is owned by.
OWNERS = {"postlude": "postlude", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
ENDED_WITHIN = 5.0  # seconds for servers to hear that nobody waits for them any more
Result = TypeVar("Result")


class GenerationClient:
    """Answers from servers of one model, at `urls`: their roots, with or without /v1.

    Prompts are sent as token ids, and ids must come back: text is not encoded again, since that can give other tokens
    than those that were sampled. `api="text"` makes do with text; see `TextAPI`. `api="auto"` asks each server
    what it is. `model` is what the servers call the model; None takes the only one there is.

    `concurrency` answers at most are outstanding at a server. A request waits `timeout` seconds for its answer. What
    becomes of servers that fail is told at `ServerPool`; `retries`, `backoff` and `outage_timeout` are its. When
    no server is left and `outage_timeout` seconds have passed, whoever waits for an answer gets a `ServerError`
    that names each with its reason. Answers with tokens outside of a vocabulary of `vocab_size` are refused.

    `Completion.logprobs` are the server's and mean what they mean there; `sampled_logprobs` repeat them, since the
    protocols carry one number a token. vLLM and llama.cpp give those at temperature 1. For the sampling temperature, as
    the native generator gives, start vLLM with `--logprobs-mode processed_logprobs`, and leave top-k, top-p and min-p
    alone.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str | None = None,
        *,
        api: str = "auto",
        tokenizer: Tokenizer | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        backoff: float = 0.5,
        concurrency: int = 64,
        outage_timeout: float = 0.0,
        vocab_size: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` writes the text of answers that come without. `extra` goes into requests to /v1/completions."""
        urls = [urls] if isinstance(urls, str) else list(urls)
        if timeout <= 0 or retries < 0 or backoff < 0 or concurrency < 1 or outage_timeout < 0:
            raise ValueError(
                f"timeout={timeout}, retries={retries}, backoff={backoff}, concurrency={concurrency}, "
                f"outage_timeout={outage_timeout}: give a positive timeout and concurrency, and the others at least 0."
            )
        if api not in SERVER_APIS:
            raise ValueError(f"api is {api!r}, but the choices are {', '.join(map(repr, SERVER_APIS))}.")
        if api == "text" and (tokenizer is None or model is None):
            raise ValueError('api="text" needs the tokenizer of the served model, and the model\'s name.')
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"urls are {urls}: give each server once, and at least one.")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.tokenizer = tokenizer

        def server(url: str) -> RemoteServer:
            speaks = None if api == "auto" else spoken(api, tokenizer, extra)
            speaks_or_asks = speaks or partial(recognised, extra)
            return RemoteServer(url, speaks_or_asks, model, headers=headers, timeout=timeout, vocab_size=vocab_size)

        self._server = server
        servers = [server(url) for url in urls]
        self.fleet = ServerPool(
            servers, retries=retries, backoff=backoff, concurrency=concurrency, outage_timeout=outage_timeout
        )
        self.comparison = ChecksumComparison(self.fleet)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postlude servers", daemon=True)
        self._thread.start()
        self._tickets = itertools.count()
        self._done: queue.SimpleQueue[FinishedCompletion] = queue.SimpleQueue()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """Give `n` answers to each prompt of token ids, in the caller's order, numbered from `first`.

        `sampling` is one for all, or one a prompt. With one for all, the prompt's place is mixed into its seed.
        """
        for place, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {place} is empty; give at least one token.")
        own = sampling_per_prompt(sampling, len(prompts))
        if isinstance(sampling, SamplingParams):
            own = [replace(each, seed=rng_key(each.seed, place)) for place, each in enumerate(own)]
        requests = [Request(tuple(map(int, prompt)), each, n, first) for prompt, each in zip(prompts, own, strict=True)]
        return self._run(_all(self._answers(request) for request in requests))

    def submit(self, request: Request) -> int:
        """Ask for answers, and go on."""
        ticket = next(self._tickets)

        async def answer(number: int, one: Request) -> None:
            try:
                self._done.put(FinishedCompletion(ticket, number, self._told(await self.fleet.answer(one))))
            except Exception as error:
                self._done.put(FinishedCompletion(ticket, number, None, error))

        for number, one in enumerate(_each(request)):
            asyncio.run_coroutine_threadsafe(answer(number, one), self._loop)
        return ticket

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """What has been answered since the last time; waits up to `timeout` seconds for the first."""
        found = []
        try:
            found.append(self._done.get(timeout is None or timeout > 0, timeout))
            while True:
                found.append(self._done.get_nowait())
        except queue.Empty:
            return found

    def update(self, directory: str, version: str, *, wait: bool = True) -> None:
        """Have every server read new weights from a directory. Answers in flight go on with them.

        Without `wait` that goes on beside the caller: what it submits is answered by servers that have them.
        """
        self._run(self.fleet.update(Weights(directory, version)))
        if wait:
            self.renewed()

    def renewed(self) -> None:
        """Wait until servers have the weights that they were last told of."""
        self._run(self.fleet.renewed())

    def compares(self) -> bool:
        """Whether there is a server that may tell what its weights hash to."""
        return any(server.state == "up" and server.api.hashes for server in self.fleet.servers)

    def compare(self, given: str) -> int:
        """See that servers have the same weights, whose checksum the trainer says. Returns how many told of theirs."""
        return self._run(self.comparison.compare(given))

    def directories(self) -> set[str]:
        """Those that a server may read from: the newest weights', and of others what is being read just now."""
        newest = self.fleet.weights
        return {each for each in (newest and newest.directory, *(s.reading for s in self.fleet.servers)) if each}

    def handover(self, weights: Weights, seconds: float | None = None) -> TransferCoordinator:
        """The words that go with weights which are sent to servers, to those that lack them."""
        return TransferCoordinator(self.fleet, weights, self._start, seconds)

    def meet(self) -> list[RemoteServer]:
        """Meet every server, as `RemoteServer.state` then tells; at least one is up, or a sentence is raised."""
        self._run(self.fleet.gather())
        self._run(self.fleet.present())
        return self.fleet.servers

    def join(self, url: str) -> None:
        """One more server, from now on. It is met, and given the newest weights, before it is asked."""
        self._run(self.fleet.join(self._server(url)))

    def leave(self, url: str, problem: str, *, another: bool = False) -> None:
        """The server at `url` is no more, for what the clause `problem` says; its requests go to others.

        If `another` is to `join` in its place, whoever waits for an answer waits for that, too, unless it is `give_up`.
        """
        self._run(self.fleet.leave(url, problem, another=another))

    def give_up(self, problem: str) -> None:
        """A server that was to join will not, for a reason that begins with its address."""
        self._run(self.fleet.give_up(problem))

    def ask(self, server: RemoteServer, request: Request) -> Completion:
        """An answer of this server and no other, or a sentence that names it."""
        try:
            return self._told(self._run(server.answer(request)))
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            raise ServerError(f"{server.url} {error}.") from error

    def version(self, server: RemoteServer) -> str | None:
        """What a server calls its weights, or a sentence if it cannot say."""
        try:
            return self._run(server.told_version())
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            raise ServerError(f"{server.url} {error}.") from error

    def longest(self, server: RemoteServer) -> int | None:
        """The most tokens, prompt and answer together, that a server takes; None where it does not say."""
        try:
            return self._run(server.longest())
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            raise ServerError(f"{server.url} {error}.") from error

    def drawback(self, server: RemoteServer, *, tied_head: bool, sent: bool = False) -> str:
        """Why new weights of such a model, read or `sent`, would not all be used by a server; empty if they would."""
        try:
            return self._run(server.drawback(tied_head=tied_head, sent=sent))
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            raise ServerError(f"{server.url} {error}.") from error

    def take_counts(self) -> Counts:
        """What happened since the last time."""
        counts, self.fleet.counts = self.fleet.counts, Counts()
        return counts

    def close(self) -> None:
        """Let go of what is under way, of the connections, and of the thread."""
        if self._thread.is_alive():
            self._run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        await self.fleet.close()
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        if under_way:  # their connections end, so that servers hear of it
            await asyncio.wait(under_way, timeout=ENDED_WITHIN)

    async def _answers(self, request: Request) -> list[Completion]:
        return [self._told(found) for found in await _all(self.fleet.answer(one) for one in _each(request))]

    def _told(self, completion: Completion) -> Completion:
        if completion.text is not None or self.tokenizer is None:
            return completion
        return replace(completion, text=completion_text(self.tokenizer, completion.tokens, None))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._start(work).result()

    def _start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _each(request: Request) -> list[Request]:
    """Each answer is asked for by itself, so that no server's failure costs more than it had begun."""
    return [replace(request, n=1, first=request.first + number) for number in range(request.n)]


async def _all(work: Any) -> list[Any]:
    """All of it, or the first error, with nothing left running."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def spoken(name: str, tokenizer: Tokenizer | None, extra: Mapping[str, Any] | None) -> ServerAPI:
    """A api for one server."""
    match name:
        case "text":
            assert tokenizer is not None
            return TextAPI(tokenizer, extra)
        case "postlude":
            return PostludeAPI()
        case "vllm":
            return VLLMAPI(extra)
        case "sglang":
            return SGLangAPI()
        case "llama.cpp":
            return LlamaCppAPI()
        case _:
            return OpenAIAPI(extra)


def recognised(extra: Mapping[str, Any] | None, models: Any) -> ServerAPI:
    """The api of a server, by what it says at /v1/models."""
    try:
        owner = str(models["data"][0]["owned_by"]).lower()
    except (KeyError, TypeError, IndexError):
        owner = ""
    return spoken(OWNERS.get(owner, "openai"), None, extra)
