"""The names of what a run measures, and what each means: the one place that who logs and who reads look at.

`python -m postlude.recipes.report.metrics` writes docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

REWARD, LOSS, LENGTH = "reward_mean", "loss", "length_mean"
SKIPPED, MEMORY, SPEED = "skipped_steps", "gpu_memory_gib", "tokens_per_second"
DRAFTS = "draft_acceptance"
WORKERS_LOST = "workers/lost"
REWARDS, LENGTHS = "rewards", "lengths"  # lists: one number an answer
EVAL = "eval/"  # of what is held out
PASS = f"{EVAL}pass@"
TIME = "time/"  # seconds of a step by what was done in them
PARTS = "reward/"  # what rewards are made of
FAILED = f"{PARTS}failed"
SCORES = (f"{EVAL}{REWARD}", f"{EVAL}accuracy", f"{EVAL}{LOSS}")
"""What a run is judged by: the first of these that it has."""
FALLING = (LOSS, f"{EVAL}{LOSS}")  # better when smaller


@dataclass(frozen=True)
class MetricInfo:
    """What a number means to who reads it."""

    title: str
    meaning: str
    range: str
    watch: str
    """What a reader looks for in it."""


GROUPS: Mapping[str, Mapping[str, MetricInfo]] = {
    "Held out": {
        f"{EVAL}{REWARD}": MetricInfo(
            "Held-out reward",
            "mean reward on tasks that are never trained on (GRPO, eval)",
            "as the reward",
            "the score: it should rise, and the training reward should not run away from it",
        ),
        f"{PASS}k": MetricInfo(
            "pass@k",
            "share of held-out tasks that at least one of k answers solves, with a reward of 1 or more",
            "0 to 1",
            "pass@1 nearing pass@k: the model is surer, not abler",
        ),
        f"{EVAL}{LENGTH}": MetricInfo(
            "Held-out length", "tokens of an answer to a held-out task", "≥ 0", "see `length_mean`"
        ),
        f"{EVAL}NAME": MetricInfo(
            "Held out: NAME",
            "NAME, below, on rows that are never trained on (SFT, DPO, distillation)",
            "as NAME",
            "`eval/loss` rising while `loss` falls: the rows are being learned by heart",
        ),
    },
    "Every step": {
        LOSS: MetricInfo(
            "Loss",
            "what is minimised, a mean over what the objective names",
            "any",
            "falls in SFT, DPO and distillation; a policy gradient's says little. Never compare it across phases",
        ),
        "grad_norm": MetricInfo(
            "Gradient norm",
            "length of the whole gradient, before clipping",
            "≥ 0",
            "calm; a spike that the loss follows asks for a lower rate, inf or nan is a skipped step",
        ),
        "lr": MetricInfo("Learning rate", "the optimizer's, by its schedule", "≥ 0", "as you set it"),
        SKIPPED: MetricInfo(
            "Skipped steps",
            "optimizer steps left out as the gradient was not finite",
            "0, 1, … up to the step's minibatches",
            "0; the run stops after `max_skipped_steps` in a row",
        ),
        "tokens": MetricInfo("Tokens", "tokens the step trained on, prompts included", "≥ 0", "the size of a step"),
        SPEED: MetricInfo("Tokens per second", "those over the whole step's time, rollouts included", "≥ 0", "steady"),
        MEMORY: MetricInfo(
            "GPU memory, GiB",
            "the most that was allocated on a rank's GPU in the step, over all ranks; only on a GPU",
            "≥ 0",
            "room to the card's end; a steady rise is a leak",
        ),
        "epoch": MetricInfo(
            "Epoch", "how often each row has been seen (SFT, DPO, distillation)", "≥ 0", "where the run is"
        ),
        f"{TIME}PHASE": MetricInfo(
            "Seconds",
            "seconds of the step spent in PHASE: `weight_sync` (bringing them to who samples), `rollout` (sampling), "
            "`reward` (judging), `logprobs` (old and reference log-probs), `reference`, `teacher`, `train`, "
            "`evaluation`",
            "≥ 0",
            "what to make faster first",
        ),
    },
    "Asynchrony": {
        "staleness_mean": MetricInfo(
            "Staleness",
            "steps between the one that answers were begun in and the one that learns from them, on average",
            "0 to `asynchrony.max_staleness`",
            "as small as the trainer's waiting (`time/rollout`) allows",
        ),
        "staleness_max": MetricInfo(
            "Staleness, most",
            "the same, of the oldest answers of the step",
            "0 to `asynchrony.max_staleness`",
            "bounded",
        ),
        "policy_lag": MetricInfo(
            "Age of weights",
            "optimizer steps between the weights that tokens were sampled with, where servers tell, and those that "
            "learn from them, on average",
            "≥ 0",
            "below staleness, since answers under way get new weights",
        ),
        "completions_resampled": MetricInfo(
            "Drawn again",
            "answers that were under way when the run was left, and were begun again when it went on",
            "≥ 0",
            "0 but in the first step of a start",
        ),
    },
    "Servers": {
        "servers/up": MetricInfo(
            "Servers up", "servers that answer at the end of the step's rollouts", "1 to all of them", "all of them"
        ),
        "servers/failed": MetricInfo(
            "Server failures",
            "times that a server could not be reached, was silent for too long, or answered nonsense",
            "≥ 0",
            "0; the log names the server",
        ),
        "servers/retried": MetricInfo(
            "Requests sent again", "answers that were asked for again, mostly of another server", "≥ 0", "0"
        ),
        "servers/reload_seconds": MetricInfo(
            "Reload, seconds",
            "how long the slowest server took to have new weights: to read them, or to be sent them",
            "≥ 0",
            "small beside `time/rollout`",
        ),
        "servers/sync_seconds": MetricInfo(
            "Weights to servers, seconds",
            "from the first weight that ranks streamed until servers had them all; writing or sending, and reloading",
            "≥ 0",
            "small beside `time/rollout`",
        ),
        "servers/write_seconds": MetricInfo(
            "Weights written, seconds",
            "ranks streaming weights and the first one writing them",
            "≥ 0",
            "as fast as the disk; with `rollout.sync: network` there is none",
        ),
        "servers/send_seconds": MetricInfo(
            "Weights sent, seconds",
            "ranks streaming weights and sending them, servers taking them",
            "≥ 0",
            "steady; one that rises has a slow server",
        ),
        "servers/check_seconds": MetricInfo(
            "Weights compared, seconds",
            "servers hashing their weights, each `checksum_every`th time",
            "≥ 0",
            "small beside what `checksum_every` steps take",
        ),
        "servers/sync_bytes": MetricInfo(
            "Weights to a server, bytes", "how much each was given", "≥ 0", "the model's size"
        ),
    },
    "Multi-token prediction": {
        "mtp_D/nll": MetricInfo(
            "Further ahead, nll",
            "mean negative log-likelihood of the token D further ahead than the next, by depth D",
            "≥ 0",
            "falls; above the trunk's `nll`, as it looks further",
        ),
        "mtp_D/accepted": MetricInfo(
            "Drafted right",
            "share of tokens that depth D ranks first: those that a draft of it would have got right",
            "0 to 1",
            "rises; it is what speculative decoding gains by",
        ),
        "mtp_D/loss": MetricInfo(
            "Further ahead, loss", "what a processor of yours returned for depth D, its mean", "any", "as you made it"
        ),
    },
    "Experts": {
        "routing/changed": MetricInfo(
            "Routing replayed",
            "share of the replayed choices of experts that the trainer's router would not have made; with "
            "`replay_routing`",
            "0 to 1",
            "a few hundredths in bf16, 0 in fp32; it rises from one minibatch of a rollout to the next",
        ),
    },
    "Answers": {
        REWARD: MetricInfo(
            "Reward", "mean over the step's answers, before any penalty for length", "as the reward", "it should rise"
        ),
        "reward_std": MetricInfo(
            "Reward, deviation",
            "standard deviation of the rewards",
            "≥ 0",
            "at 0 all answers earn alike: nothing to learn",
        ),
        REWARDS: MetricInfo("Rewards", "each answer's reward, a list", "as the reward", "its spread, in the report"),
        LENGTH: MetricInfo(
            "Length", "sampled tokens of an answer, over all its turns", "≥ 0", "growth without reward is rambling"
        ),
        LENGTHS: MetricInfo("Lengths", "each answer's length, a list", "≥ 0", "its spread, in the report"),
        "truncated": MetricInfo(
            "Cut off",
            "share of answers that reached `max_new_tokens` in one of their turns",
            "0 to 1",
            "near 0; else raise `sampling.max_new_tokens`, or see `overlong`",
        ),
        "turns_mean": MetricInfo("Turns", "turns of an answer", "≥ 1", "1 unless the environment is a conversation"),
        DRAFTS: MetricInfo(
            "Drafts accepted",
            "share of the tokens guessed ahead that were the ones then drawn; with `sampling.draft`",
            "0 to 1",
            "each saves a step of the sampler: near 0 drafting costs time",
        ),
        "groups_trained": MetricInfo(
            "Groups learned from",
            "share of `prompts_per_step` whose group was learned from: after dynamic sampling, masking and failed "
            "reward calls, "
            "its rewards differ",
            "0 to 1",
            "low: tasks are too easy or too hard",
        ),
        FAILED: MetricInfo(
            "Reward failures",
            "share of answers whose reward function raised, hung or returned nonsense; they are left out of the "
            "baseline and the loss, unless the environment's `failed_reward` is a number",
            "0 to 1",
            "0; the first failure of each kind is told in the log, and more than `limits.failed_rewards` ends the run",
        ),
        f"{PARTS}timed_out": MetricInfo(
            "Timed out",
            "share of answers whose judge, tool or environment took too long; beside it `raised`, `invalid` and `died`",
            "0 to 1",
            "near 0; else raise `environment.timeout`",
        ),
        WORKERS_LOST: MetricInfo(
            "Workers lost",
            "workers that judge and were lost with their process or node in the step, on Ray: what they were at was "
            "done again by others",
            "≥ 0",
            "0",
        ),
        f"{PARTS}over_budget": MetricInfo(
            "No room", "share of conversations that outgrew the budget", "0 to 1", "near 0; else raise `budget`"
        ),
        f"{PARTS}NAME": MetricInfo(
            "Reward, NAME", "mean of the part NAME that the reward function gave", "as the part", "which part is gained"
        ),
    },
    "Policy gradient": {
        "entropy": MetricInfo(
            "Entropy",
            "mean entropy of the policy where it sampled, in nats",
            "0 to ln(vocabulary)",
            "a slow fall; a fast one to 0 is collapse: no answer differs from another any more",
        ),
        "ratio": MetricInfo("Ratio to the old policy", "mean of p / p_old of the sampled tokens", "> 0", "near 1"),
        "ratio_max": MetricInfo("Largest ratio", "the largest of them", "> 0", "below about 10; else lower the rate"),
        "kl_old": MetricInfo("KL to the old policy", "KL(old ‖ policy), estimated", "≥ 0", "small: below about 0.1"),
        "kl_reference": MetricInfo(
            "KL to the reference",
            "how far the policy is from the model that GRPO started from; with `objective.kl`",
            "≥ 0",
            "rises and levels off",
        ),
        "clipped_low": MetricInfo(
            "Clipped below", "share of tokens that no longer teach: too unlikely already", "0 to 1", "below 0.2"
        ),
        "clipped_high": MetricInfo("Clipped above", "the same, too likely already", "0 to 1", "below 0.2"),
        "clipped_dual": MetricInfo("Clipped twice", "share of tokens at the dual clip", "0 to 1", "near 0"),
        "rollout_kl": MetricInfo(
            "Rollout mismatch",
            "KL(sampler ‖ trainer) of the same weights",
            "≥ 0",
            "below about 1e-3; more says that the sampler computes something else",
        ),
        "rollout_logprob_diff_max": MetricInfo(
            "Rollout mismatch, largest", "largest gap of a log-prob between the two", "≥ 0", "a few tenths in bf16"
        ),
        "correction": MetricInfo(
            "Correction", "mean weight that the rollout correction gives a token", "≥ 0", "near 1"
        ),
        "corrected": MetricInfo("Corrected", "share of tokens whose weight it bounded or dropped", "0 to 1", "near 0"),
    },
    "Supervised, preference, distillation, value": {
        "nll": MetricInfo("Negative log-likelihood", "of the learned tokens, in nats a token", "≥ 0", "falls"),
        "lse": MetricInfo("Log-sum-exp", "of the logits, where there is a z-loss", "any", "stays bounded"),
        "accuracy": MetricInfo(
            "Accuracy",
            "share of pairs whose preferred answer is ranked higher (DPO); a tie counts half",
            "0 to 1",
            "from 0.5 up",
        ),
        "margin": MetricInfo("Margin", "`chosen_reward` less `rejected_reward`", "any", "rises"),
        "chosen_reward": MetricInfo(
            "Reward of the chosen",
            "β times the log-prob of the preferred answers, less the reference's where there is one",
            "any",
            "should not fall far: both falling is a model that forgets",
        ),
        "rejected_reward": MetricInfo("Reward of the rejected", "the same of the others", "any", "falls"),
        "kl_forward": MetricInfo("KL, forward", "KL(teacher ‖ student) over the teacher's top tokens", "≥ 0", "falls"),
        "kl_reverse": MetricInfo("KL, reverse", "KL(student ‖ teacher) over the same", "≥ 0", "falls"),
        "teacher_mass": MetricInfo(
            "Teacher's mass", "probability that the teacher's top tokens hold", "0 to 1", "near 1; else raise `top_k`"
        ),
        "student_mass": MetricInfo(
            "Student's mass", "probability that the student gives those tokens", "0 to 1", "nears the teacher's"
        ),
        "value": MetricInfo("Value", "mean of the critic's values", "as the return", "follows the return"),
        "value_error": MetricInfo("Value error", "mean squared error of the values", "≥ 0", "falls"),
        "value_clipped": MetricInfo("Values clipped", "share of values held to the old ones", "0 to 1", "below 0.2"),
    },
}
METRICS: Mapping[str, MetricInfo] = {name: metric for group in GROUPS.values() for name, metric in group.items()}


def explain(name: str) -> MetricInfo | None:  # noqa: PLR0911 - one for each form that names have
    """What a metric means; None for one that only its objective knows."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith(PASS):
        k = name.removeprefix(PASS)
        pass_at = METRICS[f"{PASS}k"]
        return MetricInfo(
            f"pass@{k}", pass_at.meaning.replace("of k answers", f"of {k} answers"), pass_at.range, pass_at.watch
        )
    if found := re.fullmatch(r"mtp_(\d+)/(\w+)", name):
        return _at_depth(found[1], METRICS.get(f"mtp_D/{found[2]}"))
    if name.startswith(PARTS):
        return _named(METRICS[f"{PARTS}NAME"], name.removeprefix(PARTS))
    if name.startswith(TIME):
        return METRICS[f"{TIME}PHASE"]
    if name.startswith(EVAL):
        inner = explain(name.removeprefix(EVAL))
        return inner and MetricInfo(
            f"Held-out {inner.title[0].lower()}{inner.title[1:]}",
            f"{inner.meaning}; on what is held out",
            inner.range,
            inner.watch,
        )
    return None


