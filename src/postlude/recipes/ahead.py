"""Multi-token prediction in a recipe: depths for a model that has none, and their loss beside the objective."""

from __future__ import annotations

from postlude.hf.load import read_model
from postlude.hf.source import Recast, Source
from postlude.objectives import MTP, Objective
from postlude.recipes.config.settings import Ahead


def source_of(model: str, ahead: Ahead | None) -> Source:
    """What to load: the model, with fresh depths where it is to predict further ahead than it can."""
    if ahead is None:
        return model
    _, config = read_model(model)
    pattern = config.pattern
    if pattern.mtp:
        if len(pattern.mtp) != ahead.depths or ahead.layers is not None:
            raise ValueError(
                f"{model} predicts {len(pattern.mtp)} tokens further ahead by layers of its own, but mtp asks for "
                f"{ahead.depths}{'' if ahead.layers is None else f' by {ahead.layers}'}. Set mtp.depths to "
                f"{len(pattern.mtp)}, and leave out mtp.layers."
            )
        return model
    layers = ahead.layers or f"[{pattern.layers[-1]}]"
    return Recast(model, f"{pattern}{f'/{layers}' * ahead.depths}")


def beside(objective: Objective, ahead: Ahead | None, over: str, *, counted: bool = True) -> Objective:
    """The objective, and beside it the loss of predictions further ahead by the weights `over`, or metrics alone."""
    if ahead is None:
        return objective
    weight = ahead.weight if counted else 0.0
    return MTP(objective=objective, weight=weight, over=over, stop_trunk=ahead.stop_trunk, stop_head=ahead.stop_head)
