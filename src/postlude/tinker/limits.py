"""Limits: how much a server holds for its clients, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one server."""

    body_bytes: int = 64 * MIB
    """The largest request, also after decompression."""
    json_bytes: int = 16 * MIB
    """The largest request in JSON, which is read in one go."""
    body_seconds: float = 300.0
    """How long a request may take to arrive."""
    queued_bytes: int = 1024 * MIB
    """Training requests that wait, of all clients."""
    queued_bytes_per_key: int = 512 * MIB
    """Those of one key."""
    queued_per_model: int = 1024
    """Training requests of one model that wait."""
    samples_per_key: int = 4096
    """Sampling requests of one key that are not finished; beyond it a client gets 429 and waits."""
    models: int = 64
    """Models that are trained at the same time."""
    models_per_key: int = 64
    """Models among them of one key."""
    full_models: int = 1
    """Models among them of which all weights are trained; 0 allows adapters only."""
    full_snapshots: int = 4
    """Samplers of all weights of such models, of those that were not saved with a name: each is a copy on disk."""
    samplers: int = 64
    """Samplers in memory. The one unused for longest is closed; one of a saved path is opened again when it is used."""
    sessions_per_key: int = 1024
    """Open sessions of one key, and finished ones that are kept."""
    finished_seconds: float = 7 * 24 * 3600.0
    """How long a finished session is kept, and its models without checkpoints."""
    num_samples: int = 1024
    """Completions of one sampling request."""
    result_bytes: int = 1024 * MIB
    """Results that clients have not fetched, or fetched a short time ago."""
    poll_seconds: float = 30.0
    """How long `retrieve_future` waits for a result. The client gives up after 45 seconds."""
    fetched_seconds: float = 300.0
    """How long a result is kept after it was fetched: the reply may have been lost, and the client asks again."""
    unfetched_seconds: float = 3600.0
    """How long a result is kept that the client does not fetch."""
    session_seconds: float = 1800.0
    """A session without a heartbeat for this long has expired, and its models are freed."""
    gap_seconds: float = 600.0
    """How long a training request waits for an earlier one that has not arrived."""
