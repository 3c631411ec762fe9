"""GRPO: sample a group of answers to each prompt, score them, learn from what was better than its group.

`train` is the loop; each thing it does is a method of `Trainer` that can be read by itself. Everything random follows
from the seed and the step, so a run that is continued is the run that was not interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
import torch.distributed as dist

from postlude.data import Batch
from postlude.data.chat import Encoder, Prompt
from postlude.data.datasets import Sampler
from postlude.engine import AdamW, Engine
from postlude.engine.reference import Reference
from postlude.hf.load import load_tokenizer
from postlude.objectives import SFT, PolicyGradient
from postlude.objectives.advantages import grpo, rloo
from postlude.recipes import config as configs
from postlude.recipes import schema
from postlude.recipes.live import LiveView
from postlude.recipes.report import write_report
from postlude.recipes.run import RunDirectory, Sample, open_run, step_of
from postlude.recipes.settings import DTYPES, Answers, EnvironmentSettings, Gym, OptimizerSettings, Training
from postlude.rollout.environments import Transcript
from postlude.rollout.gathered import GatheredGenerator
from postlude.rollout.protocol import Completion
from postlude.rollout.rewards import Score
from postlude.rollout.sampling import Sampling
from postlude.rollout.tasks import Task, Tasks, hold_out

MAY_CHANGE = ("run", "layout", "budget", "recompute", "save_every", "keep", "wandb", "steps")
REFERENCE = "reference"  # in the run's directory: the weights that a penalty is measured from
SHOWN = 8  # answers of a step kept to be looked at


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps on the tasks' own answers, before the first rollout."""

    steps: int = 0
    """How many; 0 leaves it out."""
    examples: int = 64
    """Examples a step."""
    optimizer: OptimizerSettings = field(default_factory=lambda: AdamW(lr=2e-3))
    """How weights are moved in them."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers to tasks that are never trained on."""

    every: int = 50
    """Steps between evaluations; 0 leaves them out."""
    tasks: int = 64
    """How many tasks are held out."""
    samples: int = 1
    """Answers a task. With more than one, pass@k is reported for powers of two up to it."""
    temperature: float = 0.0
    """Of these answers; 0 takes the likeliest token."""


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(Training):
    """Everything that decides a GRPO run."""

    environment: EnvironmentSettings = field(default_factory=lambda: Gym(task="chain_sum"))
    """Where tasks and rewards come from."""
    steps: int = 200
    """Steps of GRPO, after those of the warm start."""
    prompts: int = 32
    """Prompts a step."""
    samples: int = 8
    """Answers to each prompt: a group."""
    answers: Answers = field(default_factory=Answers)
    """How answers are drawn."""
    objective: PolicyGradient = field(default_factory=lambda: PolicyGradient(clip_high=0.28))
    """What is minimised."""
    advantages: Literal["grpo", "grpo_loo", "dr_grpo", "rloo"] = "grpo"
    """How rewards become advantages within a group: with the mean of all or of the others, divided by the deviation
    or not."""
    minibatches: int = 1
    """Optimizer steps a rollout; each takes an equal share of the prompts."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Whether the ratio starts from what the sampler said or from what the trainer computes."""
    dynamic_sampling: int = 0
    """How many more rounds of prompts to draw in place of groups whose rewards are all alike (DAPO)."""
    overlong: Literal["learn", "mask"] = "learn"
    """Whether answers cut off at max_new_tokens are learned from or left out."""
    overlong_penalty: float = 0.0
    """Taken from the reward of an answer that was cut off."""
    optimizer: OptimizerSettings = field(default_factory=AdamW)
    """How weights are moved."""
    warm_start: WarmStart = field(default_factory=WarmStart)
    """Supervised steps before the first rollout."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """How progress is measured on held-out tasks."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "samples", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but the least is 1.")
        if self.samples < 2:
            raise ValueError("samples is 1, but a group needs at least 2 answers to compare.")
        if self.answers.temperature <= 0:
            raise ValueError("answers.temperature is 0, but a group of equal answers has nothing to compare.")
        if self.objective.temperature not in (1.0, self.answers.temperature):
            raise ValueError(
                f"objective.temperature is {self.objective.temperature:g}, but answers are drawn at "
                f"{self.answers.temperature:g}. Leave it out: it is taken from there."
            )
        if self.prompts % self.minibatches:
            raise ValueError(f"minibatches is {self.minibatches}, which does not divide prompts={self.prompts}.")


