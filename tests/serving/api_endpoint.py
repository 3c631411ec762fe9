"""Endpoints for the clients of OpenAI and Anthropic, behind each of which a model writes what a test says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from postlude import load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.agent_programs import AgentLimits
from postlude.rollout.agent_proxy import AgentProxy
from postlude.rollout.agent_session import AgentSession
from postlude.rollout.agent_transcripts import ChatEncoders
from postlude.rollout.episode import Episode
from postlude.rollout.model_calls import ModelAccess
from postlude.rollout.tasks import Task
from postlude.serving.server.generation_server import GenerationServer
from postlude.serving.server.served_model import ServedModel
from tests.generate.test_session import sharp
from tests.serving.test_generation_server import KEY, serving

EOS, CONTEXT = 257, 4096
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}{{ '' if enable_thinking else '<think></think>' }}{% endif %}{% endif %}"
)


@dataclass
class Script:
    """What a model writes next, each text for one completion, and what it was asked."""

    texts: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return str(load_tokenizer("tiny-dense").decode(self.requests[-1].prompt))

    def completion(self, request: Request) -> Completion:
        """Returns the next completion, up to the limits of the request."""
        self.requests.append(request)
        text, ended = self.texts.pop(0), "stop"
        stop = min((stop for stop in request.sampling.stop if stop in text), key=text.index, default=None)
        tokens = [*text.encode(), EOS] if stop is None else list((text.partition(stop)[0] + stop).encode())
        if len(tokens) > request.sampling.max_new_tokens:
            tokens, ended = tokens[: request.sampling.max_new_tokens], "length"
        written = bytes(token for token in tokens if token != EOS).decode(errors="ignore")
        top = [[(token, -0.25), (65, -1.5)] for token in tokens] if request.sampling.top_logprobs else ()
        values = [-0.25] * len(tokens)
        cut = written if stop is None else written.partition(stop)[0]
        return Completion(tokens, values, values, "stop" if ended == "stop" else "length", cut, top_logprobs=top)


@dataclass
class Endpoint:
    """Where clients connect to, and the model behind it."""

    url: str
    key: str
    model: str
    script: Script
    any_model: bool = False
    """Whether requests may name any model."""


class ScriptedServer(GenerationServer):
    """`postlude serve` with a model that follows a script."""

    script: Script

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        return [[self.script.completion(request) for _ in range(request.n)] for request in requests]

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Progress, None]:
        for index, request in enumerate(requests):
            completion = self.script.completion(request)
            top: Sequence[Any] = completion.top_logprobs or [()] * len(completion.tokens)
            for token, logprob, likeliest in zip(completion.tokens, completion.logprobs, top, strict=True):
                yield Progress(index, 0, [token], [logprob], None, [likeliest] if likeliest else ())
            yield Progress(index, 0, [], [], completion)


def scripted_tokenizer() -> Any:
    """Returns a tokenizer whose template knows thoughts and calls."""
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@contextmanager
def serve_endpoint() -> Iterator[Endpoint]:
    """`postlude serve`."""
    generator = Generator(sharp(), scripted_tokenizer(), context_length=CONTEXT, max_batch_tokens=CONTEXT)
    with serving(generator, key=KEY, kind=ScriptedServer) as (server, url):
        assert isinstance(server, ScriptedServer)
        server.script = Script()
        yield Endpoint(url, KEY, "tiny", server.script)


@contextmanager
def agent_endpoint() -> Iterator[Endpoint]:
    """The server of an agent's episode."""
    tokenizer, script = scripted_tokenizer(), Script()
    session = AgentSession(
        Episode(Task("?", {}, "line 1")),
        ModelAccess(tokenizer, SamplingParams(max_new_tokens=CONTEXT), CONTEXT),
        ServedModel("tiny", tokenizer, CONTEXT),
        ChatEncoders(tokenizer, {}),
        AgentLimits(),
        sampling="agent",
        keep_reasoning=False,
        submit=lambda call: call.deliver([script.completion(call.request) for _ in range(call.request.n)]),
        stop=lambda: None,
    )
    with closing(AgentProxy()) as proxy:
        proxy.add(session)
        yield Endpoint(proxy.url, session.key, "tiny", script, any_model=True)


ENDPOINTS: dict[str, Callable[[], AbstractContextManager[Endpoint]]] = {
    "serve": serve_endpoint,
    "agent": agent_endpoint,
}
