"""A batch with every column, and every setting of every objective; each setting changes the plain formula's result."""

from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel, ModelConfig
from postlude.data import Batch
from postlude.objectives import (
    KTO,
    ORPO,
    SFT,
    ActorCritic,
    BradleyTerry,
    Distill,
    PolicyGradient,
    Preference,
    ReferenceKL,
    RolloutCorrection,
    ValueLoss,
    weights,
)
from tests.objectives.plain import tokens_of

LENGTHS = (9, 6, 4, 8, 11, 5)
PROMPTS = (3, 3, 1, 1, 4, 4)  # tokens of each sequence that were not written by the model
TOP = 5


def sequences(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]


def batch_for(model: LanguageModel) -> Batch:
    """Returns a batch with log-probs near the model's own, so that some ratios are clipped and some are not."""
    generator = torch.Generator().manual_seed(4)
    tokens = sequences(model.config.vocab_size)
    with torch.no_grad():
        by_sequence = tokens_of(model, Batch(tokens))

    def noise(scale: float) -> list[Tensor]:
        return [scale * torch.randn(length, generator=generator) for length in LENGTHS]

    row_values = [torch.zeros(length) for length in LENGTHS]
    for row, values in enumerate(row_values):
        values[1:] = torch.stack([token.logprob for token in by_sequence if token.sequence == row])
    old = [a + b for a, b in zip(row_values, noise(0.4), strict=True)]
    masks = [(torch.arange(length) >= prompt).float() for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    masks[4][6:8] = 0.0  # a tool's output, in the middle of an answer
    teacher = [torch.randn(length, model.config.vocab_size, generator=generator).log_softmax(-1) for length in LENGTHS]
    top = [logprobs.topk(TOP, -1) for logprobs in teacher]
    return Batch(
        tokens,
        {
            "response_mask": masks,
            "sequence_weights": weights(masks, "sequences"),
            "loss_mask": [0.5 * mask + 0.25 * (mask > 0) * (torch.arange(len(mask)) % 2) for mask in masks],
            "old_logprobs": old,
            "rollout_logprobs": [a + b for a, b in zip(old, noise(0.5), strict=True)],
            "reference_logprobs": [a + b for a, b in zip(row_values, noise(0.7), strict=True)],
            "advantages": noise(1.0),
            "positive": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
            "desirable": [1.0, 0.0, 0.0, 1.0, 0.0, 1.0],
            "batch_kl": [0.4] * len(LENGTHS),
            "margins": [0.9, 0.9, -0.2, -0.2, 0.4, 0.4],
            "returns": noise(1.0),
            "old_values": noise(0.5),
            "teacher_ids": [likeliest.indices for likeliest in top],
            "teacher_logprobs": [likeliest.values for likeliest in top],
        },
        groups=[index // 2 for index in range(len(tokens))],
    )


def with_critic(config: ModelConfig) -> LanguageModel:
    """Returns a model with a trained value head: with a zero head no gradient would reach the trunk."""
    model = LanguageModel(config, value_head=True)
    assert model.value_head is not None
    with torch.no_grad():
        model.value_head.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(5))
    return model


def ppo(**settings: Any) -> ActorCritic:
    """Policy and critic losses in one backward."""
    return ActorCritic(policy=PolicyGradient(entropy=0.1), value=ValueLoss(), **settings)


OBJECTIVES: dict[str, Any] = {
    "sft": SFT,
    "preference": Preference,
    "policy": PolicyGradient,
    "value": ValueLoss,
    "ppo": ppo,
    "distill": Distill,
    "reward": BradleyTerry,
    "orpo": ORPO,
    "kto": KTO,
}

# The first of each kind is what the others are to differ from.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {"plain": {}, "over a mask": {"over": "loss_mask"}, "z-loss": {"z_loss": 0.1}},
    "preference": {
        "DPO": {},
        "beta": {"beta": 0.5},
        "label smoothing": {"label_smoothing": 0.2},
        "IPO": {"loss_type": "ipo"},
        "length normalised": {"length_normalised": True},
        "SimPO": {"reference": False, "length_normalised": True, "beta": 2.0, "margin": 0.5},
        "margin": {"margin": 0.5},
        "a margin for each pair": {"margin": 0.5, "margins": True},
        "reference free": {"reference": False},
        "NLL of the chosen": {"nll": 0.3},
        "all tokens": {"mask": "tokens"},
    },
    "policy": {
        "PPO": {},
        "all tokens": {"over": "tokens"},
        "clip higher": {"clip_high": 0.6},
        "clip lower": {"clip_low": 0.05},
        "dual clip": {"dual_clip": 1.3},
        "GSPO": {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.15, "over": "sequence_weights"},
        "GSPO over tokens": {"ratio": "sequence"},
        "CISPO": {"surrogate": "cispo"},
        "REINFORCE": {"surrogate": "reinforce"},
        "on policy": {"ratio": "on_policy"},
        "TIS": {"correction": RolloutCorrection(truncate=(0.0, 1.2))},
        "TIS from below": {"correction": RolloutCorrection(truncate=(0.8, 3.0))},
        "importance weights": {"correction": RolloutCorrection(truncate=None)},
        "IcePop": {"correction": RolloutCorrection(truncate=None, mask=(0.5, 1.5))},
        "TIS of sequences": {"correction": RolloutCorrection(level="sequence", truncate=(0.5, 1.4))},
        "sequence mask": {"correction": RolloutCorrection(truncate=None, sequence_mask=(0.9, 1.2))},
        "TIS on policy": {"ratio": "on_policy", "correction": RolloutCorrection(sequence_mask=(0.9, 1.2))},
        "TIS of REINFORCE": {"surrogate": "reinforce", "correction": RolloutCorrection()},
        "k1": {"kl": ReferenceKL(coefficient=0.3, estimator="k1")},
        "k2": {"kl": ReferenceKL(coefficient=0.3, estimator="k2")},
        "k3": {"kl": ReferenceKL(coefficient=0.3)},
        "k1 importance": {"kl": ReferenceKL(coefficient=0.3, estimator="k1", gradient="importance")},
        "k2 estimator": {"kl": ReferenceKL(coefficient=0.3, estimator="k2", gradient="estimator")},
        "k3 estimator": {"kl": ReferenceKL(coefficient=0.3, gradient="estimator")},
        "k3 importance": {"kl": ReferenceKL(coefficient=0.3, gradient="importance")},
        "entropy": {"entropy": 0.2},
        "NLL of the positive": {"positive_nll": 0.3},
        "sequences alike": {"over": "sequence_weights"},
        "Dr. GRPO": {"length": 12.0},
        "GSPO with all": {
            "ratio": "sequence",
            "over": "sequence_weights",
            "correction": RolloutCorrection(level="sequence"),
            "kl": ReferenceKL(coefficient=0.1),
            "entropy": 0.1,
            "positive_nll": 0.2,
            "length": 7.0,
        },
    },
    "value": {
        "clipped": {},
        "not clipped": {"clip": None},
        "held closer": {"clip": 0.05},
        "all": {"over": "tokens"},
        "value head alone": {"stop_trunk": True},
    },
    "ppo": {"policy and critic": {}, "critic counts more": {"coefficient": 2.0}},
    "reward": {
        "plain": {},
        "margin": {"margin": 0.7},
        "a margin for each pair": {"margin": 0.7, "margins": True},
        "centred": {"centring": 0.3},
    },
    "orpo": {"plain": {}, "beta": {"beta": 0.5}, "no NLL": {"nll": 0.0}, "all tokens": {"mask": "tokens"}},
    "kto": {
        "plain": {},
        "beta": {"beta": 0.5},
        "desirable counts more": {"desirable_weight": 2.0},
        "undesirable counts less": {"undesirable_weight": 0.3},
        "all tokens": {"mask": "tokens"},
    },
    "distill": {
        "forward": {},
        "reverse": {"forward": 0.0},
        "mixed": {"forward": 0.4},
        "renormalised": {"outside": "renormalise"},
        "renormalised, reverse": {"outside": "renormalise", "forward": 0.0},
        "ignoring the rest": {"outside": "ignore"},
        "with labels": {"nll": 0.5},
        "temperature": {"temperature": 1.5},
        "over a mask": {"over": "response_mask"},
    },
}
CASES = [(kind, name) for kind, settings in SETTINGS.items() for name in settings]
