"""KTO and ORPO equal the losses of TRL's trainers on the same tokens, in value and gradients."""

from collections import defaultdict
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel
from postlude.data import Batch, pack
from postlude.data.chat import EncodedSequence
from postlude.objectives import KTO, ORPO
from postlude.recipes.kto import unrelated_pairs
from tests.equality import assert_equal
from tests.model.small import small_config
from tests.objectives.cases import batch_for, with_critic
from tests.objectives.test_plain import gradients, run

pytestmark = pytest.mark.peers
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def _frameworks() -> None:
    if find_spec("trl") is None or find_spec("datasets") is None:
        pytest.skip("needs trl and datasets: the packages of `make test-peers`")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return with_critic(small_config("[*-][S-]"))


@pytest.fixture(scope="module")
def batch(model: LanguageModel) -> Batch:
    return batch_for(model)


def logits_of(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Returns the logits [length, vocabulary] of one sequence."""
    (alone,) = pack([tokens], budget=len(tokens))
    return model(alone, output_processor=lambda inputs, _: inputs.head.logits(inputs.hidden))


def padded(rows: list[Tensor], value: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], True, value).long()


class Forward:
    """The model as a TRL trainer calls it: padded rows in, logits and log-probs of the labels out."""

    training = True

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        rows = [logits_of(self.model, row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)]
        logits = torch.nn.utils.rnn.pad_sequence(rows, True)
        logits = torch.nn.functional.pad(logits, (0, 0, 0, input_ids.shape[1] - logits.shape[1]))
        if labels is None:
            return SimpleNamespace(logits=logits)
        targets = labels[:, 1:]
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        nothing = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs.where(targets != -100, 0.0), entropy=nothing, mean_logits=nothing)


def trainer(kind: type, model: LanguageModel, **settings: Any) -> Any:
    """Returns a TRL trainer with only what its loss reads."""
    instance = object.__new__(kind)
    accelerator = SimpleNamespace(device=DEVICE, gather_for_metrics=lambda value: value)
    vars(instance).update(accelerator=accelerator, aux_loss_enabled=False, model=Forward(model), **settings)
    return instance


@pytest.mark.parametrize("shift", [-0.3, 0.3], ids=["a KL above 0", "a KL at its bound"])
@pytest.mark.parametrize("settings", [{}, {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.4}])
def test_kto_equals_trl(model: LanguageModel, batch: Batch, settings: dict[str, float], shift: float) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, masks = [torch.as_tensor(sequence) for sequence in batch.sequences], batch.columns["response_mask"]
    results = [
        EncodedSequence(row.tolist(), [int(weight) for weight in mask]) for row, mask in zip(tokens, masks, strict=True)
    ]
    unrelated = unrelated_pairs(results, 64)
    with torch.no_grad():
        own_logprobs = [
            torch.cat(
                [
                    torch.zeros(1),
                    logits_of(model, row := torch.tensor(pair.tokens))[:-1]
                    .log_softmax(-1)
                    .gather(-1, row[1:, None])[:, 0],
                ]
            )
            for pair in unrelated
        ]
    other_masks = [torch.tensor(pair.mask, dtype=torch.float32) for pair in unrelated]
    reference_sums = torch.stack(
        [((logprob + shift) * mask).sum() for logprob, mask in zip(own_logprobs, other_masks, strict=True)]
    )
    deltas = [float((-shift * mask).sum()) for mask in other_masks]
    kl = max(sum(deltas) / len(deltas), 0.0)
    assert (kl > 0) == (shift < 0)

    objective = KTO(**settings)
    columns = {**batch.columns, "batch_kl": [kl] * len(tokens)}
    actual, metrics = run(model, Batch(tokens, columns), objective, budget=64)
    trl_trainer = trainer(
        KTOTrainer,
        model,
        loss_type="kto",
        beta=objective.beta,
        desirable_weight=objective.desirable_weight,
        undesirable_weight=objective.undesirable_weight,
        calculate_KL=True,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    reference = [
        (logprobs * mask).sum() for logprobs, mask in zip(batch.columns["reference_logprobs"], masks, strict=True)
    ]
    inputs = {
        "input_ids": padded(tokens),
        "attention_mask": padded([torch.ones(len(row)) for row in tokens]),
        "completion_mask": padded(list(masks)),
        "KL_input_ids": padded([torch.tensor(pair.tokens) for pair in unrelated]),
        "KL_attention_mask": padded([torch.ones(len(pair.tokens)) for pair in unrelated]),
        "KL_completion_mask": padded(other_masks),
        "label": torch.tensor(batch.columns["desirable"]).bool(),
        "ref_logps": torch.stack(reference),
        "ref_KL_logps": reference_sums,
    }
    loss = trl_trainer._compute_loss(trl_trainer.model, inputs, False)
    assert_equal(actual, loss, "loss")
    expected_gradients = gradients(model, loss)
    for name, gradient in gradients(model, actual).items():
        assert_equal(gradient, expected_gradients[name], f"gradient of {name}")
    assert metrics["batch_kl"] == pytest.approx(trl_trainer._metrics["train"]["kl"][0], rel=1e-4, abs=1e-6)


def orpo_inputs(tokens: list[Tensor], masks: list[Tensor]) -> dict[str, Tensor]:
    inputs = {}
    for name, first in (("chosen", 0), ("rejected", 1)):
        rows, row_masks = tokens[first::2], masks[first::2]
        inputs[f"{name}_input_ids"] = padded(rows)
        inputs[f"{name}_attention_mask"] = padded([torch.ones(len(row)) for row in rows])
        labels = [row.masked_fill(mask == 0, -100) for row, mask in zip(rows, row_masks, strict=True)]
        inputs[f"{name}_labels"] = padded(labels, -100)
    return inputs


def orpo_trainer(model: LanguageModel, beta: float) -> Any:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    return trainer(ORPOTrainer, model, beta=beta, is_encoder_decoder=False, padding_value=0)


@pytest.mark.parametrize("beta", [0.1, 0.8])
def test_orpo_odds_ratio_equals_trl(model: LanguageModel, batch: Batch, beta: float) -> None:
    """TRL averages the likelihood over the tokens of prompts and completions, so this term is compared alone."""
    tokens = [torch.as_tensor(sequence) for sequence in batch.sequences]
    trl_trainer = orpo_trainer(model, beta)
    chosen, rejected, *_ = trl_trainer.concatenated_forward(
        trl_trainer.model, orpo_inputs(tokens, batch.columns["response_mask"])
    )
    loss = -trl_trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    actual, _ = run(model, batch, ORPO(beta=beta, nll=0.0), budget=64)
    assert_equal(actual, loss, "loss")
    expected_gradients = gradients(model, loss)
    for name, gradient in gradients(model, actual).items():
        assert_equal(gradient, expected_gradients[name], f"gradient of {name}")


def test_orpo_of_one_pair_without_a_prompt_equals_trl(model: LanguageModel, batch: Batch) -> None:
    """Here the likelihood is over the same tokens, so the full loss equals TRL's."""
    tokens = [torch.as_tensor(sequence) for sequence in batch.sequences[:2]]
    trl_trainer = orpo_trainer(model, 0.3)
    inputs = orpo_inputs(tokens, [torch.ones(len(row)) for row in tokens])
    loss, _ = trl_trainer.get_batch_loss_metrics(trl_trainer.model, inputs)
    actual, _ = run(model, Batch(tokens), ORPO(beta=0.3, mask="tokens"), budget=64)
    assert_equal(actual, loss, "loss")
    expected_gradients = gradients(model, loss)
    for name, gradient in gradients(model, actual).items():
        assert_equal(gradient, expected_gradients[name], f"gradient of {name}")
