"""GenerationClient: completions from one server or several, over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.counter_rng import rng_key
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.text_stream import completion_text
from postlude.serving.clients.api import ServerAPI
from postlude.serving.clients.llama_cpp import LlamaCppAPI
from postlude.serving.clients.openai import OpenAIAPI
from postlude.serving.clients.postlude import PostludeAPI
from postlude.serving.clients.remote_server import BUSY_TIMEOUT, RemoteServer
from postlude.serving.clients.server_pool import Counts, ServerPool
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.clients.sglang import SGLangAPI
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerError, ServerUnavailable
from postlude.user_code import load_callable

SERVER_APIS = ("auto", "postlude", "vllm", "sglang", "llama.cpp", "openai")
# The API of a server by "owned_by" of its models.
API_BY_OWNER = {"postlude": "postlude", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
CLOSE_TIMEOUT = 5.0  # seconds for connections to close
Result = TypeVar("Result")


class GenerationClient:
    """Client of one or more servers of the same model at `urls`, which may end with /v1.

    Prompts are sent as token ids, and servers must return token ids: text that is encoded again can give other tokens
    than those that were sampled. `api="auto"` detects the API of each server. `model` is the servers' name for the
    model; None if each serves exactly one.

    A server has at most `concurrency` outstanding requests. A request waits `timeout` seconds for its reply.
    `ServerPool` explains `retries`, `backoff` and `outage_timeout`. When no server is left and `outage_timeout` seconds
    have passed, requests raise a `ServerError` that names each server and its reason. Completions with tokens outside
    of a vocabulary of `vocab_size` are invalid responses.

    `Completion.logprobs` are the server's; `sampled_logprobs` repeat them, as only `postlude serve` returns both.
    vLLM and llama.cpp report log-probs at temperature 1. For those at the sampling temperature, which the native
    generator reports, start vLLM with `--logprobs-mode processed_logprobs` and use no top-k, top-p or min-p.
    """

    fixed_order = False

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str | None = None,
        *,
        api: str = "auto",
        tokenizer: ChatTokenizer | None = None,
        api_key: str | Callable[[str], str | None] | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        backoff: float = 0.5,
        concurrency: int = 64,
        outage_timeout: float = 0.0,
        vocab_size: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the event loop's thread. `tokenizer` decodes completions that have no text.

        `api_key` is one for all servers, or a function from a server's URL to its key. `extra` fields go into
        requests to /v1/completions.
        """
        urls = [urls] if isinstance(urls, str) else list(urls)
        if timeout <= 0 or retries < 0 or backoff < 0 or concurrency < 1 or outage_timeout < 0:
            raise ValueError(
                f"timeout={timeout}, retries={retries}, backoff={backoff}, concurrency={concurrency}, "
                f"outage_timeout={outage_timeout}: give a positive timeout and concurrency, and the others at least 0."
            )
        if api not in SERVER_APIS and ".py:" not in api:
            choices = ", ".join(map(repr, SERVER_APIS))
            raise ValueError(f"api is {api!r}, but the choices are {choices}, or your own as path/to/file.py:name.")
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"urls are {urls}: give at least one, and each server once.")
        user_api: Callable[[], ServerAPI] | None = load_callable(api, kind="ServerAPI") if ".py:" in api else None
        self.tokenizer = tokenizer

        def make_server(url: str) -> RemoteServer:
            server_api = user_api() if user_api else None if api == "auto" else make_api(api, extra, vocab_size)
            api_or_detector = server_api or partial(detect_api, extra, vocab_size)
            key = api_key(url) if callable(api_key) else api_key
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return RemoteServer(url, api_or_detector, model, headers=headers, timeout=timeout, vocab_size=vocab_size)

        self._make_server = make_server
        self.pool = ServerPool(
            [make_server(url) for url in urls],
            retries=retries,
            backoff=backoff,
            concurrency=concurrency,
            outage_timeout=outage_timeout,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postlude servers", daemon=True)
        self._thread.start()
        self._request_ids = itertools.count()
        self._running: dict[int, list[concurrent.futures.Future[None]]] = {}  # by request id
        self._finished: queue.SimpleQueue[FinishedCompletion] = queue.SimpleQueue()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first_index: int = 0,
    ) -> list[list[Completion]]:
        """Returns `n` completions of each prompt of token ids, in the caller's order, from `first_index` on.

        `sampling` is one for all prompts, which then get different seeds, or one per prompt.
        """
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty; give at least one token.")
        samplings = sampling_per_prompt(sampling, len(prompts))
        if isinstance(sampling, SamplingParams):
            samplings = [replace(params, seed=rng_key(params.seed, index)) for index, params in enumerate(samplings)]
        requests = [
            Request(tuple(map(int, prompt)), params, n, first_index)
            for prompt, params in zip(prompts, samplings, strict=True)
        ]
        return self.run(_gather(self._generate_all(request) for request in requests))

    def submit(self, request: Request) -> int:
        """Sends a request without waiting. Returns its id, which the `FinishedCompletion`s repeat."""
        request_id = next(self._request_ids)

        async def generate(index: int, single_request: Request) -> None:
            try:
                completion = self._with_text(await self.pool.generate(single_request))
                self._finished.put(FinishedCompletion(request_id, index, completion))
            except Exception as error:
                self._finished.put(FinishedCompletion(request_id, index, None, error))

        self._running[request_id] = [
            self.start(generate(index, single_request)) for index, single_request in enumerate(_split(request))
        ]
        for future in self._running[request_id]:
            future.add_done_callback(lambda _: self._forget(request_id))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Ends a request: its connections close, after which servers stop."""
        for future in self._running.pop(request_id, ()):
            future.cancel()

    def _forget(self, request_id: int) -> None:
        if all(future.done() for future in self._running.get(request_id, ())):
            self._running.pop(request_id, None)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        finished = []
        try:
            finished.append(self._finished.get(timeout is None or timeout > 0, timeout))
            while True:
                finished.append(self._finished.get_nowait())
        except queue.Empty:
            return finished

    def reload(self, weights: WeightsVersion, *, wait: bool = True) -> None:
        """Makes every server read new weights from their directory. Running completions continue with them.

        Without `wait`, servers read in the background. New requests go only to servers that have the weights and, if
        the weights come with a `probe`, whose log-probs equal the trainer's.
        """
        self.run(self.pool.reload(weights))
        if wait:
            self.wait_for_reload()

    def wait_for_reload(self) -> None:
        self.run(self.pool.wait_for_reload())

    def directories_in_use(self) -> set[str]:
        """Returns the directories that servers may read: that of the newest weights, and those being read now."""
        newest = self.pool.weights
        reading = (server.weights.reading_directory for server in self.pool.servers)
        newest_directories = () if newest is None else (newest.directory, newest.adapter_directory)
        return {directory for directory in (*newest_directories, *reading) if directory}

    def connect(self) -> list[RemoteServer]:
        """Connects every server and returns all, with their states. Raises `ServerError` if none is up."""
        self.run(self.pool.connect())
        self.run(self.pool.wait_until_up())
        return self.pool.servers

    def add_server(self, url: str) -> None:
        """Adds a server. It gets the newest weights before its first request."""
        self.run(self.pool.add(self._make_server(url)))

    def remove_server(self, url: str, problem: str) -> None:
        """Removes a server. Its requests go to others, or wait for its replacement.

        `add_server` adds the replacement, and `cancel_replacement` stops waiting for it. `problem` is the reason, which
        follows the URL in messages.
        """
        self.run(self.pool.remove(url, problem))

    def cancel_replacement(self, problem: str) -> None:
        """Stops waiting for a replacement. `problem` is the reason; it begins with the lost server's URL."""
        self.run(self.pool.cancel_replacement(problem))

    def generate_on(self, server: RemoteServer, request: Request) -> Completion:
        """Returns a completion from this server, for which a busy server is asked again. Raises `ServerError`."""
        return self._with_text(self.run_on(server, server.generate_when_free(request, BUSY_TIMEOUT)))

    def run_on(self, server: RemoteServer, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of a coroutine of this server. Raises its failure as a `ServerError`."""
        try:
            return self.run(work)
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            raise ServerError(f"{server.url} {error}.") from error

    def take_counts(self) -> Counts:
        """Returns the counts since the last call."""
        counts, self.pool.counts = self.pool.counts, Counts()
        return counts

    def close(self) -> None:
        """Cancels running requests, and ends the connections and the thread."""
        if self._thread.is_alive():
            self.run(self._cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of a coroutine that runs in the client's event loop."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _cancel_all(self) -> None:
        await self.pool.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:  # so that their connections close, and servers stop generating
            await asyncio.wait(running, timeout=CLOSE_TIMEOUT)

    async def _generate_all(self, request: Request) -> list[Completion]:
        completions = await _gather(self.pool.generate(single) for single in _split(request))
        return [self._with_text(completion) for completion in completions]

    def _with_text(self, completion: Completion) -> Completion:
        if completion.text is not None or self.tokenizer is None:
            return completion
        return replace(completion, text=completion_text(self.tokenizer, completion.tokens, None))


def _split(request: Request) -> list[Request]:
    """Returns one request per completion, so that a failed server loses only the completions that it was sampling."""
    return [replace(request, n=1, first_index=request.first_index + index) for index in range(request.n)]


async def _gather(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns all results, or raises the first error after it has cancelled the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def make_api(name: str, extra: Mapping[str, Any] | None, vocab_size: int | None) -> ServerAPI:
    match name:
        case "postlude":
            return PostludeAPI()
        case "vllm":
            return VLLMAPI(extra, vocab_size)
        case "sglang":
            return SGLangAPI()
        case "llama.cpp":
            return LlamaCppAPI()
        case _:
            return OpenAIAPI(extra, vocab_size)


def detect_api(extra: Mapping[str, Any] | None, vocab_size: int | None, models: Any) -> ServerAPI:
    """Returns the API of a server, by its reply to /v1/models."""
    try:
        owner = str(models["data"][0]["owned_by"]).lower()
    except (KeyError, TypeError, IndexError):
        owner = ""
    return make_api(API_BY_OWNER.get(owner, "openai"), extra, vocab_size)