@dataclass(frozen=True)
class Answered:
    """One answer to a task, and what it earned."""

    task: Task
    group: int
    transcript: Transcript
    completion: Completion
    reward: float
    parts: dict[str, float]


def train(config: GRPOConfig, device: str = "cpu") -> Path:
    """Run or continue `config` on the ranks that are started. Returns the report's path."""
    trainer = Trainer(config, device)
    with closing(trainer), LiveView(trainer.last, title=f"grpo {config.model}", start=trainer.step) as live:
        while trainer.step < trainer.last:
            warm = trainer.step < config.warm_start.steps
            live.doing("warm start" if warm else "grpo")
            metrics = trainer.warm_step() if warm else trainer.grpo_step()
            trainer.finish_step(metrics, "sft" if warm else "grpo")
            live.update(trainer.step, metrics)
        trainer.engine.finish_saving()
    report = config.run / "report.html"
    if dist.get_rank() == 0:
        write_report([config.run], report)
    dist.barrier()
    return report


class Trainer:
    """The state of a run, and one method for each thing that is done with it."""

    def __init__(self, config: GRPOConfig, device: str) -> None:
        self.config = config
        self.run: RunDirectory = open_run(
            config.run, schema.plain(type(config), config), may_change=MAY_CHANGE, wandb=config.wandb
        )
        self.objective = replace(config.objective, temperature=config.answers.temperature)
        self.tokenizer: Any = load_tokenizer(config.model)
        self.encoder = Encoder(tokenizer=self.tokenizer, max_length=config.budget - config.answers.max_new_tokens)
        self.environment = config.environment.build(config.seed)
        self.tasks: Tasks = self.environment.tasks
        self.held_out: Tasks | None = None
        if config.evaluation.every:
            self.tasks, self.held_out = hold_out(self.environment.tasks, config.evaluation.tasks)
        self.sampler = Sampler(len(self.tasks), config.seed)
        self.engine = Engine(
            config.model,
            layout=config.layout,
            optimizer=config.warm_start.optimizer if config.warm_start.steps else config.optimizer,
            budget=config.budget,
            compute_dtype=None if config.dtype is None else DTYPES[config.dtype],
            device=device,
            recompute=config.recompute,
            seed=config.seed,
        )
        self.step = 0
        self.last = config.warm_start.steps + config.steps
        self.seconds: dict[str, float] = {}
        self.reference: Reference | None = None
        checkpoint = self.run.resume()
        if checkpoint is not None:
            self._resume(checkpoint)
        self.generator = GatheredGenerator(self.engine, self.tokenizer)

    def _resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, with the optimizer and the reference that belong to its phase."""
        if step_of(checkpoint) > self.config.warm_start.steps:
            if self.config.objective.kl is not None:
                self.engine.set_optimizer(self.config.optimizer)
                self.engine.load(self.run.path / REFERENCE)
                self.reference = self.engine.reference()
            self.engine.set_optimizer(self.config.optimizer)
        extra = self.engine.load(checkpoint)
        self.step = extra["step"]
        self.sampler.restore(extra["sampler"])

    def _begin(self) -> None:
        """The first step of GRPO: its own optimizer, and the weights so far as the reference."""
        self.engine.set_optimizer(self.config.optimizer)
        if self.config.objective.kl is not None:
            if not (self.run.path / REFERENCE).exists():  # from an earlier start of the same run
                self.engine.save(self.run.path / REFERENCE)
            self.reference = self.engine.reference()

    def close(self) -> None:
        """Give back what the run holds."""
        self.environment.close()
        self.run.close()

    def warm_step(self) -> dict[str, Any]:
        """One supervised step on the answers that tasks come with."""
        with self._phase("train"):
            examples = [
                self.encoder.answer(task.prompt, str(task.example["answer"]), task.name)
                for task in (self.tasks[index] for index in self.sampler.take(self.config.warm_start.examples))
            ]
            batch = Batch([each.tokens for each in examples], {"response_mask": [each.mask for each in examples]})
            result = self.engine.forward_backward(batch, SFT(over="response_mask"))
            moved = self.engine.optimizer_step()
        return {"loss": result.loss, **result.metrics, "grad_norm": moved.grad_norm, "lr": moved.lr}

    def grpo_step(self) -> dict[str, Any]:
        """One rollout, and the optimizer steps that learn from it."""
        config = self.config
        if self.step == config.warm_start.steps:
            self._begin()
        answered, drawn = self.rollout()
        penalty = config.overlong_penalty
        rewards = [each.reward - penalty * (each.completion.finish_reason == "length") for each in answered]
        metrics: dict[str, Any] = {
            "reward_mean": mean(each.reward for each in drawn),
            "reward_std": torch.tensor([each.reward for each in drawn]).std(correction=0).item(),
            "length_mean": mean(len(each.completion.tokens) for each in drawn),
            "cut_off": mean(each.completion.finish_reason == "length" for each in drawn),
            "groups_learned": len({each.group for each in answered}) / config.prompts,
            "rewards": [each.reward for each in drawn],
            "lengths": [len(each.completion.tokens) for each in drawn],
        }
        metrics |= _means("reward/", [each.parts for each in drawn])
        self._keep_samples(drawn)
        if not answered:
            return metrics | {"loss": 0.0}
        advantages = self._advantages(rewards, [each.group for each in answered])
        with self._phase("score"):
            columns = self._columns(answered, advantages)
        with self._phase("train"):
            groups = list(dict.fromkeys(each.group for each in answered))
            parts = [groups[part :: config.minibatches] for part in range(config.minibatches)]
            results = [self._learn(answered, columns, part) for part in parts if part]
        found = {name: mean(result[name] for result in results) for name in results[0]}
        tokens = sum(len(each.transcript.tokens) for each in answered)
        return metrics | found | {"tokens": tokens}

    def rollout(self) -> tuple[list[Answered], list[Answered]]:
        """Answers to learn from, and all that were drawn. With dynamic sampling groups without a difference go."""
        config = self.config
        chosen: list[Answered] = []
        drawn: list[Answered] = []
        for _ in range(1 + config.dynamic_sampling):
            missing = config.prompts - len({each.group for each in chosen})
            if not missing:
                break
            tasks = [self.tasks[index] for index in self.sampler.take(missing)]
            answers = self.answer(tasks, config.samples, config.answers.temperature, first=len(drawn) // config.samples)
            drawn += answers
            chosen += [each for each in answers if not config.dynamic_sampling or _differs(answers, each.group)]
        if config.overlong == "mask":
            chosen = [each for each in chosen if each.completion.finish_reason != "length"]
            sizes = Counter(each.group for each in chosen)
            chosen = [each for each in chosen if sizes[each.group] > 1]
        return chosen, drawn

    def answer(
        self, tasks: Sequence[Task], samples: int, temperature: float, first: int = 0, stream: int = 0
    ) -> list[Answered]:
        """Draw and score answers to tasks, whose groups are numbered from `first`."""
        answers = self.config.answers
        with self._phase("rollout"):
            self.generator.update()
            prompts = [self.encoder.prompt(task.prompt, task.name) for task in tasks]
            plain = Sampling(
                max_new_tokens=answers.max_new_tokens,
                temperature=temperature,
                top_k=answers.top_k,
                top_p=answers.top_p,
                min_p=answers.min_p,
                stop=answers.stop,
            )
            seeds = [_seed(self.config.seed, self.step, stream, first + place) for place in range(len(prompts))]
            completions = self.generator.generate(prompts, [replace(plain, seed=seed) for seed in seeds], samples)
        with self._phase("reward"):
            each = [(place, completion) for place, group in enumerate(completions) for completion in group]
            scores = self._scores([(tasks[place], completion.text or "") for place, completion in each])
        answered = []
        for (place, completion), score in zip(each, scores, strict=True):
            transcript = Transcript(prompts[place])
            transcript.answer(completion.tokens, completion.logprobs)
            parts = dict(score.parts) | ({"failed": 1.0} if score.error else {})
            answered.append(Answered(tasks[place], first + place, transcript, completion, score.reward, parts))
        return answered

    def _scores(self, said: Sequence[tuple[Task, str]]) -> list[Score]:
        """What answers earn. Each rank judges its share, so that all hear the same even from a judge that wavers."""
        rank, size = dist.get_rank(), dist.get_world_size()
        own = said[rank::size]
        turns = self.environment.step([self.environment.reset(task) for task, _ in own], [text for _, text in own])
        everyone: list[list[Score]] = [[] for _ in range(size)]
        dist.all_gather_object(everyone, [turn.score for turn in turns])
        return [everyone[place % size][place // size] for place in range(len(said))]

    def evaluate(self) -> dict[str, float]:
        """Mean reward on held-out tasks, and pass@k of answers with a reward of at least 1."""
        settings = self.config.evaluation
        assert self.held_out is not None  # there is something to evaluate on
        tasks = [self.held_out[index] for index in range(len(self.held_out))]
        answers = self.answer(tasks, settings.samples, settings.temperature, stream=1)
        found = {"eval/reward_mean": mean(each.reward for each in answers)}
        right = Counter(each.group for each in answers if each.reward >= 1.0)
        k = 1
        while k <= settings.samples:
            wrong = (settings.samples - right[place] for place in range(len(tasks)))
            found[f"eval/pass@{k}"] = mean(1.0 - comb(count, k) / comb(settings.samples, k) for count in wrong)
            k *= 2
        return found

    def finish_step(self, metrics: dict[str, Any], phase: str) -> None:
        """Count the step, evaluate and log it, and save where it is time to."""
        self.step += 1
        every = self.config.evaluation.every
        if phase == "grpo" and every and (self.step - self.config.warm_start.steps) % every == 0:
            metrics |= self.evaluate()
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        spent = sum(self.seconds.values())
        if "tokens" in metrics and spent:
            metrics["tokens_per_second"] = metrics["tokens"] / spent
        self.seconds.clear()
        self.run.log(self.step, metrics, phase=phase)
        every = self.config.save_every
        if self.step == self.last or (every and self.step % every == 0):
            extra = {"step": self.step, "sampler": self.sampler.state()}
            self.engine.save(self.run.checkpoint(self.step), extra=extra)
            self.run.prune(self.config.keep)

    def _advantages(self, rewards: list[float], groups: list[int]) -> list[float]:
        match self.config.advantages:
            case "rloo":
                return rloo(rewards, groups).tolist()
            case "dr_grpo":
                return grpo(rewards, groups, scale_by_std=False).tolist()
            case kind:
                return grpo(rewards, groups, leave_one_out=kind == "grpo_loo").tolist()

    def _columns(self, answered: list[Answered], advantages: list[float]) -> dict[str, list[Any]]:
        transcripts = [each.transcript for each in answered]
        columns: dict[str, list[Any]] = {
            "response_mask": [torch.tensor(each.mask, dtype=torch.float32) for each in transcripts],
            "advantages": advantages,
            "rollout_logprobs": [torch.tensor(each.logprobs) for each in transcripts],
        }
        batch = Batch([each.tokens for each in transcripts])
        temperature = self.objective.temperature
        columns["old_logprobs"] = columns["rollout_logprobs"]
        if self.config.old_logprobs == "recompute":
            columns["old_logprobs"] = self.engine.logprobs(batch, temperature=temperature).logprob
        if self.reference is not None:
            columns["reference_logprobs"] = self.reference.logprobs(batch, temperature=temperature).logprob
        return columns

    def _learn(self, answered: list[Answered], columns: dict[str, list[Any]], groups: list[int]) -> dict[str, float]:
        own = [place for place, each in enumerate(answered) if each.group in groups]
        batch = Batch(
            [answered[place].transcript.tokens for place in own],
            {name: [values[place] for place in own] for name, values in columns.items()},
        )
        result = self.engine.forward_backward(batch, self.objective)
        moved = self.engine.optimizer_step()
        found = {"loss": result.loss, **result.metrics, "grad_norm": moved.grad_norm, "lr": moved.lr}
        return found | {"skipped": float(moved.skipped)}

    def _keep_samples(self, drawn: list[Answered]) -> None:
        kept = drawn[:: max(1, len(drawn) // SHOWN)][:SHOWN]
        self.run.sample(
            self.step + 1,
            [
                Sample(
                    prompt=_text(each.task.prompt),
                    completion=each.completion.text or "",
                    reward=each.reward,
                    parts=each.parts,
                    tokens=each.completion.tokens,
                    token_strings=[self.tokenizer.decode([token]) for token in each.completion.tokens],
                    logprobs=each.completion.logprobs,
                )
                for each in kept
            ],
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def load_config(file: Path | None, overrides: Sequence[str]) -> GRPOConfig:
    """A config from a file and the command line."""
    return configs.load(GRPOConfig, file, overrides)


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _differs(answers: Sequence[Answered], group: int) -> bool:
    return len({each.reward for each in answers if each.group == group}) > 1


def _seed(*numbers: int) -> int:
    """One seed of several numbers, each below 2^16 or so."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed


def _means(prefix: str, parts: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {f"{prefix}{name}": mean(each.get(name, 0.0) for each in parts) for name in names}
