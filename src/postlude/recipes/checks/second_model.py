"""Preflight checks of a second model with the tokenizer of the trained one: a critic, a reference or a teacher."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from postlude.hf.load import check_weights, first_difference, load_tokenizer
from postlude.hf.read_model import read_model
from postlude.model import ModelConfig
from postlude.plan.parameter_count import total_parameters
from postlude.recipes.checks.preflight import Check, PreflightInputs, describe_weights

ONE_TOKENIZER = "Distil between models of one tokenizer."


def second_model_check(inputs: PreflightInputs, key: str, model: str | None) -> Iterator[Check]:
    """Yields the check of the model that `key` names: it can be read, has the policy's tokens and fits the layout."""
    if model is not None:
        yield Check(key, lambda: _compare_with_policy(inputs, key, model), after=("model", "layout", "tokenizer"))


def _compare_with_policy(inputs: PreflightInputs, key: str, model: str) -> str:
    policy, config = f"the policy {inputs.config.model}", read_model(model)[1]
    fix = f"Give {key} a model with the policy's tokenizer."
    _compare_sizes(policy, inputs.model[1], model, config, fix)
    config.check_layout(inputs.config.layout)
    _compare_tokens(policy, inputs.tokenizer, model, model, fix, inputs.config.trust_remote_code)
    tensors = check_weights(model)
    weights = "random weights" if tensors is None else f"{tensors} tensors"
    return f"{model}, {total_parameters(config):,} parameters, {weights}"


def teacher_checks(inputs: PreflightInputs, teacher: str, top_k: int) -> Iterator[Check]:
    """Yields the checks of a teacher: it can be read and has the student's tokens."""

    def check_model_and_tokens() -> str:
        _, teacher_config = read_model(teacher)
        check_teacher(inputs.config.model, inputs.model[1], teacher, teacher_config, top_k)
        teacher_config.check_layout(inputs.config.layout)
        tokenizer_note = check_teacher_tokens(
            inputs.config.model, inputs.tokenizer, teacher, trust_remote_code=inputs.config.trust_remote_code
        )
        return f"{teacher}, {total_parameters(teacher_config):,} parameters, {tokenizer_note}"

    yield Check("teacher", check_model_and_tokens, after=("model", "layout", "tokenizer"))
    yield Check("teacher's weights", lambda: describe_weights(teacher), after=("teacher",))


def check_teacher(
    model: str, student_config: ModelConfig, teacher: str, teacher_config: ModelConfig, top_k: int
) -> None:
    """Refuses a teacher with another vocabulary size, or with fewer tokens than top_k."""
    _compare_sizes(f"the student {model}", student_config, f"the teacher {teacher}", teacher_config, ONE_TOKENIZER)
    if top_k > teacher_config.vocab_size:
        raise ValueError(
            f"top_k is {top_k}, but the teacher {teacher} has {teacher_config.vocab_size} tokens. Lower top_k."
        )


def check_teacher_tokens(
    model: str, student_tokenizer: PreTrainedTokenizerBase, teacher: str, *, trust_remote_code: bool = False
) -> str:
    """Refuses a teacher with another tokenizer. Returns a clause about its tokenizer."""
    teacher_tokenizer = _compare_tokens(
        f"the student {model}",
        student_tokenizer,
        f"the teacher {teacher}",
        teacher,
        ONE_TOKENIZER,
        trust_remote_code,
    )
    if teacher_tokenizer is None:
        return "without a tokenizer to compare"
    for name in ("bos_token", "eos_token"):
        student_token, teacher_token = getattr(student_tokenizer, name), getattr(teacher_tokenizer, name)
        if student_token != teacher_token:
            return f"the student's tokens, with {name} {teacher_token} where it has {student_token}"
    return "the student's tokens"


def _compare_sizes(first: str, first_config: ModelConfig, second: str, second_config: ModelConfig, fix: str) -> None:
    if first_config.vocab_size != second_config.vocab_size:
        raise ValueError(f"{first} has {first_config.vocab_size} tokens and {second} {second_config.vocab_size}. {fix}")


def _compare_tokens(
    first: str, tokenizer: PreTrainedTokenizerBase, second: str, source: str, fix: str, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of the second model, or None if it has none. Raises ValueError if a token differs.

    BOS and EOS may differ, as they do between a base model and its chat model.
    """
    try:
        second_tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    except FileNotFoundError:
        return None
    if difference := first_difference(tokenizer, second_tokenizer):
        number, first_token, second_token = difference
        raise ValueError(f"token {number} is {first_token} to {first} and {second_token} to {second}. {fix}")
    return second_tokenizer
