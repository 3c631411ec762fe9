"""Multi-token prediction (MTP) in a recipe: the model's own MTP depths, or new ones, and their loss."""

from __future__ import annotations

from postlude.hf.family import Family
from postlude.hf.read_model import Recast, Source, read_model, read_model_with_mtp, with_mtp
from postlude.model import ModelConfig, Pattern
from postlude.objectives import MTP, Objective, load_mtp_processor
from postlude.recipes.config.settings import MTPSettings


def model_source(model: str, mtp: MTPSettings | None) -> Source:
    """Returns the model to load, with the MTP depths of its files, or with new ones if it has none."""
    if mtp is None:
        return model
    family, config = read_model_with_mtp(model)
    pattern = config.pattern
    if pattern.mtp:
        if len(pattern.mtp) != mtp.depths or mtp.layers is not None:
            raise ValueError(
                f"{model} predicts {len(pattern.mtp)} tokens further ahead with its own MTP layers, but "
                f"the config has {mtp.depths}{'' if mtp.layers is None else f' of {mtp.layers}'}. "
                f"Set mtp.depths to {len(pattern.mtp)}, and leave out mtp.layers."
            )
        return with_mtp(model)
    layers = mtp.layers or _as_pattern(_default_layers(family, config))
    return Recast(model, f"{pattern}{f'/{layers}' * mtp.depths}")


def describe_mtp(model: str, mtp: MTPSettings) -> str:
    """Returns one line about the MTP depths and where their weights come from."""
    depths = read_model(model_source(model, mtp))[1].pattern.mtp
    named = f"{len(depths)} depth(s) of {_as_pattern(depths[0])}"
    has_depths = bool(read_model_with_mtp(model)[1].pattern.mtp)
    return f"{named}, the model's own" if has_depths else f"{named}, new: the model has none"


class MTPLoss:
    """Adds the MTP loss of a config to objectives, over the tokens of column `over`. It loads the processor once."""

    def __init__(self, mtp: MTPSettings | None, over: str) -> None:
        self.mtp, self.over = mtp, over
        self.processor = load_mtp_processor(mtp.processor) if mtp is not None and mtp.processor is not None else None

    def __call__(self, objective: Objective, *, trained: bool = True) -> Objective:
        """Returns the objective with the loss. With trained=False it adds the metrics only."""
        if self.mtp is None:
            return objective
        return MTP(
            objective=objective,
            weight=self.mtp.weight if trained else 0.0,
            over=self.over,
            stop_trunk=self.mtp.stop_trunk,
            stop_head=self.mtp.stop_head,
            processor=self.processor,
            context=self.mtp.context,
        )


def _default_layers(family: Family | None, config: ModelConfig) -> tuple[str, ...]:
    """Returns the layers of a new depth: those of the family's own depths, or the model's last layer."""
    if family is not None and family.mtp is not None:
        layers = family.mtp.layers(config)
        if config.blocks.keys() >= set("".join(layers)):
            return layers
    return config.pattern.layers[-1:]


def _as_pattern(layers: tuple[str, ...]) -> str:
    return str(Pattern((layers,)))
