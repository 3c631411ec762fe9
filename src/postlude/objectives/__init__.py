"""What to minimise: functions of the output seam that return a `Loss`. They know tokens, no ranks and no scale."""

from postlude.objectives.loss import Loss, Metric, Objective, largest, mean, smallest, total

__all__ = ["Loss", "Metric", "Objective", "largest", "mean", "smallest", "total"]
