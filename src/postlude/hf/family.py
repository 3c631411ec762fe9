"""Family: how one Hugging Face model family maps onto Postlude, as plain data and one pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
OURS_ALONE = ("value_head.weight",)  # their models have no such tensor
EXPERT = "{expert}"


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config -> ModelConfig, and the names of its tensors.

    `names` maps a module inside one of our layers ("attention.q_proj") to the module inside one of theirs
    ("self_attn.q_proj"). `{expert}` in their name stands for one tensor an expert, which we hold stacked.
    """

    model_type: str
    to_model: Callable[[PretrainedConfig], ModelConfig]
    names: Mapping[str, str]

    def theirs(self, name: str) -> str:
        """Their name of our tensor, `{expert}` still in it where we stack: layers.3.… -> model.layers.3.…."""
        module, _, leaf = name.rpartition(".")
        if module in OUTER:
            return f"{OUTER[module]}.{leaf}"
        _, layer, inner = module.split(".", 2)
        # A tensor that is no module's weight or bias is named whole.
        whole = self.names.get(f"{inner}.{leaf}")
        if whole is None and inner not in self.names:
            raise ValueError(
                f"{self.model_type} models have no tensor for {name}. Give a family of your own that names it, or a "
                "ModelConfig with family=None to go by our names."
            )
        return f"model.layers.{layer}.{whole or f'{self.names[inner]}.{leaf}'}"


def pieces(family: Family | None, name: str, shape: Sequence[int]) -> Iterator[tuple[int | None, str]]:
    """The tensors that make up ours of this name and whole shape: (None, their name), or (expert, their name) for each.

    Without a family there is one, of our own name. There are none for what is `OURS_ALONE`.
    """
    if name in OURS_ALONE:
        return
    theirs = name if family is None else family.theirs(name)
    if EXPERT in theirs:
        yield from ((expert, theirs.replace(EXPERT, str(expert))) for expert in range(shape[0]))
    else:
        yield None, theirs
