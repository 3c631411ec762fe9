"""Objectives: functions of `OutputInputs` that return a `Loss`. They know tokens, but no ranks and no scale.

Configs use their settings, so importing this package does not import torch.
"""

from postlude.objectives.correction import RolloutCorrection
from postlude.objectives.distill import Distill
from postlude.objectives.kl import ReferenceKL, RewardKL
from postlude.objectives.loss import Loss, Metric, Objective, largest, load_objective, mean, smallest, total
from postlude.objectives.loss_weights import weights
from postlude.objectives.mtp import MTP, MTPProcessor, load_mtp_processor
from postlude.objectives.policy import PolicyGradient
from postlude.objectives.preference import KTO, ORPO, BradleyTerry, Preference
from postlude.objectives.sft import SFT
from postlude.objectives.value import ActorCritic, ValueLoss

__all__ = [
    "KTO",
    "MTP",
    "ORPO",
    "SFT",
    "ActorCritic",
    "BradleyTerry",
    "Distill",
    "Loss",
    "MTPProcessor",
    "Metric",
    "Objective",
    "PolicyGradient",
    "Preference",
    "ReferenceKL",
    "RewardKL",
    "RolloutCorrection",
    "ValueLoss",
    "largest",
    "load_mtp_processor",
    "load_objective",
    "mean",
    "smallest",
    "total",
    "weights",
]
