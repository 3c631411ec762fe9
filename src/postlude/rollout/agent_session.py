"""AgentSession: the calls of one episode of an agent, within its limits, and what was sampled for them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.agent_programs import AgentLimits
from postlude.rollout.agent_transcripts import AgentTranscripts, ChatEncoders
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.model_calls import Delivered, ModelAccess, ModelCall, combine_seeds
from postlude.serving.clients.postlude import OWNER
from postlude.serving.http.errors import HTTPError
from postlude.serving.server.api_routes import model_entry
from postlude.serving.server.chat_calls import ChatCall, ScoredTokens
from postlude.serving.server.model_routes import ModelRoutes
from postlude.serving.server.served_model import ServedModel

AgentSampling: TypeAlias = Literal["config", "agent"]
MAX_REFUSALS = 16  # calls beyond a limit; after more the episode is ended
CHOSEN_PARAMETERS = (  # other values than the run's give log-probs that are not the trained policy's
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
DEFAULTS = SamplingParams()


class AgentSession:
    """The backend and the recorder of the routes of one episode. All but `__init__` runs in the proxy's loop."""

    def __init__(
        self,
        episode: Episode,
        access: ModelAccess,
        model: ServedModel,
        encoders: ChatEncoders,
        limits: AgentLimits,
        *,
        sampling: AgentSampling,
        keep_reasoning: bool,
        submit: Callable[[ModelCall], None],
        stop: Callable[[], None],
    ) -> None:
        self.episode, self.access, self.model, self.limits = episode, access, model, limits
        self.sampling, self._submit, self._stop = sampling, submit, stop
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.transcripts = AgentTranscripts(encoders, keep_reasoning=keep_reasoning)
        self.refused: Counter[str] = Counter()
        """Calls refused because of a limit of the episode, by the limit."""
        self.untrained = 0
        """Completions that are not trained on, because of their sampling parameters."""
        self.untrained_because = ""
        """The parameters of one of them, and those of the run."""
        self._untrained: dict[int, Completion] = {}  # by id, until they are recorded
        self._pending: dict[ModelCall, asyncio.Future[list[Completion]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False
        self._index = episode.group.index(episode)
        self._calls = 0
        self._running = 0

    def routes(self) -> ModelRoutes:
        """Returns new routes of the episode. They hold the session, which does not hold them, so both end at once."""
        # Agents' frameworks make tools strict by default. A grammar would change what is trained on.
        return ModelRoutes(self.model, self, self, stops=self.access.sampling.stop, strict_grammar=False)

    def model_entry(self) -> dict[str, Any]:
        """Returns the model as the list of models has it."""
        return model_entry(self.model.name, OWNER, max_model_len=self.access.max_length)

    def turns(self) -> list[AssistantTurn]:
        """Returns the completions so far, as rewards see them."""
        answers = {id(turn.reply): turn.message.get("content") or "" for turn in self.transcripts.turns}
        return [
            AssistantTurn(
                reply.completion.text or "",
                reply.completion.tokens,
                reply.completion.finish_reason == "length",
                answer=answers.get(id(reply)),
            )
            for reply in self.transcripts.replies
        ]

    def end(self) -> None:
        """Ends the calls in progress, and records no more. Any thread may call it."""
        self._ended = True
        for future in list(self._pending.values()):
            assert self._loop is not None
            _deliver(self._loop, future, HTTPError(400, "the episode has ended."))

    # --- the recorder

    async def prompt(self, call: ChatCall) -> list[int]:
        """Returns the tokens of a call, which continue those of earlier ones."""
        self._check_limits()
        encode = partial(self.transcripts.prompt, call.messages, call.tools, call.options)
        length = self.model.checked_length(call.messages)
        try:
            return await self.model.run(call.client, encode, length, call.tools)
        except Exception as error:  # a template may raise anything
            raise HTTPError(400, f"the prompt cannot be encoded: {error}") from error

    def completed(self, call: ChatCall, prompt: Sequence[int], completion: Completion, message: dict[str, Any]) -> None:
        if self._ended:
            return
        trained = self._is_trained(completion)
        self.transcripts.completed(
            call.messages, call.tools, call.options, prompt, completion, message, trained=trained
        )

    def text_completed(self, prompt: Sequence[int], completion: Completion) -> None:
        if not self._ended:
            self.transcripts.text_completed(prompt, completion, trained=self._is_trained(completion))

    # --- the backend

    def adapter_of(self, name: str | None) -> None:
        """Accepts any name of a model: agents have names of their own in them."""

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of each request. Cancelling this cancels the calls."""
        count = sum(request.n for request in requests)
        self._check_limits(count)
        for request in requests:
            self._check_room(request)
        self._loop, calls = asyncio.get_running_loop(), dict[ModelCall, asyncio.Future[list[Completion]]]()
        self._running += count
        try:
            for request in requests:
                future: asyncio.Future[list[Completion]] = self._loop.create_future()
                sampled = replace(request, sampling=self._sampling(request), client=())
                call = ModelCall(self.episode, sampled, partial(_deliver, self._loop, future))
                self._calls += request.n
                calls[call] = self._pending[call] = future
                self._submit(call)
            if self._ended:
                raise HTTPError(400, "the episode has ended.")
            results = await asyncio.gather(*calls.values())
            for request, completions in zip(requests, results, strict=True):
                if other := self._other_sampling(request.sampling):
                    self.untrained_because = other
                    self._untrained |= {id(completion): completion for completion in completions}
            return results
        finally:
            self._running -= count
            for call in calls:
                call.cancel()
                del self._pending[call]

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Progress, None]:
        for request_index, completions in enumerate(await self.generate(requests)):
            for index, completion in enumerate(completions):
                yield Progress(
                    request_index,
                    index,
                    completion.tokens,
                    completion.logprobs,
                    completion,
                    completion.top_logprobs,
                )

    async def score_prompts(self, requests: Sequence[Request], top: int) -> list[ScoredTokens]:
        raise HTTPError(400, "log-probs of prompts are not supported here: leave out echo.")

    def _check_limits(self, count: int = 1) -> None:
        limits = self.limits
        if self._calls + count > limits.model_calls:
            self._refuse("model_calls", limits.model_calls, "completions of the model")
        if self.transcripts.tokens >= limits.tokens:
            self._refuse("tokens", limits.tokens, "tokens")
        if self._running + count > limits.concurrent_calls:
            raise HTTPError(
                429,
                f"this episode waits for {self._running} completions, and may for {limits.concurrent_calls} at a time.",
                "rate_limit_exceeded",
                retry_after=1.0,
            )

    def _refuse(self, name: str, limit: int, noun: str) -> None:
        self.refused[name] += 1
        if self.refused.total() > MAX_REFUSALS:
            self._stop()
        raise HTTPError(400, f"this episode has used its {limit} {noun}, and gets no more.", f"{name}_limit")

    def _check_room(self, request: Request) -> None:
        if len(request.prompt) >= self.access.max_length:
            raise HTTPError(
                400,
                f"the prompt has {len(request.prompt)} tokens, but this model's context has {self.access.max_length} "
                "with the completion: shorten it.",
                "context_length_exceeded",
            )
        if not request.prompt:
            raise HTTPError(400, "the prompt has no tokens: give it text.")

    def _sampling(self, request: Request) -> SamplingParams:
        """Returns how a request is sampled."""
        config, asked = self.access.sampling, request.sampling
        length = min(asked.max_new_tokens, config.max_new_tokens, self.access.max_length - len(request.prompt))
        return replace(
            self._chosen(asked),
            return_sampling_mask=config.return_sampling_mask and not self._other_sampling(asked),
            max_new_tokens=length,
            stop=tuple(dict.fromkeys((*config.stop, *asked.stop))),
            stop_tokens=tuple(dict.fromkeys((*config.stop_tokens, *asked.stop_tokens))),
            json_schema=asked.json_schema,
            grammar=asked.grammar,
            top_logprobs=asked.top_logprobs,
            seed=combine_seeds(config.seed, self._index, self._calls),
        )

    def _chosen(self, asked: SamplingParams) -> SamplingParams:
        """Returns the config's parameters; with `sampling: agent` those that differ from the API's defaults are its."""
        config = self.access.sampling
        if self.sampling == "config":
            return config
        names = [name for name in CHOSEN_PARAMETERS if getattr(asked, name) != getattr(DEFAULTS, name)]
        return replace(config, **{name: getattr(asked, name) for name in names})

    def _other_sampling(self, asked: SamplingParams) -> str:
        """Returns the parameters because of which log-probs of completions are not those of the trained policy."""
        chosen, config = self._chosen(asked), self.access.sampling
        pairs = {name: (getattr(chosen, name), getattr(config, name)) for name in CHOSEN_PARAMETERS}
        return ", ".join(f"{name} {its} (the run has {ours})" for name, (its, ours) in pairs.items() if its != ours)

    def _is_trained(self, completion: Completion) -> bool:
        """Whether a new completion is to be trained on. Counts it if not."""
        trained = self._untrained.pop(id(completion), None) is None
        self.untrained += not trained
        return trained


def _deliver(loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[Completion]], result: Delivered) -> None:
    """Sets the result of a call, from another thread."""

    def set_result() -> None:
        if future.done():
            return
        if isinstance(result, HTTPError):
            future.set_exception(result)
        elif isinstance(result, Exception):
            future.set_exception(HTTPError(400, str(result)))
        else:
            future.set_result(list(result))

    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(set_result)
