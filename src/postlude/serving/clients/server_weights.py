"""The weights of servers: `WeightsVersion`, which they are given, and `ServerWeights`, what one of them has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from postlude.generate.probe import Probe, ProbeResult
from postlude.hf.tensor_sources import checksum
from postlude.serving.weights.delta import WeightPieces


@dataclass(frozen=True)
class WeightsVersion:
    """A version of the weights, and a directory that every server can read; None if they are sent over the network."""

    directory: str | None
    version: str
    probe: Probe | None = field(default=None, compare=False, repr=False)
    """Compares the log-probs of servers that were given them with the trainer's."""
    adapter_directory: str | None = None
    """The directory of an adapter, as peft writes it. `directory` then has the frozen model, which never changes."""
    adapter_name: str | None = None
    """The name of the adapter at servers, which requests give as the model."""
    pieces: WeightPieces | None = field(default=None, compare=False, repr=False)
    """The weights in pieces, which servers get in place of whole files; None if they read those."""
    _checksums: list[asyncio.Task[str]] = field(default_factory=list, compare=False, repr=False)
    """Empty until `checksum` is called, then one task."""

    def checksum(self) -> asyncio.Task[str]:
        """Returns the task that computes the checksum of the files. It runs once for all servers."""
        assert self.directory is not None
        if not self._checksums:
            self._checksums.append(asyncio.create_task(asyncio.to_thread(checksum, Path(self.directory))))
        return self._checksums[0]


@dataclass
class ServerWeights:
    """The weights that a server has, and how it got them."""

    version: str | None = None
    """As it reported last."""
    unconfirmed: bool = False
    """Whether an update began and was not confirmed: it may hold some new weights, and be paused."""
    reading_directory: str | None = None
    """The directory that it reads weights from now."""
    base_directory: str | None = None
    """The directory of the frozen model's weights that it has loaded; None without adapters."""
    default_adapter: str | None = None
    """The adapter that requests use if they name none."""
    sees_directory: bool = True
    """Whether it may see the directory of weights in pieces; false once it did not."""
    all_pieces_sent: bool = False
    """Whether the last update in pieces sent all weights, not only the changes."""
    reload_seconds: float = 0.0
    probe_result: ProbeResult | None = None
    """The comparison of its log-probs with the trainer's after its last weight update."""
    differing_version: str | None = None
    """The version for which its log-probs differed from the trainer's. The same weights are sent a second time."""