def title(name: str) -> str:
    """What a chart of it is called."""
    found = explain(name)
    return found.title if found else name.replace("_", " ").replace("/", ", ")


def glossary() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics: what a run measures",
        "",
        "Every number that `metrics.jsonl`, TensorBoard and the report can hold, by its name. An objective of your own",
        "adds the metrics it names. This page is written by `python -m postlude.recipes.report.metrics > "
        "docs/metrics.md`.",
    ]
    for group, metrics in GROUPS.items():
        lines += ["", f"## {group}", "", "| name | what it is | range | what to look for |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {each.meaning} | {each.range} | {each.watch} |" for name, each in metrics.items()]
    return "\n".join(lines) + "\n"


def _at_depth(depth: str, metric: MetricInfo | None) -> MetricInfo | None:
    if metric is None:
        return None
    meaning = metric.meaning.replace("depth D", f"depth {depth}").replace("token D", f"token {depth}")
    return MetricInfo(f"{metric.title} ({depth})", meaning, metric.range, metric.watch)


def _named(metric: MetricInfo, name: str) -> MetricInfo:
    return MetricInfo(
        *(text.replace("NAME", name) for text in (metric.title, metric.meaning, metric.range, metric.watch))
    )


if __name__ == "__main__":
    print(glossary(), end="")
