"""The environment of a config, its prompts as tokens that leave room for a completion, and the warm start's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from postlude.data.chat import EncodedSequence, Encoder, TooLongError
from postlude.data.chat_template import check_variables
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.pool.worker_pool import NullPool, PoolFactory
from postlude.recipes.config.environments import EnvironmentSettings, PromptSettings
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.conversations import PromptSource
from postlude.rollout.environments import Environment
from postlude.rollout.tasks import Task, Tasks, TaskSubset


@dataclass(frozen=True)
class PromptEncoding:
    """How the prompts of a run become tokens, with room for a completion."""

    tokenizer: ChatTokenizer
    sampling: SamplingSettings
    limit: SequenceLimit
    """The limit of prompt and completion together."""

    def encoder(self, environment: Environment) -> Encoder:
        room = self.limit.tokens() - self.sampling.max_new_tokens
        if room < 2:
            raise ValueError(
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}, which leaves no room for a prompt in "
                f"{self.limit.reason()}. Lower it, or {self.limit.fix()[0].lower()}{self.limit.fix()[1:]}."
            )
        return Encoder(tokenizer=self.tokenizer, max_length=room, options=dict(environment.template_options))

    def source(self, environment: Environment) -> PromptSource:
        return PromptSource(environment, self.encoder(environment))


def encode_prompt(encoder: Encoder, task: Task, limit: SequenceLimit, sampling: SamplingSettings) -> list[int]:
    """Returns the tokens of a task's prompt. Raises if it has none, or if a completion would not fit after it."""
    try:
        prompt = encoder.prompt(task.prompt, task.name)
    except TooLongError as error:
        raise ValueError(
            f"the prompt of {error.row} has {error.length} tokens, but {limit.reason()} with completions of up to "
            f"{sampling.max_new_tokens} leaves {encoder.max_length}. {limit.fix()}, or set the environment's "
            "overlong to drop."
        ) from error
    if not prompt:
        raise ValueError(f"the prompt of {task.name} has no tokens, so there is nothing to continue. Give it text.")
    return prompt


def build_environment(
    settings: EnvironmentSettings, seed: int, encoding: PromptEncoding, pool_factory: PoolFactory | None = None
) -> Environment:
    """Returns the environment, without the prompts that `overlong: drop` drops. Only rank 0 starts reward workers."""
    if settings.weight is not None:
        raise ValueError(f"weight is {settings.weight:g}, but the environment is not in a list. Leave it out.")
    check_variables(encoding.tokenizer, settings.template_variables)
    environment = settings.build(seed, pool_factory if is_rank0() else NullPool)
    environment.template_options = {**settings.template_variables, **environment.template_options}
    if isinstance(settings, PromptSettings) and settings.overlong == "drop":
        try:
            environment.tasks = _fitting_tasks(environment, settings, encoding)
        except BaseException:
            environment.close()
            raise
    return environment


def _fitting_tasks(environment: Environment, settings: PromptSettings, encoding: PromptEncoding) -> Tasks:
    tasks, encoder, limit = environment.tasks, encoding.encoder(environment), encoding.limit
    fitting = [index for index in range(len(tasks)) if _fits(encoder, tasks[index])]
    if not fitting:
        raise ValueError(
            f"every prompt of {settings.path} has more than the {encoder.max_length} tokens that {limit.reason()} "
            f"with completions of up to {encoding.sampling.max_new_tokens} leaves. {limit.fix()}."
        )
    return TaskSubset(tasks, fitting) if len(fitting) < len(tasks) else tasks


def _fits(encoder: Encoder, task: Task) -> bool:
    try:
        encoder.prompt(task.prompt, task.name)
    except TooLongError:
        return False
    return True


def warm_start_example(
    task: Task, tokenizer: ChatTokenizer, limit: SequenceLimit, options: Mapping[str, Any] | None = None
) -> EncodedSequence:
    """Returns a task with its answer as tokens. `options` are the environment's chat-template options."""
    answer = task.answer
    if answer is None:
        raise ValueError(
            f"the warm start trains on the answers that tasks come with, but {task.name} has no "
            f'"{task.answer_column}"; it has: {", ".join(task.example)}. Add the column, name another as '
            "environment.answer, or set warm_start.steps to 0."
        )
    try:
        turns = answer if isinstance(answer, list) else str(answer)
        encoder = Encoder(tokenizer=tokenizer, max_length=limit.tokens(), options=options or {})
        return encoder.completion(task.prompt, turns, task.name)
    except TooLongError as error:
        raise ValueError(
            f"{task.name} with its answer has {error.length} tokens, too many for the warm start with "
            f"{limit.reason()}. {limit.fix()}, or leave the row out."
        ) from error
