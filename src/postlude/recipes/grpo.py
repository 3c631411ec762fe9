"""GRPO: sample a group of answers to each prompt, score them, learn from what was better than its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, Encoder, TooLongError
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import Sampler
from postlude.data.microbatch import ROUTING
from postlude.engine.batch_scatter import scatter_batch
from postlude.engine.reference import Reference
from postlude.objectives import SFT, Objective, PolicyGradient, weights
from postlude.objectives.advantages import grpo, rloo
from postlude.recipes.checks.objective_trial import ANSWERS
from postlude.recipes.checks.preflight import Check, PreflightInputs, environment_checks, training_checks
from postlude.recipes.config.recipe_configs import GRPOConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.report.metrics import LOSS, SKIPPED
from postlude.recipes.rollout_engine import check_servers, make_rollout_engine
from postlude.recipes.rollout_queue import RolloutQueue, policy_lag
from postlude.recipes.rollouts import (
    RolloutSampler,
    build_environment,
    completion_metrics,
    evaluation_metrics,
    sample_rows,
)
from postlude.recipes.run.directory import checkpoint_step
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.trainer import Trainer, train
from postlude.rollout.conversations import Trajectory
from postlude.rollout.tasks import Task, Tasks, hold_out

FOLDS: Mapping[str, Callable[[list[float]], float]] = {"mean": mean, "sum": sum, "max": max, "min": min}
REFERENCE = "reference"  # in the run's directory: the weights that a penalty is measured from


class GRPOTrainer(Trainer):
    """A run of GRPO: supervised steps first where a warm start is asked for, then rollouts and what they teach."""

    name = "grpo"

    def __init__(self, config: GRPOConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.config = config
        self.warm_optimizer, self.optimizer = config.optimizers
        super().__init__(config, device, self.warm_optimizer if config.warm_start.steps else self.optimizer, runtime)
        self.warm = config.warm_start.steps
        self.last = self.warm + config.steps
        self.evaluate_every = config.evaluation.every
        self.lesson: list[Batch] = []  # on the first rank: what the step learns from
        with self.opening():
            self._open(config, runtime)

    def _open(self, config: GRPOConfig, runtime: Runtime) -> None:
        """The environment, and who answers."""
        self.environment = self.hold(
            build_environment(
                config.environment, config.seed, self.tokenizer, config.sampling, config.budget, runtime.pool_factory
            )
        )
        self.tasks: Tasks = self.environment.tasks
        self.held_out: Sequence[Task] = ()
        self.sampler = Sampler(len(self.tasks), config.seed)
        if self.evaluate_every:
            held_out = hold_out(self.tasks, config.evaluation.tasks, config.evaluation.split_by)
            self.held_out = [self.tasks[index] for index in held_out.indices]
            self.sampler.skip = held_out
        self.objective: Objective = build_objective(config.objective)
        if isinstance(self.objective, PolicyGradient):
            self.objective = replace(self.objective, temperature=config.sampling.temperature)
        self.reference: Reference | None = None
        drawing = self.hold(
            make_rollout_engine(
                config.rollout,
                self.engine,
                self.tokenizer,
                config.run,
                config.sampling,
                budget=config.budget,
                routing=config.replay_routing,
                launcher=runtime.launcher,
                beside=config.asynchrony.max_staleness > 0,
            )
        )
        self.rollouts = RolloutSampler(
            drawing,
            self.environment,
            self.tokenizer,
            config.sampling,
            budget=config.budget,
            seed=config.seed,
            timed=self.timed,
            signals=self.signals,
            background=config.asynchrony.max_staleness > 0,
        )
        self.hold(self.rollouts.conversations)
        self.queue = RolloutQueue(
            self.rollouts,
            self.tasks,
            self.sampler,
            samples=config.samples_per_prompt,
            prompts=config.prompts_per_step,
            ahead=config.asynchrony.max_staleness,
            last=self.last,
        )

    @property
    def phase(self) -> str:
        """The warm start's steps are of SFT."""
        return "sft" if self.step < self.warm else "grpo"

    def state(self) -> dict[str, Any]:
        """Which tasks have been learned from, or are under way."""
        return self.queue.state()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, with the optimizer and the reference that belong to its phase."""
        warm = checkpoint_step(checkpoint) <= self.warm
        self.engine.set_optimizer(self.warm_optimizer if warm and self.warm else self.optimizer)
        if not warm and self.config.has_reference:
            self.engine.load(self.run.path / REFERENCE)
            self.reference = self.engine.reference()
            self.engine.set_optimizer(self.optimizer)
        extra = self.engine.load(checkpoint)
        self.step, self.first_norm = extra["step"], extra.get("first_norm", 0.0)
        self.queue.restore(extra)

    def train_step(self) -> dict[str, Any]:
        """One step of the warm start or of GRPO."""
        if self.step < self.warm:
            return self.learn_examples()
        found, parts = self.rollouts.on_rank0(self.teach)
        if self.step == self.warm:
            self._begin()
        return found | self.learn_answers(parts)

    def evaluate(self) -> dict[str, float]:
        """Mean reward and pass@k on held-out tasks."""
        settings = self.config.evaluation
        return self.rollouts.on_rank0(
            lambda: evaluation_metrics(
                self.rollouts.evaluate(self.held_out, settings, step=self.step), settings.samples_per_prompt
            )
        )

    def learn_examples(self) -> dict[str, Any]:
        """One supervised step on the answers that tasks come with."""
        chosen = [self.tasks[index] for index in self.sampler.take(self.config.warm_start.batch_size)]
        options = self.environment.template_options
        examples = [warm_start_example(task, self.tokenizer, self.config.budget, options) for task in chosen]
        batch = Batch([each.tokens for each in examples], {"response_mask": [each.mask for each in examples]})
        return self.learn(batch, SFT(over="response_mask"))

    def teach(self) -> tuple[dict[str, Any], int]:
        """On the first rank: draw what the step learns from; returns what is to be told of it, and its minibatches."""
        answered, drawn = self.rollout()
        self.run.sample(self.step + 1, sample_rows(drawn, self.tokenizer))
        self.health.rewards(drawn, self.step + 1)
        learned = len(self._differing(answered)) / self.config.prompts_per_step
        found = completion_metrics(drawn) | {"groups_trained": learned}
        found |= self.queue.take_metrics() | self.rollouts.take_metrics()
        if (older := policy_lag(answered, self.engine.step)) is not None:
            found["policy_lag"] = older
        self.lesson = self._minibatches(answered)
        return found, len(self.lesson)

    def rollout(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Answers to learn from, and all that were drawn.

        Left out are answers whose reward call failed, those cut off where they are masked, and what has no other of its
        group left to be compared with; with dynamic sampling, also groups without a difference.
        """
        config = self.config
        chosen: list[Trajectory] = []
        drawn: list[Trajectory] = []
        for _ in range(1 + config.dynamic_sampling):
            missing = config.prompts_per_step - len({each.group for each in chosen})
            if not missing:
                break
            answers = self.queue.take(missing, self.step)
            drawn += answers
            kept = [
                each for each in answers if not each.excluded and not (config.overlong == "mask" and each.truncated)
            ]
            sizes = Counter(each.group for each in kept)
            differing = self._differing(kept) if config.dynamic_sampling else sizes.keys()
            chosen += [each for each in kept if sizes[each.group] > 1 and each.group in differing]
        return chosen, drawn

    def learn_answers(self, parts: int) -> dict[str, Any]:
        """The optimizer steps on one rollout, of so many minibatches, which the first rank has."""
        if not parts:
            return {LOSS: 0.0}
        controller, whole = self.rollouts.engine.controller, dict(enumerate(self.lesson))
        batches = [
            scatter_batch(whole.get(part), self.engine.mesh, controller, self.config.budget) for part in range(parts)
        ]
        self.lesson = []
        batches = [self._scored(batch) for batch in batches]  # by the weights that all of them start from
        results = [self.learn(batch, self.objective) for batch in batches]
        found: dict[str, Any] = {
            name: FOLDS[self.reductions.get(name, "mean")]([result[name] for result in results]) for name in results[0]
        }
        if self.config.starts_from_rollout:  # the first minibatch is learned by the very weights that sampled it
            found |= {"rollout_kl": results[0]["kl_old"], "rollout_logprob_diff_max": None}
        return found | {name: sum(result[name] for result in results) for name in ("tokens", SKIPPED)}

    def _begin(self) -> None:
        """The first step of GRPO: its own optimizer, and the weights so far as the reference."""
        if self.warm:
            self.engine.set_optimizer(self.optimizer)
        if self.config.has_reference:
            self.run.discard(REFERENCE)  # that of an earlier start, which may have come here in another way
            self.engine.save(self.run.path / REFERENCE)
            self.reference = self.engine.reference()

    def _minibatches(self, answered: Sequence[Trajectory]) -> list[Batch]:
        """What the objective reads of each answer, the groups shared out over the minibatches."""
        transcripts = [each.transcript for each in answered]
        logprobs = [torch.tensor(each.logprobs) for each in transcripts]
        masks = [each.mask for each in transcripts]
        columns: dict[str, Any] = {
            "response_mask": weights(masks),
            "sequence_mean": weights(masks, "sequences"),
            "group_mean": weights(masks, "groups", groups=[each.group for each in answered]),
            "positive": [float(each.reward >= 1.0) for each in answered],
            "advantages": self._advantages(answered),
            "rollout_logprobs": logprobs,
            "old_logprobs": logprobs,
        }
        if self.config.replay_routing:
            columns[ROUTING] = routing_column(answered)
        groups = list(dict.fromkeys(each.group for each in answered))
        found = []
        for part in range(self.config.minibatches):
            chosen = set(groups[part :: self.config.minibatches])
            own = [place for place, each in enumerate(answered) if each.group in chosen]
            if own:
                parts = {name: [values[place] for place in own] for name, values in columns.items()}
                found.append(Batch([transcripts[place].tokens for place in own], parts))
        return found

    def _scored(self, batch: Batch) -> Batch:
        """With what the trainer itself, or the reference, says of the tokens, where that is asked for."""
        temperature = self.config.sampling.temperature
        columns: dict[str, Any] = dict(batch.columns)
        with self.timed("logprobs"):
            if self.config.old_logprobs == "recompute":
                replayed = {ROUTING: columns[ROUTING]} if ROUTING in columns else {}
                asked = replace(batch, columns=replayed)
                columns["old_logprobs"] = self.engine.logprobs(asked, temperature=temperature).logprob
            if self.reference is not None:
                asked = replace(batch, columns={})
                columns["reference_logprobs"] = self.reference.logprobs(asked, temperature=temperature).logprob
        return replace(batch, columns=columns)

    def _reward(self, answer: Trajectory) -> float:
        """What is learned from: the reward, less the penalty of an answer that was cut off."""
        return answer.reward - self.config.overlong_penalty * answer.truncated

    def _differing(self, answers: Sequence[Trajectory]) -> set[int]:
        """The groups whose rewards are not all alike."""
        rewards: dict[int, set[float]] = {}
        for each in answers:
            rewards.setdefault(each.group, set()).add(self._reward(each))
        return {group for group, found in rewards.items() if len(found) > 1}

    def _advantages(self, answered: Sequence[Trajectory]) -> list[float]:
        rewards = [self._reward(each) for each in answered]
        groups = [each.group for each in answered]
        match self.config.advantages:
            case "rloo":
                return rloo(rewards, groups).tolist()
            case "dr_grpo":
                return grpo(rewards, groups, scale_by_std=False).tolist()
            case kind:
                return grpo(rewards, groups, leave_one_out=kind == "grpo_loo").tolist()


