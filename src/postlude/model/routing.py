"""Checks of given routing: the experts to which a batch's tokens are sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from postlude.data.microbatch import ROUTING

Routers = Mapping[str, tuple[int, int]]
"""`ModelConfig.routers`: (top_k, experts) by block."""


def check_routing(routing: Tensor, routers: Routers) -> None:
    """Raises ValueError for a dtype or shape [T, ...] that does not fit these routers."""
    if not routers:
        raise ValueError(
            f'the batch has a column "{ROUTING}", which gives the experts of each token, but this model has no router. '
            "Leave it out, or give it another name."
        )
    blocks, top_k = len(routers), max(top_k for top_k, _ in routers.values())
    if routing.ndim != 3 or tuple(routing.shape[1:]) != (blocks, top_k):
        raise ValueError(
            f'column "{ROUTING}" has shape {tuple(routing.shape[1:])} per token, but the model sends a token to '
            f"{top_k} experts in each of {blocks} blocks. Give [length, {blocks}, {top_k}], with -1 for "
            "tokens whose experts the router is to choose."
        )
    if routing.is_floating_point() or routing.is_complex() or routing.dtype == torch.bool:
        raise ValueError(f'column "{ROUTING}" holds {routing.dtype}, but experts have numbers. Give torch.int16.')


def check_experts(routing: Tensor, routers: Routers) -> None:
    """Raises ValueError for expert numbers, [T, routers, top_k] on the host, that do not exist."""
    check_routing(routing, routers)
    for index, (name, (_, experts)) in enumerate(routers.items()):
        ids = routing[:, index]
        if ids.numel() and not -1 <= (worst := int(ids.min() if ids.min() < -1 else ids.max())) < experts:
            raise ValueError(
                f'column "{ROUTING}" sends a token to expert {worst} of {name}, whose experts are numbered from 0 to '
                f"{experts - 1}. Give one of them, or -1 where the router is to choose."
            )
