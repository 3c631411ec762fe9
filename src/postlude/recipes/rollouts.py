"""Answers to tasks, drawn from a rollout engine and scored by an environment, over one turn or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from statistics import mean
from typing import Any

import torch.distributed as dist

from postlude.data.chat import ChatTokenizer, Encoder, TooLong
from postlude.recipes.clock import Clock
from postlude.recipes.config.settings import Answers, EnvironmentSettings, Evaluation, Prompts
from postlude.recipes.metrics import DRAFTS, EVAL, FAILED, LENGTH, LENGTHS, PARTS, PASS, REWARD, REWARDS
from postlude.recipes.run.directory import Sample
from postlude.rollout.environments import Environment, Said, Transcript, Turn, is_chat
from postlude.rollout.gathered import RankedEngine
from postlude.rollout.protocol import Completion
from postlude.rollout.rewards import Score
from postlude.rollout.sampling import Sampling
from postlude.rollout.tasks import Chosen, Task
from postlude.rollout.workers import Hire

SHOWN = 8  # answers of a step kept to be looked at
TRAINED, HELD_OUT = 0, 1  # what answers are for: the same task gets other answers in either
LINGER = 0.5  # seconds in which turns are waited for, to go on together; those that take longer go on later
NO_ROOM = Score(0.0, {"no_room": 1.0})  # what a conversation earns that outgrows the budget


@dataclass
class Answered:
    """One answer to a task, all its turns, and what it earned."""

    task: Task
    group: int
    transcript: Transcript
    completions: list[Completion] = field(default_factory=list)
    score: Score | None = None

    @property
    def reward(self) -> float:
        """What it earned in all."""
        assert self.score is not None  # it is over
        return self.score.reward

    @property
    def parts(self) -> dict[str, float]:
        """What the reward is made of, and whether it could not be given."""
        assert self.score is not None  # it is over
        return dict(self.score.parts) | ({FAILED.removeprefix(PARTS): 1.0} if self.score.error else {})

    @property
    def cut_off(self) -> bool:
        """Whether its last turn reached max_new_tokens."""
        return self.completions[-1].finish_reason == "length"

    @property
    def length(self) -> int:
        """The number of tokens that were sampled."""
        return sum(len(each.tokens) for each in self.completions)


class Rollouts:
    """Draws and scores answers. Every rank makes the same calls and gets all answers."""

    def __init__(
        self,
        engine: RankedEngine,
        environment: Environment,
        tokenizer: ChatTokenizer,
        answers: Answers,
        *,
        budget: int,
        seed: int,
        timed: Clock,
    ) -> None:
        self.engine, self.environment, self.answers = engine, environment, answers
        self.budget, self.seed, self.timed = budget, seed, timed
        self.encoder = encoder_of(environment, tokenizer, answers, budget)

    def answer(self, tasks: Sequence[Task], samples: int, *, step: int, first: int = 0) -> list[Answered]:
        """`samples` answers to each task, whose groups are numbered from `first`, to learn from in `step`."""
        return self._answer(tasks, samples, self.answers.sampling, step, TRAINED, first)

    def evaluate(self, tasks: Sequence[Task], settings: Evaluation, *, step: int) -> list[Answered]:
        """Answers to held-out tasks, as the evaluation wants them."""
        sampling = replace(self.answers.sampling, temperature=settings.temperature)
        return self._answer(tasks, settings.samples, sampling, step, HELD_OUT, 0)

    def close(self) -> None:
        """Give back what the engine and the environment hold."""
        self.engine.close()
        self.environment.close()

    def _answer(
        self, tasks: Sequence[Task], samples: int, sampling: Sampling, step: int, kind: int, first: int
    ) -> list[Answered]:
        with self.timed("weights"):
            self.engine.refresh()
        with self.timed("rollout"):
            prompts = [encode_prompt(self.encoder, task, self.budget, self.answers) for task in tasks]
            seeds = [_seed(self.seed, step, kind, first + place) for place in range(len(tasks))]
            drawn = self.engine.generate(prompts, [replace(sampling, seed=seed) for seed in seeds], samples)
        attempts = [
            Answered(task, first + place, Transcript(prompts[place]))
            for place, task in enumerate(tasks)
            for _ in range(samples)
        ]
        rank, size = dist.get_rank(), dist.get_world_size()
        own = {place: self.environment.reset(attempts[place].task) for place in range(rank, len(attempts), size)}
        said = dict(enumerate(completion for group in drawn for completion in group))
        waiting: dict[int, int] = {}  # places of episodes of this rank whose turn is not known yet
        under_way = len(attempts)
        while under_way:
            for place, completion in said.items():
                attempts[place].completions.append(completion)
                attempts[place].transcript.answer(completion.tokens, completion.logprobs, completion.routing)
                if place in own:
                    waiting[id(own[place])] = place
                    self.environment.submit(own[place], _said(completion))
            with self.timed("reward"):
                turns = self._turns(waiting)
            with self.timed("rollout"):
                going = [place for place, turn in turns.items() if not self._over(attempts[place], turn)]
                under_way -= len(turns) - len(going)
                for place in (place for place in turns if place in own and place not in going):
                    self.environment.release(own[place])
                said = {}
                if going:
                    again = [
                        _seed(seeds[place // samples], place % samples, len(attempts[place].completions))
                        for place in going
                    ]
                    more = self.engine.generate(
                        [attempts[place].transcript.tokens for place in going],
                        [replace(sampling, seed=seed) for seed in again],
                    )
                    said = {place: completion for place, (completion,) in zip(going, more, strict=True)}
        return attempts

    def _over(self, attempt: Answered, turn: Turn) -> bool:
        """Hear what came of an attempt's last completion; whether that ends it."""
        attempt.score = turn.score
        if turn.observation is None:
            return True
        chat, earned = is_chat(attempt.task.prompt), turn.score or Score(0.0)
        try:
            heard = self.encoder.observation(
                turn.observation,
                attempt.completions[-1].tokens,
                chat=chat,
                keep_reasoning=self.environment.keep_reasoning,
            )
        except ValueError as error:  # the environment's mistake, at the cost of this attempt
            attempt.score = Score(earned.reward, earned.parts, f"the environment's answer cannot be read: {error}")
            return True
        if len(attempt.transcript.tokens) + len(heard) + self.answers.max_new_tokens > self.budget:
            attempt.score = earned.plus(NO_ROOM)
            return True
        attempt.transcript.observe(heard)
        return False

    def _turns(self, waiting: dict[int, int]) -> dict[int, Turn]:
        """What has come of completions, by place: of all that wait, or of those that do not take long.

        Each rank asks for its share, so that all hear the same of a judge that wavers.
        """
        found = self.environment.collect(len(waiting), LINGER)
        turns = {waiting.pop(key): turn for key, (_, turn) in found.items() if key in waiting}
        everyone: list[dict[int, Turn]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, turns)
        turns = {place: turn for share in everyone for place, turn in share.items()}
        return {place: turns[place] for place in sorted(turns)}


