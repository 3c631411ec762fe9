"""Preflight checks of rollouts: prompts fit, turns can be encoded, one reward call works, what is recorded is there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from postlude.data.chat import Encoder
from postlude.data.tool_calls import load_format
from postlude.generate.generator import check_draft
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import MAX_MASKED_TOP_K, MAX_SAMPLING_MASK
from postlude.recipes.checks.preflight import Check, PreflightInputs, check_vocabulary
from postlude.recipes.config.environments import EnvironmentSettings, PromptSettings, ToolSettings, TurnSettings
from postlude.recipes.config.policy_configs import PolicyConfig
from postlude.recipes.config.settings import EvaluationSetSettings, EvaluationSettings, SamplingSettings
from postlude.recipes.rollouts.evaluation_sets import EvaluatedTasks, tasks_of_set
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment, encode_prompt
from postlude.rollout.conversations import Conversations, TrajectoryGroup
from postlude.rollout.environments import Environment, is_chat
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.tasks import PAGE, Task, Tasks, TaskSubset, hold_out

TRIAL_SECONDS = 60.0  # an agent that has asked for completions until then works


class ScriptedEngine:
    """A rollout engine whose completions are all the same."""

    fixed_order = False

    def __init__(self, turn: AssistantTurn) -> None:
        self.turn, self.calls = turn, 0
        self._ids, self._finished = itertools.count(), list[FinishedCompletion]()

    def submit(self, request: Request) -> int:
        request_id, tokens = next(self._ids), list(self.turn.tokens)[: request.sampling.max_new_tokens]
        self.calls += 1
        logprobs = [0.0] * len(tokens)
        completion = Completion(tokens, logprobs, logprobs, "stop", self.turn.text)
        self._finished += [FinishedCompletion(request_id, index, completion) for index in range(request.n)]
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        finished, self._finished = self._finished, []
        return finished


def try_agent(
    environment: Environment,
    turn: AssistantTurn,
    encoding: PromptEncoding,
) -> str:
    """Runs an episode of the first task. Returns how it went. Raises ValueError if the agent asked for no completion.

    An agent may fail because of the reply, which no model wrote for it: that alone is no reason to refuse it.
    """
    task = environment.tasks[0]
    group = TrajectoryGroup.of(task, 0, (), encoding.sampling.params, 1, encoding.source(environment))
    engine, end = ScriptedEngine(turn), time.monotonic() + TRIAL_SECONDS
    with closing(Conversations(engine, budget=encoding.limit.tokens())) as conversations:
        conversations.start(group)
        while not group.done and time.monotonic() < end:
            conversations.poll(0.0)
    calls = f"an agent that made {engine.calls} model call(s) on {task.name}"
    (trajectory,) = group.trajectories
    if not engine.calls:
        how = f"took more than {TRIAL_SECONDS:g} s" if trajectory.score is None else "ended"
        reason = trajectory.score.error if trajectory.score is not None and trajectory.score.error else how
        raise ValueError(
            f"the agent made no model call on {task.name}: {reason.rstrip('.')}. It gets the address of its model as "
            "OPENAI_BASE_URL and ANTHROPIC_BASE_URL, or as the client of a function: ask for completions there."
        )
    if trajectory.score is None:
        return f"{calls} in {TRIAL_SECONDS:g} s, and was ended"
    if trajectory.score.error is not None:
        return f"{calls} and failed on its reply: {trajectory.score.error}"
    return f"{calls}, and has reward {trajectory.reward:g}"


def evaluation_set_checks(
    inputs: PreflightInputs, sets: Mapping[str, EvaluationSetSettings], sampling: SamplingSettings, key: str
) -> Iterator[Check]:
    """Checks of the tasks and rewards of every evaluation set. `key` is where the config has them."""
    for name, settings in sets.items():
        check = partial(_environment, inputs, settings.environment, settings.sampling(sampling))
        yield Check(f"{key}.{name}", check, after=("tokenizer",))


def training_overlap_checks(
    settings: EnvironmentSettings, evaluation: EvaluationSettings, environment_name: str = ""
) -> Iterator[Check]:
    """Check that sets leave tasks to train on, where prompts are read from files and not generated."""
    file_sets = {
        name: (set_settings, set_settings.environment)
        for name, set_settings in evaluation.sets.items()
        if isinstance(set_settings.environment, PromptSettings)
    }

    def count_evaluated() -> str:
        assert isinstance(settings, PromptSettings)
        tasks = settings.tasks()
        sets = {
            name: tasks_of_set(environment.tasks(), set_settings, evaluation.split_by)
            for name, (set_settings, environment) in file_sets.items()
        }
        evaluated = EvaluatedTasks(tasks, evaluation.held_out, evaluation.split_by, sets)
        count = sum(index in evaluated for index in range(len(tasks)))
        return f"{count} of {len(tasks)} tasks are evaluated, and not trained on"

    if file_sets and isinstance(settings, PromptSettings):
        yield Check(
            f"evaluation.sets {environment_name}".strip(),
            count_evaluated,
            after=(f"tasks {environment_name}".strip(), *(f"evaluation.sets.{name}" for name in file_sets)),
        )


def environment_checks(
    inputs: PreflightInputs,
    settings: EnvironmentSettings,
    sampling: SamplingSettings,
    *,
    name: str = "",
    example: Callable[[Task, Mapping[str, Any]], Any] | None = None,
    held_out: EvaluationSettings | None = None,
) -> Iterator[Check]:
    """Checks of tasks and rewards. `name` is that of one of several environments. `example` encodes a task for the warm
    start."""
    check = partial(_environment, inputs, settings, sampling, example, held_out)
    yield Check(f"tasks {name}".strip(), check, after=("tokenizer",))
    if sampling.draft is not None:
        yield Check("draft", lambda: _draft(inputs), after=("model",))
    if sampling.stop_tokens:
        yield Check("stop tokens", lambda: _stop_tokens(inputs, sampling), after=("tokenizer",))


def _environment(
    inputs: PreflightInputs,
    settings: EnvironmentSettings,
    sampling: SamplingSettings,
    example: Callable[[Task, Mapping[str, Any]], Any] | None = None,
    held_out: EvaluationSettings | None = None,
) -> str:
    """Builds an environment, encodes its prompts and makes one reward call."""
    # One worker process, whatever the config says: there the reward call can time out.
    config, one_worker = inputs.config, settings.model_copy(update={"workers": 1})
    encoding = PromptEncoding(inputs.tokenizer, sampling, inputs.limit)
    with closing(build_environment(one_worker, config.seed, encoding)) as environment:
        if held_out is not None and held_out.held_out:
            evaluated = hold_out(environment.tasks, held_out.held_out, held_out.split_by).indices
            longer = held_out.sampling(sampling)
            if longer.max_new_tokens > sampling.max_new_tokens and not environment.starts_episodes:
                room = replace(encoding, sampling=longer).encoder(environment)
                _tasks(inputs, TaskSubset(environment.tasks, evaluated), len(evaluated), room, longer, None)
        if held_out is not None and config.epochs is not None:
            evaluated_tasks = EvaluatedTasks(environment.tasks, held_out.held_out, held_out.split_by, {})
            inputs.trained_tasks.append(evaluated_tasks.count_trained())
        if environment.starts_episodes:
            inputs.grows = True
            return _agent(environment, encoding)
        generated = not isinstance(settings, PromptSettings)  # of generated tasks the first are enough
        encoder = encoding.encoder(environment)
        inputs.grows |= isinstance(settings, TurnSettings) and settings.max_turns > 1
        _tasks(inputs, environment.tasks, PAGE if generated else len(environment.tasks), encoder, sampling, example)
        first = environment.tasks[0]
        if isinstance(settings, TurnSettings) and is_chat(first.prompt):
            _turns(environment, inputs.tokenizer, settings)
        answer = first.answer if isinstance(first.answer, str) else ""
        environment.trial_call(first, _trial_turn(answer, inputs.tokenizer))
        return f"{len(environment.tasks)} tasks, and a reward function that works"


def _agent(environment: Environment, encoding: PromptEncoding) -> str:
    """Runs one episode of an agent, whose model replies with the right answer."""
    answer = environment.tasks[0].answer
    turn = _trial_turn(answer if isinstance(answer, str) else "", encoding.tokenizer)
    trial = try_agent(environment, turn, encoding)
    environment.trial_call(environment.tasks[0], turn)
    return f"{len(environment.tasks)} tasks, and {trial}"


def _draft(inputs: PreflightInputs) -> str:
    check_draft("mtp", inputs.model[1])
    return "with the first multi-token-prediction depth"


def _stop_tokens(inputs: PreflightInputs, sampling: SamplingSettings) -> str:
    ids, size = sampling.stop_ids(inputs.tokenizer), inputs.model[1].vocab_size
    for token in ids:
        if token >= size:
            raise ValueError(
                f"sampling.stop_tokens has {token}, but the vocabulary of {inputs.config.model} goes from 0 to "
                f"{size - 1}. Give a token that it has."
            )
    return ", ".join(map(str, ids))


def _turns(environment: Environment, tokenizer: PreTrainedTokenizerBase, settings: TurnSettings) -> None:
    """Checks that the chat template can continue a conversation, and that it writes the tools."""
    options = dict(environment.template_options)
    encoder = Encoder(tokenizer=tokenizer, options=options)
    reply: Any = [{"role": "tool", "content": "?"}] if isinstance(settings, ToolSettings) else "?"
    encoder.observation(reply, [], chat=True, keep_reasoning=settings.keep_reasoning)
    prompt = environment.tasks[0].prompt
    without = Encoder(tokenizer=tokenizer, options={**options, "tools": None})
    writes_tools = encoder.prompt(prompt) != without.prompt(prompt)
    if isinstance(settings, ToolSettings) and settings.system is None and not writes_tools:
        raise ValueError(
            f"the chat template does not write which tools there are ({', '.join(settings.tools)}). Describe them in "
            f"environment.system, and that a call is {load_format(settings.format).form}; or use a template that knows "
            "tools."
        )


def _tasks(
    inputs: PreflightInputs,
    tasks: Tasks,
    count: int,
    encoder: Encoder,
    sampling: SamplingSettings,
    example: Callable[[Task, Mapping[str, Any]], Any] | None,
) -> None:
    """Encodes the prompts of the first `count` tasks, and their examples."""
    largest = 0
    for index in range(min(len(tasks), count)):
        task = tasks[index]
        prompt = encode_prompt(encoder, task, inputs.limit, sampling)
        longest = inputs.longest_prompt + inputs.longest_completion
        if len(prompt) + sampling.max_new_tokens > longest:
            inputs.longest_prompt, inputs.longest_completion = len(prompt), sampling.max_new_tokens
        largest = max(largest, *prompt)
        if example is not None:
            example(task, encoder.options)
    check_vocabulary(largest, inputs)


def _trial_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> AssistantTurn:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return AssistantTurn(text, [*tokenizer.encode(text, add_special_tokens=False), *end])


def record_checks(inputs: PreflightInputs) -> Iterator[Check]:
    config: PolicyConfig = inputs.config
    if config.replay_routing:
        yield Check("replay_routing", lambda: _check_routing(inputs), after=("model",))
    if config.masks_sampling:
        yield Check("sampling_mask", lambda: _check_masks(inputs, config), after=("model",))


def _check_routing(inputs: PreflightInputs) -> str:
    _, model_config = inputs.model
    routers = model_config.routers
    if not routers:
        raise ValueError(
            f"replay_routing sends tokens to the experts that they were sampled with, but {inputs.config.model} has "
            "no experts. Set it to false."
        )
    return f"{len(routers)} MoE blocks"


def _check_masks(inputs: PreflightInputs, config: PolicyConfig) -> str:
    """Refuses sampling from too many tokens to record them all, and the batch-invariant mode."""
    sampling, vocab_size = config.sampling, inputs.model[1].vocab_size
    if config.batch_invariant:
        raise ValueError(
            "batch_invariant makes log-probs over the vocabulary equal to the bit, but with top_k, top_p or min_p they "
            "are computed among the tokens that these leave. Set sampling_mask to false."
        )
    if vocab_size > MAX_SAMPLING_MASK and not 0 < sampling.top_k <= MAX_MASKED_TOP_K:
        filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        raise ValueError(
            f"sampling has {', '.join(f'{name} {value:g}' for name, value in filters.items())}, and log-probs are "
            f"computed among the tokens that these leave, which may be many. Set sampling.top_k to {MAX_MASKED_TOP_K} "
            "or less, or sampling_mask to false to compute log-probs over the vocabulary."
        )
    return f"log-probs among the tokens sampled from, about {min(sampling.top_k or vocab_size, vocab_size)} at most"
