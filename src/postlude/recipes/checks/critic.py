"""Preflight checks of a critic that has a model of its own."""

from __future__ import annotations

from collections.abc import Iterator

from postlude.hf.load import check_weights, load_tokenizer
from postlude.hf.read_model import read_model
from postlude.hf.tokenizer import first_difference
from postlude.plan.parameter_count import total_parameters
from postlude.recipes.checks.preflight import Check, PreflightInputs


def critic_checks(inputs: PreflightInputs) -> Iterator[Check]:
    """Checks of the critic: it can be read, has the policy's tokens and fits the layout."""
    if (model := inputs.config.critic.model) is not None:
        yield Check("critic", lambda: _critic(inputs, model), after=("model", "layout", "tokenizer"))


def _critic(inputs: PreflightInputs, model: str) -> str:
    policy, (_, critic) = inputs.model[1], read_model(model)
    if critic.vocab_size != policy.vocab_size:
        raise ValueError(
            f"the policy {inputs.config.model} has {policy.vocab_size} tokens and the critic {model} "
            f"{critic.vocab_size}. Give a critic with the policy's tokenizer."
        )
    critic.check_layout(inputs.config.layout)
    try:
        difference = first_difference(inputs.tokenizer, load_tokenizer(model))
    except FileNotFoundError:
        difference = None
    if difference is not None:
        number, ours, theirs = difference
        raise ValueError(
            f"token {number} is {ours} to the policy {inputs.config.model} and {theirs} to the critic {model}. Give a "
            "critic with the policy's tokenizer."
        )
    tensors = check_weights(model)
    weights = "random weights" if tensors is None else f"{tensors} tensors"
    return f"{model}, {total_parameters(critic):,} parameters, {weights}"
