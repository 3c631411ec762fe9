"""Multi-token prediction in a recipe: the model's depths or, if it has none, fresh ones, and their loss."""

from __future__ import annotations

from postlude.hf.family import Family
from postlude.hf.model_source import Recast, Source
from postlude.hf.read_model import read_model, read_model_with_mtp, with_mtp
from postlude.model import ModelConfig, Pattern
from postlude.objectives import MTP, Objective
from postlude.recipes.config.settings import MTPSettings


def model_source(model: str, ahead: MTPSettings | None) -> Source:
    """What to load: the model, with the depths that its files hold, or fresh ones where they hold none."""
    if ahead is None:
        return model
    family, config = read_model_with_mtp(model)
    pattern = config.pattern
    if pattern.mtp:
        if len(pattern.mtp) != ahead.depths or ahead.layers is not None:
            raise ValueError(
                f"{model} predicts {len(pattern.mtp)} tokens further ahead by layers of its own, but mtp asks for "
                f"{ahead.depths}{'' if ahead.layers is None else f' by {ahead.layers}'}. Set mtp.depths to "
                f"{len(pattern.mtp)}, and leave out mtp.layers."
            )
        return with_mtp(model)
    layers = ahead.layers or _spelled(_usual_layers(family, config))
    return Recast(model, f"{pattern}{f'/{layers}' * ahead.depths}")


def describe_mtp(model: str, ahead: MTPSettings) -> str:
    """What predicts further ahead, and where its weights come from, in a line."""
    depths = read_model(model_source(model, ahead))[1].pattern.mtp
    named = f"{len(depths)} depth(s) of {_spelled(depths[0])}"
    return (
        f"{named}, the model's own"
        if read_model_with_mtp(model)[1].pattern.mtp
        else f"{named}, fresh: the model has none"
    )


def with_mtp_loss(objective: Objective, ahead: MTPSettings | None, over: str, *, counted: bool = True) -> Objective:
    """The objective, and beside it the loss of predictions further ahead by the weights `over`, or metrics alone."""
    if ahead is None:
        return objective
    weight = ahead.weight if counted else 0.0
    return MTP(objective=objective, weight=weight, over=over, stop_trunk=ahead.stop_trunk, stop_head=ahead.stop_head)


def _usual_layers(family: Family | None, config: ModelConfig) -> tuple[str, ...]:
    """What a depth of such models is made of: as its family's files have it, else as the last layer is."""
    if family is not None and family.depths is not None:
        layers = family.depths.layers(config)
        if config.blocks.keys() >= set("".join(layers)):
            return layers
    return config.pattern.layers[-1:]


def _spelled(layers: tuple[str, ...]) -> str:
    return str(Pattern((layers,)))
