"""Preflight checks of a second model that shares the policy's tokenizer: a critic or a reference."""

from __future__ import annotations

from collections.abc import Iterator

from postlude.hf.load import check_weights, load_tokenizer
from postlude.hf.read_model import read_model
from postlude.hf.tokenizer import first_difference
from postlude.plan.parameter_count import total_parameters
from postlude.recipes.checks.preflight import Check, PreflightInputs


def critic_checks(inputs: PreflightInputs) -> Iterator[Check]:
    """Yields the checks of a critic with its own model."""
    return second_model_check(inputs, "critic.model", inputs.config.critic.model)


def second_model_check(inputs: PreflightInputs, key: str, model: str | None) -> Iterator[Check]:
    """Yields the check of the model that `key` names: it can be read, has the policy's tokens and fits the layout."""
    if model is not None:
        yield Check(key, lambda: _compare(inputs, key, model), after=("model", "layout", "tokenizer"))


def _compare(inputs: PreflightInputs, key: str, model: str) -> str:
    policy, (_, second) = inputs.model[1], read_model(model)
    fix = f"Give {key} a model with the policy's tokenizer."
    if second.vocab_size != policy.vocab_size:
        raise ValueError(
            f"the policy {inputs.config.model} has {policy.vocab_size} tokens and {model} {second.vocab_size}. {fix}"
        )
    second.check_layout(inputs.config.layout)
    try:
        difference = first_difference(inputs.tokenizer, load_tokenizer(model))
    except FileNotFoundError:
        difference = None
    if difference is not None:
        number, policy_token, model_token = difference
        raise ValueError(
            f"token {number} is {policy_token} to the policy {inputs.config.model} and {model_token} to {model}. {fix}"
        )
    tensors = check_weights(model)
    weights = "random weights" if tensors is None else f"{tensors} tensors"
    return f"{model}, {total_parameters(second):,} parameters, {weights}"
