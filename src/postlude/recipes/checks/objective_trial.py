"""The trial call of an objective before a run starts, on a small batch with the columns of its recipe.

No weights are read: hidden states are random and the head's weight is zero, in the sizes of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from postlude.data import Batch, pack
from postlude.data.chat import EncodedSequence
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.pass_metrics import NO_GRADIENT, LossRecord
from postlude.layout import Layout
from postlude.model import ModelConfig, OutputHead, OutputInputs
from postlude.model.parallel import ValueHead
from postlude.objectives import SFT, Objective
from postlude.ops.linear_logprobs import LogitConfig
from postlude.recipes.config.settings import MTPSettings
from postlude.recipes.mtp import MTPLoss
from postlude.user_code import UserCodeError, describe_error

TRIAL_SEQUENCES = tuple(
    EncodedSequence([1, 2, 3, 4, *range(5, 5 + length)], [0] * 4 + [1] * length) for length in (3, 2, 1, 3)
)
"""Small sequences: four prompt tokens, then some tokens to train on."""


def try_objective(
    objective: Objective,
    location: str,
    batch: Batch,
    config: ModelConfig,
    dtype: torch.dtype,
    devices: Sequence[str],
    kind: str = "objective",
    value_head: bool = False,
) -> None:
    """Calls an objective and its backward. Raises if it fails on all of `devices`.

    `location` is path/to/file.py:name, or the name of a built-in objective; messages call it a `kind`. `value_head` is
    whether the model has a value head.
    """
    for last, device in enumerate(devices, start=1):
        try:
            _call(objective, batch, config, dtype, device, value_head)
        except (Exception, SystemExit) as error:
            if last == len(devices):
                raise UserCodeError(_failure(error, kind, location, batch)) from error
        else:
            return


def try_mtp_processor(
    mtp: MTPSettings, batch: Batch, config: ModelConfig, dtype: torch.dtype, devices: Sequence[str]
) -> None:
    """Loads the MTP processor of a config, and tries it at each depth, as `try_objective` does."""
    assert mtp.processor is not None
    objective = MTPLoss(mtp, "tokens")(SFT())
    try_objective(objective, mtp.processor, batch, config, dtype, devices, "MTP processor")


def _call(
    objective: Objective, batch: Batch, config: ModelConfig, dtype: torch.dtype, device: str, value_head: bool
) -> None:
    (microbatch,) = pack(
        batch.sequences,
        budget=sum(batch.lengths),
        columns=batch.columns,
        groups=batch.groups,
        depths=len(config.pattern.mtp),
        temperature=batch.temperature,
    )
    microbatch = microbatch.to(device)
    hidden = torch.randn(len(microbatch), config.hidden_size, dtype=dtype, device=device, requires_grad=True)
    logits = LogitConfig(vocab_size=config.vocab_size, logit_scale=config.logit_scale, softcap=config.logit_softcap)
    values = ValueHead(config.hidden_size).to(device) if value_head else None
    weight = torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    head = OutputHead(weight, logits, value_head=values, temperature=batch.temperature)

    def depths(inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        for depth in microbatch.mtp_microbatches:
            yield replace(inputs, microbatch=depth, mtp=None)

    inputs = OutputInputs(
        hidden,
        head,
        microbatch,
        Layout(),
        config,
        mtp=depths if microbatch.mtp_microbatches else None,
    )
    record = LossRecord(LossNormalizer([microbatch]))
    value = record.evaluate(objective(inputs), microbatch)
    if record.error is not None:
        raise record.error
    if value.requires_grad:
        value.backward()
    elif float(value):
        raise ValueError(NO_GRADIENT)


def _failure(error: BaseException, kind: str, location: str, batch: Batch) -> str:
    path = location.rpartition(":")[0]
    reason = describe_error(error, Path(path).expanduser().absolute()) if path else describe_error(error)
    names = [name for name in batch.columns if name != "routing"]
    listed = "" if all(name in reason for name in names) else f" The columns there are {', '.join(names)}."
    return f"the {kind} {location} failed in its trial call: {reason}.{listed} Fix it, and start again."
