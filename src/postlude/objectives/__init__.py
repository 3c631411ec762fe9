"""What to minimise: functions of the output seam that return a `Loss`. They know tokens, no ranks and no scale.

Their settings are what configs are made of, so the room is entered without torch: what makes tensors imports it there.
"""

from postlude.objectives.correction import RolloutCorrection
from postlude.objectives.custom import load_objective
from postlude.objectives.distill import Distill
from postlude.objectives.kl import ReferenceKL
from postlude.objectives.loss import Loss, Metric, Objective, largest, mean, smallest, total
from postlude.objectives.mtp import MTP, MTPProcessor
from postlude.objectives.policy import PolicyGradient
from postlude.objectives.preference import Preference
from postlude.objectives.sft import SFT
from postlude.objectives.value import ValueLoss
from postlude.objectives.weights import weights

__all__ = [
    "MTP",
    "SFT",
    "Distill",
    "Loss",
    "MTPProcessor",
    "Metric",
    "Objective",
    "PolicyGradient",
    "Preference",
    "ReferenceKL",
    "RolloutCorrection",
    "ValueLoss",
    "largest",
    "load_objective",
    "mean",
    "smallest",
    "total",
    "weights",
]
