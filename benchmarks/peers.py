"""Peers: transformers with an update in the way of TRL's GRPO, with Liger, and packed with flex attention.

Our own code after what TRL does: rows padded to the longest of the batch, logits of all positions, the log-softmax of
the tokens row by row in bf16, entropies without a gradient, a clipped surrogate, AdamW. TRL pads to the longest
of all rows that were generated together; here it is only the longest of the rows that are run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from workloads import Sample

from postlude.data.bins import plan_bins

Rows = dict[str, Tensor]
"""`ids`, `mask` [rows, width], `advantages` [rows], of sequences padded on the right."""
ENTROPY_ROWS = 128


def build_model(config: PretrainedConfig, device: str, dtype: torch.dtype, attention: str = "sdpa") -> nn.Module:
    """A model of random weights, made on the device."""
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.train()


def padded(sample: Sample, rows: int, device: str) -> Iterator[Rows]:
    """The sequences in their order, so many rows at a time."""
    for first in range(0, len(sample.sequences), rows):
        sequences = sample.sequences[first : first + rows]
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        advantages = torch.tensor(sample.advantages[first : first + rows])
        yield {"ids": ids.to(device), "mask": mask.long().to(device), "advantages": advantages.to(device)}


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """[rows, T, V], [rows, T] -> [rows, T]. In bf16 row by row, as log-softmax of all rows would take too much."""
    if logits.dtype in (torch.float32, torch.float64):
        chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    rows = [
        F.log_softmax(row, dim=-1).gather(-1, target[:, None]).squeeze(-1)
        for row, target in zip(logits, targets, strict=True)
    ]
    return torch.stack(rows)


@torch.no_grad()
def entropies(logits: Tensor) -> Tensor:
    """[rows, T, V] -> [rows, T], a few rows of the vocabulary at a time."""
    flat = logits.flatten(0, 1)
    chunks = []
    for chunk in flat.split(ENTROPY_ROWS):
        logprobs = F.log_softmax(chunk, dim=-1)
        chunks.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(chunks).view(logits.shape[:2])


def clipped_loss(logprobs: Tensor, old: Tensor | float, advantages: Tensor, mask: Tensor, tokens: int) -> Tensor:
    ratio = (logprobs - old).exp()
    token_advantages = advantages[:, None]
    losses = -torch.minimum(ratio * token_advantages, ratio.clamp(0.8, 1.2) * token_advantages)
    return (losses * mask).sum() / tokens


class Update:
    """One update over a sample: `loss_of` each padded batch, backward, clip, AdamW."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], loss_of: Callable[[nn.Module, Any], Tensor], *, autocast: bool
    ) -> None:
        self.model, self.batches, self.loss_of, self.autocast = model, batches, loss_of, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def __call__(self) -> None:
        for batch in self.batches:
            with self.casting():
                loss = self.loss_of(self.model, batch)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def casting(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.autocast else nullcontext()


def grpo(sample: Sample) -> Callable[[nn.Module, Rows], Tensor]:
    """TRL's update with full logits. Entropy is computed, as TRL logs it."""
    tokens = sample.learned

    def loss_of(model: nn.Module, rows: Rows) -> Tensor:
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).logits[:, :-1]
        logits = logits / 1.0  # the temperature, which TRL divides by whatever it is
        targets, mask = rows["ids"][:, 1:], rows["mask"][:, 1:]
        logprobs = token_logprobs(logits, targets)
        entropies(logits)
        return clipped_loss(logprobs, sample.old_logprob, rows["advantages"], mask, tokens)

    return loss_of


@torch.no_grad()
def logprobs_alone(model: nn.Module, batches: Sequence[Rows]) -> None:
    """TRL's pass for old log-probs: no gradient, no entropy."""
    for rows in batches:
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).logits[:, :-1]
        token_logprobs(logits / 1.0, rows["ids"][:, 1:])


def liger(config: PretrainedConfig) -> None:
    """Put Liger's kernels into transformers' classes: models made afterwards have them."""
    from liger_kernel.transformers import monkey_patch

    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[config.model_type]()


def liger_grpo(sample: Sample) -> Callable[[nn.Module, Rows], Tensor]:
    """TRL's update with use_liger_kernel: the head and the loss in one function, a row at a time. No entropy."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    share = len(sample.sequences)

    def loss_of(model: nn.Module, rows: Rows) -> Tensor:
        hidden = model.model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).last_hidden_state
        targets, mask = rows["ids"][:, 1:], rows["mask"][:, 1:]
        old = torch.full(targets.shape, sample.old_logprob, device=targets.device)
        mean_loss: Tensor = loss(
            hidden[:, :-1].contiguous(),
            model.lm_head.weight,
            targets,
            mask,
            rows["advantages"],
            old_per_token_logps=old,
        )[0]
        return mean_loss * len(rows["ids"]) / share

    return loss_of


def sft(sample: Sample) -> Callable[[nn.Module, Rows], Tensor]:
    """transformers' own loss on padded rows. With Liger's kernels, through its fused head."""
    tokens = sample.learned

    def loss_of(model: nn.Module, rows: Rows) -> Tensor:
        labels = rows["ids"].masked_fill(rows["mask"] == 0, -100)
        loss: Tensor = model(
            input_ids=rows["ids"],
            attention_mask=rows["mask"],
            labels=labels,
            use_cache=False,
            num_items_in_batch=torch.tensor(tokens, device=labels.device),
        ).loss
        return loss

    return loss_of


def packed(sample: Sample, budget: int, device: str) -> list[Rows]:
    """The sequences end to end in rows of at most `budget` tokens; positions that begin anew tell them apart."""
    batches = []
    for members in plan_bins(sample.lengths, budget):
        sequences = [sample.sequences[member] for member in members]
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        labels = torch.cat([torch.cat((torch.tensor([-100]), sequence[1:])) for sequence in sequences])
        padding = budget - len(positions)  # one shape for all, so that a compiled attention is compiled once
        ids, labels = F.pad(torch.cat(sequences), (0, padding)), F.pad(labels, (0, padding), value=-100)
        positions = torch.cat((positions, torch.arange(padding)))
        batches.append(
            {"ids": ids[None].to(device), "positions": positions[None].to(device), "labels": labels[None].to(device)}
        )
    return batches


def packed_sft(sample: Sample) -> Callable[[nn.Module, Rows], Tensor]:
    """transformers' own loss on packed rows."""
    tokens = sample.learned

    def loss_of(model: nn.Module, rows: Rows) -> Tensor:
        loss: Tensor = model(
            input_ids=rows["ids"],
            position_ids=rows["positions"],
            labels=rows["labels"],
            use_cache=False,
            num_items_in_batch=torch.tensor(tokens, device=rows["ids"].device),
        ).loss
        return loss

    return loss_of
