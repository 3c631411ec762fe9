"""JudgeReward: a model behind an OpenAI-compatible server grades completions (an LLM judge)."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from postlude.data.chat import Prompt
from postlude.data.thoughts import answer_text
from postlude.pool.worker_pool import CallResult
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward import WAIT_SECONDS, Reward, Scored
from postlude.rollout.rewards import FailureCounter, Score
from postlude.rollout.verdict import Verdict
from postlude.serving.clients.connection import ServerConnection, json_or_raise
from postlude.serving.clients.openai import only_choice
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

if TYPE_CHECKING:
    from postlude.rollout.tasks import Task

CHAT = "/v1/chat/completions"
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 8.0  # seconds before a retry, which double
SHOWN = 60  # characters of a verdict in a message


class JudgeReward(FailureCounter, Reward):
    """The score that `model` at `url` gives a completion.

    `template` is the judge's question. {prompt}, {completion} without its thoughts, {raw_completion} with thoughts and
    special tokens, {transcript}, all that followed the prompt, and the columns of the row are filled in; messages
    become text with the role before each. `verdict` reads the score from the answer. A request that gets no reply
    within `timeout` seconds, or one that asks to try later, is made up to `retries` times again.
    At most `concurrency` requests run. An answer without a score earns `unparsable_reward`; without that it counts as
    a failed call, as does a request that failed. `key_variable` names the environment variable of the API key.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        *,
        system: str | None = None,
        verdict: Verdict | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 512,
        timeout: float = 60.0,
        retries: int = 2,
        concurrency: int = 32,
        unparsable_reward: float | None = None,
        key_variable: str | None = None,
        extra: Mapping[str, Any] | None = None,
        failed_reward: float | None = None,
    ) -> None:
        super().__init__(f"the judge {model} at {url}", failed_reward)
        self.url, self.template, self.system, self.verdict = url, template, system, verdict or Verdict()
        self.body = {"model": model, "temperature": temperature, "max_tokens": max_new_tokens, **(extra or {})}
        self.timeout, self.retries, self.unparsable_reward = timeout, retries, unparsable_reward
        self.key_variable = key_variable
        ServerConnection(url)  # raises if the address is none
        self._coroutines = CoroutinePool(self.name, (retries + 1) * (timeout + MAX_BACKOFF), concurrency)
        self._connections: dict[asyncio.AbstractEventLoop, ServerConnection] = {}
        self._call_ids = itertools.count()
        self._waiting: dict[int, Episode] = {}

    def submit(self, episode: Episode) -> None:
        call_id = next(self._call_ids)
        self._waiting[call_id] = episode
        self._coroutines.submit(call_id, self._ask(episode))

    def poll(self, timeout: float | None = 0.0) -> Scored:
        if not self._waiting:
            time.sleep(WAIT_SECONDS if timeout is None else min(timeout, WAIT_SECONDS))
        results = {call_id: _answer(result) for call_id, result in self._coroutines.poll(timeout).items()}
        episodes = {call_id: self._waiting.pop(call_id) for call_id in results}
        return [(episodes[call_id], self._score(result, episodes[call_id].task)) for call_id, result in results.items()]

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Asks once. An answer without a score is an error here only if it would count as a failed call."""
        call_id = next(self._call_ids)
        self._coroutines.submit(call_id, self._ask(Episode(task, [turn])))
        result = _answer(self._coroutines.poll(None)[call_id])
        if result.failure is not None:
            raise ValueError(f"{self.name} failed on trial on {task.name}: {result.error}")
        if self.unparsable_reward is None:
            try:
                self.verdict.read(result.value)
            except ValueError as error:
                raise ValueError(
                    f"{self.name} answered {_shortened(result.value)} on trial on {task.name}, which {error}. Ask for "
                    "the score in the template, set pattern to find it, or set unparsable_reward."
                ) from error

    def close(self) -> None:
        self._coroutines.close()
        self._connections.clear()

    def question(self, episode: Episode) -> str:
        """Returns the question about an episode. Raises ValueError if the template asks for what is not there."""
        task, turn = episode.task, episode.turns[-1]
        texts = {
            "prompt": prompt_text(task.prompt),
            "completion": turn.answer_text,
            "raw_completion": turn.text if turn.raw_text is None else turn.raw_text,
            "transcript": prompt_text(episode.transcript(thoughts=False)),
        }
        fields = {**task.example, **texts}
        try:
            return self.template.format(**fields)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(
                f"the template {_shortened(self.template)} cannot be filled ({error}); {task.name} has: "
                f"{', '.join(fields)}. Write braces that are meant as such twice."
            ) from error

    async def _ask(self, episode: Episode) -> CallResult:
        """Returns the judge's answer, or why there is none."""
        try:
            messages = [{"role": "user", "content": self.question(episode)}]
            connection = self._connection()
        except ValueError as error:
            return CallResult(failure="raised", error=str(error))
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        attempts = 0
        while True:
            try:
                return CallResult(await self._request(connection, {**self.body, "messages": messages}))
            except RequestRefused as error:
                return CallResult(failure="raised", error=f"it replies with {error}")
            except InvalidResponse as error:
                return CallResult(failure="raised", error=f"it {error}")
            except ServerUnavailable as error:
                if attempts == self.retries:
                    tries = f"; it was asked {attempts + 1} times" if attempts else ""
                    return CallResult(failure="raised", error=f"it {error}{tries}")
                await asyncio.sleep(min(MAX_BACKOFF, max(error.retry_after, FIRST_BACKOFF * 2**attempts)))
                attempts += 1

    def _connection(self) -> ServerConnection:
        """Returns the connections of the running event loop. Only the process that asks needs the API key."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            headers = {} if self.key_variable is None else {"Authorization": f"Bearer {_key(self.key_variable)}"}
            self._connections[loop] = ServerConnection(self.url, headers)
        return self._connections[loop]

    async def _request(self, connection: ServerConnection, body: Mapping[str, Any]) -> str:
        reply = json_or_raise(await connection.request("POST", CHAT, body, timeout=self.timeout))
        content = (only_choice(reply).get("message") or {}).get("content")
        if not isinstance(content, str):
            raise InvalidResponse("gave an answer without text")
        return answer_text(content)

    def _score(self, result: CallResult, task: Task) -> Score:
        if result.failure is not None:
            return self.failed(result, task.name)
        try:
            return Score(self.verdict.read(result.value))
        except ValueError as error:
            if self.unparsable_reward is not None:
                return Score(self.unparsable_reward, {"unparsable": 1.0})
            return self.invalid(ValueError(f"answered {_shortened(result.value)} for {task.name}, which {error}."))


def _answer(result: CallResult) -> CallResult:
    """Returns what `_ask` returned, unless it did not come to an end."""
    return result if result.failure is not None else result.value


def prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as text: messages with their role before each."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"key_variable is {variable}, but there is no such environment variable. Set it.")
    return key


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