def _said(completion: Completion) -> Said:
    return Said(completion.text or "", completion.tokens, completion.finish_reason == "length")


def encoder_of(environment: Environment, tokenizer: ChatTokenizer, answers: Answers, budget: int) -> Encoder:
    """What encodes an environment's prompts, with room for an answer after them."""
    options = dict(environment.template_options)
    return Encoder(tokenizer=tokenizer, max_length=budget - answers.max_new_tokens, options=options)


def encode_prompt(encoder: Encoder, task: Task, budget: int, answers: Answers) -> list[int]:
    """A task's prompt as tokens, after which an answer of full length has a place within the budget."""
    try:
        return encoder.prompt(task.prompt, task.name)
    except TooLong as error:
        raise ValueError(
            f"the prompt of {error.row} has {error.length} tokens, but budget={budget} with answers of up to "
            f"{answers.max_new_tokens} leaves {encoder.max_length}. Raise budget, or set the environment's "
            "overlong to drop."
        ) from error


def environment_of(
    settings: EnvironmentSettings,
    seed: int,
    tokenizer: ChatTokenizer,
    answers: Answers,
    budget: int,
    hire: Hire | None = None,
) -> Environment:
    """The environment, without the prompts that are to be dropped because no answer would fit after them."""
    environment = settings.build(seed, hire)
    if isinstance(settings, Prompts) and settings.overlong == "drop":
        tasks, encoder = environment.tasks, encoder_of(environment, tokenizer, answers, budget)
        kept = [index for index in range(len(tasks)) if _fits(encoder, tasks[index])]
        if not kept:
            environment.close()
            raise ValueError(
                f"every prompt of {settings.path} has more than the {encoder.max_length} tokens that budget={budget} "
                f"with answers of up to {answers.max_new_tokens} leaves. Raise budget."
            )
        if len(kept) < len(tasks):
            environment.tasks = Chosen(tasks, kept)
    return environment


def _fits(encoder: Encoder, task: Task) -> bool:
    try:
        encoder.prompt(task.prompt, task.name)
    except TooLong:
        return False
    return True


def summary(answers: Sequence[Answered]) -> dict[str, Any]:
    """The metrics of some answers: rewards, their parts, lengths, and how well they were drafted."""
    rewards = [each.reward for each in answers]
    middle = mean(rewards)
    found = {
        REWARD: middle,
        "reward_std": mean((reward - middle) ** 2 for reward in rewards) ** 0.5,
        LENGTH: mean(each.length for each in answers),
        "cut_off": mean(each.cut_off for each in answers),
        "turns_mean": mean(len(each.completions) for each in answers),
        REWARDS: rewards,
        LENGTHS: [each.length for each in answers],
    }
    return found | _drafts(answers) | _means(PARTS, [each.parts for each in answers])


def scores(answers: Sequence[Answered], samples: int) -> dict[str, float]:
    """Of held-out tasks: the mean reward, and pass@k by answers with a reward of at least 1, for powers of two k."""
    right = Counter(each.group for each in answers if each.reward >= 1.0)
    wrong = [samples - right[group] for group in dict.fromkeys(each.group for each in answers)]
    found = {f"{EVAL}{REWARD}": mean(each.reward for each in answers), f"{EVAL}{LENGTH}": mean(_lengths(answers))}
    k = 1
    while k <= samples:
        found[f"{PASS}{k}"] = mean(1.0 - comb(count, k) / comb(samples, k) for count in wrong)
        k *= 2
    return found


def shown(answers: Sequence[Answered], tokenizer: Any) -> list[Sample]:
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


def _drafts(answers: Sequence[Answered]) -> dict[str, float]:
    """The share of drafts that were right, where any were made."""
    completions = [completion for each in answers for completion in each.completions]
    drafted = sum(each.drafted for each in completions)
    return {DRAFTS: sum(each.accepted for each in completions) / drafted} if drafted else {}


def _lengths(answers: Sequence[Answered]) -> list[int]:
    return [each.length for each in answers]


def _seed(*numbers: int) -> int:
    """One seed of several numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed


def _means(prefix: str, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {f"{prefix}{name}": mean(each.get(name, 0.0) for each in parts) for name in names}
