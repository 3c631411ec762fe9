"""Answers to tasks, drawn from a rollout engine and scored by an environment, over one turn or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import comb
from statistics import mean
from typing import Any, TypeVar

from postlude.data.chat import Encoder, TooLongError
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.distributed import DistributedEngine
from postlude.generate.sampling_params import SamplingParams
from postlude.pool.worker_pool import FAILURE_KINDS, NullPool, PoolFactory
from postlude.recipes.config.settings import EnvironmentSettings, EvaluationSettings, PromptSettings, SamplingSettings
from postlude.recipes.report.metrics import DRAFTS, EVAL, LENGTH, LENGTHS, PARTS, PASS, REWARD, REWARDS, WORKERS_LOST
from postlude.recipes.run.directory import Sample, is_rank0
from postlude.recipes.run.phase_timer import PhaseTimer
from postlude.recipes.run.signals import StopSignals
from postlude.rollout.conversations import FAILED, Conversations, Trajectory, TrajectoryGroup, combine_seeds
from postlude.rollout.environments import Environment
from postlude.rollout.tasks import Task, TaskSubset

SHOWN = 8  # answers of a step kept to be looked at
TRAINED, HELD_OUT = 0, 1  # what answers are for: the same task gets other answers in either
Result = TypeVar("Result")


class RolloutSampler:
    """Draws and scores answers. The first rank of a run alone asks for them, and gets them, within `on_rank0`."""

    def __init__(
        self,
        engine: DistributedEngine,
        environment: Environment,
        tokenizer: ChatTokenizer,
        answers: SamplingSettings,
        *,
        budget: int,
        seed: int,
        timed: PhaseTimer,
        background: bool = False,
        signals: StopSignals | None = None,
    ) -> None:
        self.engine, self.environment, self.answers = engine, environment, answers
        self.sampling = replace(answers.sampling, stop_tokens=answers.stop_ids(tokenizer))
        self.budget, self.seed, self.timed = budget, seed, timed
        self.background, self.signals = background, signals
        self._lost = 0  # workers, as was told
        self.encoder = prompt_encoder(environment, tokenizer, answers, budget)
        self.conversations = Conversations(
            engine,
            environment,
            self.encoder,
            budget=budget,
            max_new_tokens=answers.max_new_tokens,
            background=background and engine.controller.is_rank0,
            meanwhile=self._meanwhile,
            timed=(lambda _: nullcontext()) if background else timed,
        )

    def _meanwhile(self) -> None:
        """While answers are waited for. Those that this rank draws itself come soon, and are not left for a signal."""
        self.engine.check_health()
        if self.signals is not None and not self.engine.batched_polls:
            self.signals.check()

    def on_rank0(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on the first rank, on every rank: answers are drawn there, with the newest weights."""
        with self.timed("weight_sync"):
            self.engine.refresh()
        return self.engine.controller.on_rank0(work)

    def answer(
        self, tasks: Sequence[Task], samples: int, *, step: int, first: int = 0, kind: int = TRAINED
    ) -> list[Trajectory]:
        """`samples` answers to each task, whose groups are numbered from `first`, to learn from in `step`."""
        groups = [self.group(task, first + place, samples, step=step, kind=kind) for place, task in enumerate(tasks)]
        return self.drawn(groups)

    def evaluate(self, tasks: Sequence[Task], settings: EvaluationSettings, *, step: int) -> list[Trajectory]:
        """Answers to held-out tasks, as the evaluation wants them."""
        sampling = replace(self.sampling, temperature=settings.temperature)
        return self.drawn(
            [
                self.group(task, place, settings.samples_per_prompt, step=step, kind=HELD_OUT, sampling=sampling)
                for place, task in enumerate(tasks)
            ]
        )

    def group(
        self,
        task: Task,
        number: int,
        samples: int,
        *,
        step: int,
        kind: int = TRAINED,
        sampling: SamplingParams | None = None,
    ) -> TrajectoryGroup:
        """The attempts at a task: `step`, `kind` and `number` decide what they draw."""
        prompt = encode_prompt(self.encoder, task, self.budget, self.answers)
        seed = combine_seeds(self.seed, step, kind, number)
        return TrajectoryGroup.of(task, number, prompt, replace(sampling or self.sampling, seed=seed), samples)

    def drawn(self, groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
        """All answers of some groups, group by group."""
        for group in groups:
            self.conversations.begin(group)
        self.wait(lambda: all(group.done for group in groups))
        return [each for group in groups for each in group.trajectories]

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until something is so of groups that were begun."""
        with self.timed("rollout") if self.background else nullcontext():
            self.conversations.wait(done)

    def take_metrics(self) -> dict[str, float]:
        """How those fared who draw and who judge, since it was asked last."""
        found, lost = self.engine.take_metrics(), self.environment.lost_workers
        if lost is not None:
            found[WORKERS_LOST] = float(lost - self._lost)
            self._lost = lost
        return found


def prompt_encoder(
    environment: Environment, tokenizer: ChatTokenizer, answers: SamplingSettings, budget: int
) -> Encoder:
    """What encodes an environment's prompts, with room for an answer after them."""
    options = dict(environment.template_options)
    return Encoder(tokenizer=tokenizer, max_length=budget - answers.max_new_tokens, options=options)


def encode_prompt(encoder: Encoder, task: Task, budget: int, answers: SamplingSettings) -> list[int]:
    """A task's prompt as tokens, after which an answer of full length has a place within the budget."""
    try:
        return encoder.prompt(task.prompt, task.name)
    except TooLongError as error:
        raise ValueError(
            f"the prompt of {error.row} has {error.length} tokens, but budget={budget} with answers of up to "
            f"{answers.max_new_tokens} leaves {encoder.max_length}. Raise budget, or set the environment's "
            "overlong to drop."
        ) from error


def build_environment(
    settings: EnvironmentSettings,
    seed: int,
    tokenizer: ChatTokenizer,
    answers: SamplingSettings,
    budget: int,
    pool_factory: PoolFactory | None = None,
) -> Environment:
    """The environment, without the prompts that are to be dropped because no answer would fit after them.

    The first rank has answers judged, so that it alone hires.
    """
    environment = settings.build(seed, pool_factory if is_rank0() else NullPool)
    if isinstance(settings, PromptSettings) and settings.overlong == "drop":
        try:
            _drop_overlong(
                environment, settings, prompt_encoder(environment, tokenizer, answers, budget), answers, budget
            )
        except BaseException:
            environment.close()
            raise
    return environment


def _drop_overlong(
    environment: Environment, settings: PromptSettings, encoder: Encoder, answers: SamplingSettings, budget: int
) -> None:
    tasks = environment.tasks
    kept = [index for index in range(len(tasks)) if _fits(encoder, tasks[index])]
    if not kept:
        raise ValueError(
            f"every prompt of {settings.path} has more than the {encoder.max_length} tokens that budget={budget} "
            f"with answers of up to {answers.max_new_tokens} leaves. Raise budget."
        )
    if len(kept) < len(tasks):
        environment.tasks = TaskSubset(tasks, kept)


def _fits(encoder: Encoder, task: Task) -> bool:
    try:
        encoder.prompt(task.prompt, task.name)
    except TooLongError:
        return False
    return True


def completion_metrics(answers: Sequence[Trajectory]) -> dict[str, Any]:
    """The metrics of some answers: rewards, their parts, lengths, and how well they were drafted.

    Rewards and their parts are of answers that have one; failed calls are a share of all.
    """
    scored = [each for each in answers if not each.excluded]
    rewards = [each.reward for each in scored]
    found: dict[str, Any] = {}
    if rewards:
        middle = mean(rewards)
        found = {REWARD: middle, "reward_std": mean((reward - middle) ** 2 for reward in rewards) ** 0.5}
    found |= {
        LENGTH: mean(each.length for each in answers),
        "truncated": mean(each.truncated for each in answers),
        "turns_mean": mean(len(each.completions) for each in answers),
        REWARDS: rewards,
        LENGTHS: [each.length for each in answers],
    }
    failures = [{name: each.parts[name] for name in (FAILED, *FAILURE_KINDS) if name in each.parts} for each in answers]
    return found | _drafts(answers) | _means(PARTS, [each.parts for each in scored]) | _means(PARTS, failures)


def evaluation_metrics(answers: Sequence[Trajectory], samples: int) -> dict[str, float]:
    """Of held-out tasks: the mean reward, and pass@k by answers with a reward of at least 1, for powers of two k.

    An answer whose reward call failed has no part in the mean, and solves nothing.
    """
    scored = [each for each in answers if not each.excluded]
    right = Counter(each.group for each in scored if each.reward >= 1.0)
    wrong = [samples - right[group] for group in dict.fromkeys(each.group for each in answers)]
    found = {f"{EVAL}{REWARD}": mean(each.reward for each in scored)} if scored else {}
    found[f"{EVAL}{LENGTH}"] = mean(_lengths(answers))
    if failed := sum(FAILED in each.parts for each in answers):
        found[f"{EVAL}{PARTS}{FAILED}"] = failed / len(answers)
    k = 1
    while k <= samples:
        found[f"{PASS}{k}"] = mean(1.0 - comb(count, k) / comb(samples, k) for count in wrong)
        k *= 2
    return found


def sample_rows(answers: Sequence[Trajectory], tokenizer: Any) -> list[Sample]:
    """A few of the answers, for the run's directory."""
    return [
        Sample(
            prompt=each.task.prompt if isinstance(each.task.prompt, str) else str(each.task.prompt[-1]["content"]),
            completion="\n…\n".join(completion.text or "" for completion in each.completions),
            reward=each.reward,
            parts=each.parts,
            tokens=[token for completion in each.completions for token in completion.tokens],
            token_strings=[tokenizer.decode([token]) for turn in each.completions for token in turn.tokens],
            logprobs=[logprob for completion in each.completions for logprob in completion.logprobs],
        )
        for each in answers[:: max(1, len(answers) // SHOWN)][:SHOWN]
    ]


def _drafts(answers: Sequence[Trajectory]) -> dict[str, float]:
    """The share of drafts that were right, where any were made."""
    completions = [completion for each in answers for completion in each.completions]
    drafted = sum(each.drafted for each in completions)
    return {DRAFTS: sum(each.accepted for each in completions) / drafted} if drafted else {}


def _lengths(answers: Sequence[Trajectory]) -> list[int]:
    return [each.length for each in answers]


def _means(prefix: str, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {f"{prefix}{name}": mean(each.get(name, 0.0) for each in parts) for name in names}
