"""The maximum tokens of a sequence of a run: its budget, or the context length of its models if that is less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude.model import ModelConfig


@dataclass(frozen=True)
class SequenceLimit:
    """The maximum tokens of a sequence, prompt and completion together."""

    budget: int
    """Tokens of a microbatch."""
    context_length: int | None = None
    """Tokens that the models read; None for models without a limit."""
    model: str | None = None
    """The model that states the context length; None if the config sets it."""

    def tokens(self, sequences: int = 1) -> int:
        """Returns the maximum tokens of each of several sequences that share a microbatch."""
        share = self.budget // sequences
        return share if self.context_length is None else min(share, self.context_length)

    def reason(self, sequences: int = 1) -> str:
        """Returns what limits the tokens of each of one or two sequences, for an error."""
        if self._is_budget(sequences):
            return f"half of budget={self.budget}" if sequences == 2 else f"budget={self.budget}"
        if self.model is None:
            return f"context_length={self.context_length}"
        return f"the context length {self.context_length} of {self.model}"

    def fix(self, sequences: int = 1) -> str:
        """Returns how to raise the limit, for an error."""
        if self._is_budget(sequences):
            return "Raise budget"
        return "Raise context_length" if self.model is None else "Set context_length if the model can read more"

    def _is_budget(self, sequences: int) -> bool:
        return self.tokens(sequences) == self.budget // sequences


def sequence_limit(config: Any, model: ModelConfig) -> SequenceLimit:
    """Returns the limit of a recipe's config, given the config of its model.

    Other models of the run, such as a teacher, read the same sequences, so the least context length counts.
    """
    if config.context_length is not None:
        return SequenceLimit(config.budget, config.context_length)
    from postlude.hf.read_model import context_length, read_model

    others = dict.fromkeys(name for name in getattr(config, "other_models", ()) if name != config.model)
    lengths = {str(config.model): context_length(model)}
    lengths |= {str(name): context_length(read_model(name)[1]) for name in others}
    stated = {name: length for name, length in lengths.items() if length is not None}
    if not stated:
        return SequenceLimit(config.budget)
    name = min(stated, key=lambda name: stated[name])
    return SequenceLimit(config.budget, stated[name], name)
