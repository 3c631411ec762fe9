"""The processors of examples/peers equal verl, SkyRL and NeMo RL in Megatron's GPTModel."""

from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import pytest
import torch

from postlude.integrations.hf import logprobs
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.integrations.test_hf import model_of, tokens
from tests.peers.frameworks import (
    TOLERANCES,
    Inputs,
    errors_of,
    gpt_model,
    import_alone,
    megatron,
    report,
    with_gradients,
)
from tests.peers.rl_frameworks import TEMPERATURE, WAYS, Results

pytestmark = pytest.mark.peers
CHUNK = 3  # tokens; the last chunk is shorter


@dataclass(frozen=True)
class Case:
    way: str
    tied: bool = False
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if WAYS[self.way].kernel else torch.float32

    def __str__(self) -> str:
        kind = "tied" if self.tied else "untied"
        return f"{self.way}, {kind}, tp={self.tp}{', sequence parallel' * self.sequence_parallel}"


CASES = [
    *(Case(way, tied) for way in WAYS for tied in (True, False)),
    *(Case(way, tp=2, sequence_parallel=True) for way in WAYS),
    # NeMo RL would gather hidden states that are whole, and verl's kernel adds no gradients of hidden states up.
    *(Case(way, tp=2) for way in ("verl, logits", "SkyRL, torch", "SkyRL, Triton kernel")),
]


def compare(_: Any, device: str, case: Case) -> dict[str, float]:
    inputs, way = Inputs(device), WAYS[case.way]
    with megatron(device, tp=case.tp):
        sizes = {"tensor_model_parallel_size": case.tp, "sequence_parallel": case.sequence_parallel}
        model = gpt_model(device, tied=case.tied, dtype=case.dtype, **sizes)
        expected = with_gradients(model, inputs, way.peer(model, inputs, CHUNK))
        return errors_of(with_gradients(model, inputs, way.postlude(model, inputs, CHUNK)), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processor_equals_the_framework(workers: Ranks, device: str, case: Case) -> None:
    framework = WAYS[case.way].framework
    if framework == "nemo-rl" and PathFinder.find_spec("nemo_rl") is None:
        pytest.skip("NeMo RL has no wheel, and its sources were not fetched")
    if WAYS[case.way].kernel and device == "cpu":
        pytest.skip("the kernel runs on CUDA alone")
    for rank, errors in enumerate(workers(case.tp, compare, device, case)):
        report(framework, f"GPTModel of megatron-core on {device}, {case}, {case.dtype}, rank {rank}", errors)
        assert max(errors.values()) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_logprobs_equal_verls_forward_of_a_transformers_model(family: str) -> None:
    """verl replaces the model's forward; `logprobs` calls the base model and does not use it."""
    import_alone("verl.utils.experimental.torch_functional")  # which the function imports when it is called
    forward = import_alone("verl.models.transformers.dense_common").forward_with_torch_backend
    model, ids = model_of(family, torch.float32), tokens()

    def with_gradients(rows: Results) -> Results:
        model.zero_grad()
        sum(row[:, : ids.shape[1] - 1].square().sum() for row in rows.values()).backward()
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
        return rows | {f"gradient of {name}": parameter.grad.clone() for name, parameter in parameters.items()}

    output = forward(model, ids, return_dict=True, temperature=TEMPERATURE)
    expected = with_gradients({"logprob": output.log_probs[:, :-1], "entropy": output.entropy[:, :-1]})
    stats = logprobs(model, ids, temperature=TEMPERATURE, entropy=True)
    actual = with_gradients({"logprob": stats.logprob[:, 1:], "entropy": stats.entropy[:, 1:]})
    errors = errors_of(actual, expected)
    report("verl", f"forward of a {family} of transformers", errors)
    assert max(errors.values()) <= TOLERANCE
