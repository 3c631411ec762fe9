"""Objectives written plainly: each sequence alone, all its logits, a loop over its tokens."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel, pack
from postlude.data import Batch


@dataclass
class Token:
    """One predicted token: its row of the log-softmax and its columns."""

    sequence: int
    id: int
    hidden: Tensor  # [H]
    logprobs: Tensor  # [V]
    lse: Tensor
    columns: dict[str, Any]

    @property
    def logprob(self) -> Tensor:
        return self.logprobs[self.id]

    @property
    def entropy(self) -> Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum()

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def tokens_of(model: LanguageModel, batch: Batch, temperature: float | None = None) -> list[Token]:
    losses = []
    for index, sequence in enumerate(batch.sequences):
        (alone,) = pack([sequence], budget=len(sequence))
        hidden, logits = model(alone, output_processor=lambda i, _: (i.hidden, i.head.logits(i.hidden)))
        logits = logits / (batch.temperature if temperature is None else temperature)
        for place in range(1, len(sequence)):
            columns = {}
            for name, entries in batch.columns.items():
                entry = torch.as_tensor(entries[index])
                columns[name] = entry if entry.ndim == 0 else entry[place]
            row = logits[place - 1]
            losses.append(
                Token(index, int(sequence[place]), hidden[place - 1], row.log_softmax(-1), row.logsumexp(-1), columns)
            )
    return losses


def weight(token: Token, over: str) -> float:
    return 1.0 if over == "tokens" else float(token[over])


def average(tokens: list[Token], over: str, value: Callable[[Token], Tensor]) -> Tensor:
    """Returns Σ weight · value / Σ weight."""
    counted = [(weight(token, over), token) for token in tokens]
    total = sum(share * value(token) for share, token in counted if share)
    return total / sum(share for share, _ in counted)


def by_sequence(tokens: list[Token]) -> Iterator[list[Token]]:
    for index in sorted({token.sequence for token in tokens}):
        yield [token for token in tokens if token.sequence == index]


def sft(model: LanguageModel, batch: Batch, *, over: str = "tokens", z_loss: float = 0.0) -> Tensor:
    return average(tokens_of(model, batch), over, lambda token: -token.logprob + z_loss * token.lse**2)


def preference(
    model: LanguageModel,
    batch: Batch,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalised: bool = False,
    reference: bool = True,
    margin: float = 0.0,
    margins: bool = False,
    nll: float = 0.0,
    mask: str = "response_mask",
) -> Tensor:
    results = [[token for token in tokens if weight(token, mask)] for tokens in by_sequence(tokens_of(model, batch))]
    gains = []
    for answer in results:
        gain = sum(token.logprob - (token["reference_logprobs"] if reference else 0.0) for token in answer)
        gains.append(gain / len(answer) if length_normalised else gain)
    losses = []
    for chosen in range(0, len(results), 2):
        difference = gains[chosen] - gains[chosen + 1]
        if loss_type == "ipo":
            loss = (difference - 1 / (2 * beta)) ** 2
        else:
            own_margin = float(batch.columns["margins"][chosen]) if margins else 0.0
            right = torch.sigmoid(beta * difference - margin - own_margin)
            loss = -(1 - label_smoothing) * right.log() - label_smoothing * (1 - right).log()
        if nll:
            loss = loss - nll * sum(token.logprob for token in results[chosen]) / len(results[chosen])
        losses.append(loss)
    return sum(losses) / len(losses)


def rollout_weights(answer: list[Token], olds: list[float], correction: Any) -> list[float]:
    gaps = [old - float(token["rollout_logprobs"]) for token, old in zip(answer, olds, strict=True)]
    losses = []
    for gap in gaps:
        raw = math.exp(gap if correction.level == "token" else sum(gaps))
        weight = raw
        if correction.truncate is not None:
            weight = min(max(raw, correction.truncate[0]), correction.truncate[1])
        if correction.mask is not None and not correction.mask[0] <= raw <= correction.mask[1]:
            weight = 0.0
        if correction.sequence_mask is not None:
            geometric = math.exp(sum(gaps) / len(gaps))
            if not correction.sequence_mask[0] <= geometric <= correction.sequence_mask[1]:
                weight = 0.0
        losses.append(weight)
    return losses


def policy(model: LanguageModel, batch: Batch, **settings: Any) -> Tensor:
    return policy_with_metrics(model, batch, **settings)[0]


def policy_with_metrics(  # noqa: PLR0912
    model: LanguageModel,
    batch: Batch,
    *,
    surrogate: str = "clip",
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    correction: Any = None,
    kl: Any = None,
    entropy: float = 0.0,
    positive_nll: float = 0.0,
    over: str = "response_mask",
    length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    everything = tokens_of(model, batch)
    total, shares = torch.zeros(()), 0.0
    watched: dict[str, list[tuple[float, float]]] = {}
    for tokens in by_sequence(everything):
        answer = [token for token in tokens if weight(token, over)]
        if not answer:
            continue
        old = [token.logprob.detach() if ratio == "on_policy" else token["old_logprobs"] for token in answer]
        corrected = [1.0] * len(answer)
        if correction is not None:
            corrected = rollout_weights(answer, [float(logprob.detach()) for logprob in old], correction)
        logs = [token.logprob - old_logprob for token, old_logprob in zip(answer, old, strict=True)]
        if ratio == "sequence":
            logs = [sum(logs) / len(logs)] * len(logs)
        for token, log, before, share in zip(answer, logs, old, corrected, strict=True):
            advantage, r = float(token["advantages"]), log.exp()
            inside = r.clamp(1 - clip_low, 1 + clip_high)
            if surrogate == "reinforce":
                value = -advantage * token.logprob
            elif surrogate == "cispo":
                value = -advantage * inside.detach() * token.logprob
            else:
                value = -min(advantage * r, advantage * inside)
                if dual_clip is not None and advantage < 0:
                    value = min(value, torch.tensor(-advantage * dual_clip))
            value = value * share
            if kl is not None:
                d = token["reference_logprobs"] - token.logprob
                k = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kl.estimator]
                factor = {
                    "expectation": token.logprob.exp() / token.logprob.exp().detach(),
                    "importance": (token.logprob - before).exp(),
                    "estimator": 1.0,
                }[kl.gradient]
                value = value + kl.coefficient * factor * k
                watched.setdefault("kl", []).append((weight(token, over), float(k.detach())))
            value = value - entropy * token.entropy
            if positive_nll:
                value = value - positive_nll * token["positive"] * token.logprob
            total = total + weight(token, over) * value
            shares += weight(token, over)
            gap = float(before.detach() - token["rollout_logprobs"])
            raw = float((token.logprob - before).detach())
            metrics_by_name = {
                "ratio": float(r.detach()),
                "ratio_max": float(r.detach()),
                "ratio_tail": float(not 0.5 <= r <= 2.0),
                "chi2": float(r.detach()) ** 2 - 1,
                "kl_old": math.exp(raw) - 1 - raw,
                "entropy": float(token.entropy.detach()),
                "clip_ratio/low": float(advantage < 0 and r < 1 - clip_low),
                "clip_ratio/high": float(advantage > 0 and r > 1 + clip_high),
                "clip_ratio/dual": float(dual_clip is not None and advantage < 0 and r > dual_clip),
                "rollout_kl": math.exp(gap) - 1 - gap,
                "rollout_logprob_diff_mean": abs(gap),
                "rollout_logprob_diff_max": abs(gap),
                "rollout_ratio_max": math.exp(gap),
                "rollout_ratio_tail": float(not 0.5 <= math.exp(gap) <= 2.0),
                "rollout_chi2": math.exp(2 * gap) - 1,
                "correction": share,
                "corrected": float(abs(share - math.exp(gap)) > 1e-6),
            }
            for name, number in metrics_by_name.items():
                watched.setdefault(name, []).append((weight(token, over), number))
    metrics = {}
    for name, entries in watched.items():
        if name.endswith("_max"):
            metrics[name] = max(number for _, number in entries)
        else:
            metrics[name] = sum(share * number for share, number in entries) / sum(share for share, _ in entries)
    return total / (shares if length is None else length * len(batch)), metrics


def value(
    model: LanguageModel,
    batch: Batch,
    *,
    clip: float | None = 0.2,
    over: str = "response_mask",
    stop_trunk: bool = False,
) -> Tensor:
    def loss(token: Token) -> Tensor:
        hidden = token.hidden.detach() if stop_trunk else token.hidden
        estimate, earned = (hidden * model.value_head.weight).sum(), token["returns"]
        error = (estimate - earned) ** 2
        if clip is not None:
            old = token["old_values"]
            error = torch.maximum(error, (estimate.clamp(old - clip, old + clip) - earned) ** 2)
        return error / 2

    return average(tokens_of(model, batch), over, loss)


def ppo(model: LanguageModel, batch: Batch, *, coefficient: float = 0.5) -> Tensor:
    return policy(model, batch, entropy=0.1) + coefficient * value(model, batch)


def distill(
    model: LanguageModel,
    batch: Batch,
    *,
    forward: float = 1.0,
    outside: str = "bucket",
    nll: float = 0.0,
    temperature: float = 1.0,
    over: str = "tokens",
) -> Tensor:
    def loss(token: Token) -> Tensor:
        q, p = token.logprobs[token["teacher_ids"]].exp(), token["teacher_logprobs"].exp()
        if outside == "renormalise":
            q, p = q / q.sum(), p / p.sum()
        elif outside == "bucket":
            q, p = (torch.cat([probabilities, 1 - probabilities.sum()[None]]) for probabilities in (q, p))
        divergence = forward * (p * (p / q).log()).sum() + (1 - forward) * (q * (q / p).log()).sum()
        return divergence - nll * token.logprob

    return average(tokens_of(model, batch, temperature), over, loss)


def reward(
    model: LanguageModel, batch: Batch, *, margin: float = 0.0, margins: bool = False, centring: float = 0.0
) -> Tensor:
    scores = []
    for sequence in batch.sequences:
        (alone,) = pack([sequence], budget=len(sequence))
        hidden = model(alone, output_processor=lambda inputs, _: inputs.hidden)
        scores.append((hidden[-1] * model.value_head.weight).sum())
    margin_values = batch.columns["margins"][::2] if margins else [0.0] * (len(scores) // 2)
    losses = [
        -torch.sigmoid(chosen - rejected - margin - pair_margin).log() + centring * (chosen + rejected) ** 2
        for chosen, rejected, pair_margin in zip(scores[::2], scores[1::2], margin_values, strict=True)
    ]
    return sum(losses) / len(losses)


def orpo(
    model: LanguageModel, batch: Batch, *, beta: float = 0.1, nll: float = 1.0, mask: str = "response_mask"
) -> Tensor:
    results = [[token for token in tokens if weight(token, mask)] for tokens in by_sequence(tokens_of(model, batch))]
    means = [sum(token.logprob for token in answer) / len(answer) for answer in results]
    odds = [torch.log(torch.exp(mean) / (1 - torch.exp(mean))) for mean in means]
    losses = [
        -nll * means[chosen] - beta * torch.sigmoid(odds[chosen] - odds[chosen + 1]).log()
        for chosen in range(0, len(results), 2)
    ]
    return sum(losses) / len(losses)


def kto(
    model: LanguageModel,
    batch: Batch,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: str = "response_mask",
) -> Tensor:
    losses = []
    for tokens in by_sequence(tokens_of(model, batch)):
        answer = [token for token in tokens if weight(token, mask)]
        gain = sum(token.logprob - token["reference_logprobs"] for token in answer)
        z = answer[0]["batch_kl"]
        if answer[0]["desirable"]:
            losses.append(desirable_weight * (1 - torch.sigmoid(beta * (gain - z))))
        else:
            losses.append(undesirable_weight * (1 - torch.sigmoid(beta * (z - gain))))
    return sum(losses) / len(losses)


PLAIN: Mapping[str, Callable[..., Tensor]] = {
    "sft": sft,
    "preference": preference,
    "policy": policy,
    "value": value,
    "ppo": ppo,
    "distill": distill,
    "reward": reward,
    "orpo": orpo,
    "kto": kto,
}