def warm_start_example(
    task: Task, tokenizer: ChatTokenizer, budget: int, options: Mapping[str, Any] | None = None
) -> EncodedSequence:
    """A task with its own answer, as the warm start learns it. `options` are the environment's for the template."""
    answer = task.example.get("answer")
    if answer is None:
        raise ValueError(
            f'the warm start learns the answers that tasks come with, but {task.name} has no "answer"; it has: '
            f"{', '.join(task.example)}. Add the column, or set warm_start.steps to 0."
        )
    try:
        turns = answer if isinstance(answer, list) else str(answer)
        encoder = Encoder(tokenizer=tokenizer, max_length=budget, options=options or {})
        return encoder.completion(task.prompt, turns, task.name)
    except TooLongError as error:
        raise ValueError(
            f"{task.name} with its answer has {error.length} tokens, too many for the warm start in a budget of "
            f"{budget}. Raise budget, or leave the row out."
        ) from error


def routing_column(answered: Sequence[Trajectory]) -> list[Tensor]:
    """Which experts the tokens of each answer were sent to when it was sampled."""
    found = [each.transcript.routing for each in answered if each.transcript.routing is not None]
    if len(found) < len(answered):
        raise ValueError(
            f"replay_routing needs the experts that sampled tokens were sent to, but {len(answered) - len(found)} of "
            f"{len(answered)} answers came without. Draw them with Generator(routing=True), as servers do not tell; or "
            "set replay_routing to false."
        )
    return found


