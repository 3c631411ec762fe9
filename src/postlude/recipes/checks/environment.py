"""Preflight checks of tasks and rewards: prompts fit, turns can be encoded, and one reward call works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from postlude.data.chat import Encoder
from postlude.data.tool_calls import load_format
from postlude.generate.generator import check_draft
from postlude.recipes.checks.preflight import Check, PreflightInputs, check_vocabulary
from postlude.recipes.config.environments import EnvironmentSettings, PromptSettings, ToolSettings, TurnSettings
from postlude.recipes.config.settings import EvaluationSetSettings, EvaluationSettings, SamplingSettings
from postlude.recipes.rollouts.evaluation_sets import EvaluatedTasks, tasks_of_set
from postlude.recipes.rollouts.prompts import build_environment, encode_prompt, prompt_encoder
from postlude.rollout.environments import Environment, is_chat
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.tasks import PAGE, Task, Tasks, TaskSubset, hold_out


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
    with closing(build_environment(one_worker, config.seed, inputs.tokenizer, sampling, inputs.limit)) as environment:
        if held_out is not None and held_out.held_out:
            evaluated = hold_out(environment.tasks, held_out.held_out, held_out.split_by).indices
            longer = held_out.sampling(sampling)
            if longer.max_new_tokens > sampling.max_new_tokens:
                room = prompt_encoder(environment, inputs.tokenizer, longer, inputs.limit)
                _tasks(inputs, TaskSubset(environment.tasks, evaluated), len(evaluated), room, longer, None)
        if held_out is not None and config.epochs is not None:
            evaluated_tasks = EvaluatedTasks(environment.tasks, held_out.held_out, held_out.split_by, {})
            inputs.trained_tasks.append(evaluated_tasks.count_trained())
        generated = not isinstance(settings, PromptSettings)  # of generated tasks the first are enough
        encoder = prompt_encoder(environment, inputs.tokenizer, sampling, inputs.limit)
        inputs.grows |= isinstance(settings, TurnSettings) and settings.max_turns > 1
        _tasks(inputs, environment.tasks, PAGE if generated else len(environment.tasks), encoder, sampling, example)
        first = environment.tasks[0]
        if isinstance(settings, TurnSettings) and is_chat(first.prompt):
            _turns(environment, inputs.tokenizer, settings)
        answer = first.answer if isinstance(first.answer, str) else ""
        environment.trial_call(first, _trial_turn(answer, inputs.tokenizer))
        return f"{len(environment.tasks)} tasks, and a reward function that works"


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
    """Returns a completion for a trial call, with the token that ends it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return AssistantTurn(text, [*tokenizer.encode(text, add_special_tokens=False), *end])
