"""One trial call of an objective before a run begins, on a small batch with the columns that its recipe gives.

No weights are read for it: hidden states are random, and the head's weight is zero, in the model's own sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from postlude.data import Batch, pack
from postlude.data.chat import EncodedSequence
from postlude.engine.scale import MetricAccumulator, Scale
from postlude.layout import Layout
from postlude.model import ModelConfig, OutputHead, OutputInputs
from postlude.objectives import Objective
from postlude.ops.linear_logprobs import LogitConfig
from postlude.user_code import UserCodeError, describe_error

ANSWERS = tuple(EncodedSequence([1, 2, 3, 4, *range(5, 5 + length)], [0] * 4 + [1] * length) for length in (3, 2, 1, 3))
"""Small sequences to try an objective on: four tokens that are read, then some that are learned."""


def try_objective(
    objective: Objective, where: str, batch: Batch, config: ModelConfig, dtype: torch.dtype, devices: Sequence[str]
) -> None:
    """Call an objective and its backward on one of `devices`; raise a sentence if it fails on all of them.

    `where` is path/to/file.py:name, or what a built-in objective is called.
    """
    for last, device in enumerate(devices, start=1):
        try:
            _call(objective, batch, config, dtype, device)
        except (Exception, SystemExit) as error:
            if last == len(devices):
                raise UserCodeError(_sentence(error, where, batch)) from error
        else:
            return


def _call(objective: Objective, batch: Batch, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
    (microbatch,) = pack(
        batch.sequences,
        budget=sum(batch.lengths),
        columns=batch.columns,
        groups=batch.groups,
        depths=len(config.pattern.mtp),
    )
    microbatch = microbatch.to(device)
    hidden = torch.randn(len(microbatch), config.hidden_size, dtype=dtype, device=device, requires_grad=True)
    how = LogitConfig(vocab_size=config.vocab_size, logit_scale=config.logit_scale, softcap=config.logit_softcap)
    head = OutputHead(torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype, device=device), how)

    def depths(inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        for ahead in microbatch.mtp_microbatches:
            yield replace(inputs, microbatch=ahead, ahead=None)

    inputs = OutputInputs(
        hidden,
        head,
        microbatch,
        Layout(),
        config,
        reports=defaultdict(lambda: hidden.new_zeros(())),
        ahead=depths if microbatch.mtp_microbatches else None,
    )
    tally = MetricAccumulator(Scale([microbatch]))
    value = tally.evaluate(objective, inputs)
    if tally.refused is not None:
        raise tally.refused
    if value.requires_grad:
        value.backward()


def _sentence(error: BaseException, where: str, batch: Batch) -> str:
    path = where.rpartition(":")[0]
    said = describe_error(error, Path(path).expanduser().absolute()) if path else describe_error(error)
    names = [each for each in batch.columns if each != "routing"]
    listed = "" if all(each in said for each in names) else f" The columns there are {', '.join(names)}."
    return f"the objective {where} failed in its trial call: {said}.{listed} Mend it, and start again."