def _trial(config: GRPOConfig) -> Batch:
    """A batch to try the objective on: two prompts with two answers each, one of them better."""
    masks = [each.mask for each in ANSWERS]
    logprobs = [torch.full((len(each),), -1.0) for each in ANSWERS]
    columns: dict[str, Any] = {
        "response_mask": weights(masks),
        "sequence_mean": weights(masks, "sequences"),
        "group_mean": weights(masks, "groups", groups=[0, 0, 1, 1]),
        "positive": [1.0, 0.0, 1.0, 0.0],
        "advantages": [1.0, -1.0, 1.0, -1.0],
        "rollout_logprobs": logprobs,
        "old_logprobs": logprobs,
    }
    return Batch(
        [each.tokens for each in ANSWERS],
        columns | ({"reference_logprobs": logprobs} if config.has_reference else {}),
    )


def checks(inputs: PreflightInputs) -> list[Check]:
    """What must hold before a run begins."""
    config: GRPOConfig = inputs.config
    inputs.others += [config.model] if config.has_reference else []

    def example(task: Task, options: Mapping[str, Any]) -> EncodedSequence:
        return warm_start_example(task, inputs.tokenizer, config.budget, options)

    warm = example if config.warm_start.steps else None
    held_out = config.evaluation if config.evaluation.every else None
    replay = [Check("replay_routing", lambda: _replay(inputs), after=("model",))] if config.replay_routing else []
    return [
        *training_checks(inputs, _trial(config)),
        *replay,
        *environment_checks(inputs, config.environment, config.sampling, example=warm, held_out=held_out),
        *check_servers(
            inputs, config.rollout, config.sampling, trained=True, compared=config.old_logprobs == "rollout"
        ),
    ]


def run(
    config: GRPOConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Run or continue `config` on the ranks that are started."""
    return train(GRPOTrainer(config, device, runtime), start_mode)


def _replay(inputs: PreflightInputs) -> str:
    routers = inputs.model[1].routers
    if not routers:
        raise ValueError(
            f"replay_routing sends tokens to the experts that they were sampled with, but {inputs.config.model} has "
            "none. Set it to false."
        )
    return f"of {len(routers)} blocks with experts"
