"""Records: lists and descriptions of runs, checkpoints, sessions and samplers, and what may be changed of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from postlude.serving.http.errors import HTTPError
from postlude.tinker import bodies
from postlude.tinker.futures import JSON
from postlude.tinker.paths import CHECKPOINT_TYPES, TinkerPath
from postlude.tinker.service import TinkerService
from postlude.tinker.state import Checkpoint, Run

MAX_PAGE = 1000
LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()  # an older state directory may have a later time
Item = TypeVar("Item")


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, LATEST), UTC).isoformat()


def page(items: Sequence[Item], limit: int, offset: int) -> tuple[Sequence[Item], JSON]:
    """Returns one page of a list, and its cursor."""
    limit, offset = min(max(limit, 0), MAX_PAGE), max(offset, 0)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


class Records:
    """What one server has recorded. Each key sees its own, and checkpoints that are public."""

    def __init__(self, service: TinkerService) -> None:
        self._service, self._state = service, service.state

    def capabilities(self) -> JSON:
        models = [
            {
                "model_name": info.name,
                "max_context_length": info.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for info in self._service.bases.values()
        ]
        return {"supported_models": models}

    def weights_info(self, owner: str, body: bodies.PathBody) -> JSON:
        """Returns what a model needs to load a checkpoint."""
        spec = self._service.checkpoint(owner, TinkerPath.parse(body.tinker_path)).spec
        info = {"base_model": spec.base_model, "is_lora": spec.lora is not None, "optimizer_config": {"type": "adamw"}}
        if spec.lora is not None:
            parts = ("train_unembed", "train_mlp", "train_attn")
            info |= {"lora_rank": spec.lora.rank} | {name: getattr(spec.lora, name) for name in parts}
        return info

    def training_runs(self, owner: str, limit: int, offset: int) -> JSON:
        """Returns a page of a key's runs, newest first."""
        runs = [run for run in self._state.runs.values() if run.owner == owner]
        runs.sort(key=lambda run: run.created, reverse=True)
        chosen, cursor = page(runs, limit, offset)
        return {"training_runs": [self._run(run) for run in chosen], "cursor": cursor}

    def training_run(self, owner: str, run_id: str) -> JSON:
        run = self._state.runs.get(run_id)
        if run is None or run.owner != owner:
            raise HTTPError(404, f"there is no training run {run_id[:80]!r}.")
        return self._run(run)

    def _run(self, run: Run) -> JSON:
        checkpoints = self._of_run(run.run_id)
        states = [checkpoint for checkpoint in checkpoints if checkpoint.path.kind == "weights"]
        samplers = [checkpoint for checkpoint in checkpoints if checkpoint.path.kind == "sampler_weights"]
        lora = run.spec.lora
        return {
            "training_run_id": run.run_id,
            "base_model": run.spec.base_model,
            "model_owner": run.owner,
            "is_lora": lora is not None,
            "lora_rank": lora.rank if lora is not None else None,
            "corrupted": False,
            "last_request_time": time_text(run.last_request),
            "last_checkpoint": self._checkpoint(states[-1]) if states else None,
            "last_sampler_checkpoint": self._checkpoint(samplers[-1]) if samplers else None,
            "user_metadata": {name: str(value) for name, value in run.user_metadata.items()} or None,
        }

    def _of_run(self, run_id: str) -> list[Checkpoint]:
        return self._saved(lambda checkpoint: checkpoint.path.run_id == run_id)

    def _saved(self, matches: Callable[[Checkpoint], bool]) -> list[Checkpoint]:
        """Returns the checkpoints that match and have not expired, oldest first."""
        checkpoints = [checkpoint for checkpoint in self._state.checkpoints.values() if matches(checkpoint)]
        return sorted((c for c in checkpoints if not c.is_expired()), key=lambda checkpoint: checkpoint.created)

    def _checkpoint(self, checkpoint: Checkpoint) -> JSON:
        return {
            "checkpoint_id": checkpoint.path.checkpoint_id,
            "checkpoint_type": CHECKPOINT_TYPES[checkpoint.path.kind],
            "time": time_text(checkpoint.created),
            "tinker_path": str(checkpoint.path),
            "size_bytes": checkpoint.size,
            "public": checkpoint.public,
            "expires_at": time_text(checkpoint.expires) if checkpoint.expires is not None else None,
            "user_metadata": checkpoint.user_metadata or None,
        }

    def checkpoints_of_run(self, owner: str, run_id: str) -> JSON:
        self.training_run(owner, run_id)
        return {"checkpoints": [self._checkpoint(checkpoint) for checkpoint in self._of_run(run_id)]}

    def checkpoints(self, owner: str, limit: int, offset: int) -> JSON:
        """Returns a page of a key's checkpoints, newest first."""
        owned = self._saved(lambda checkpoint: checkpoint.owner == owner)
        listed, cursor = page(owned[::-1], limit, offset)
        return {"checkpoints": [self._checkpoint(checkpoint) for checkpoint in listed], "cursor": cursor}

    def owned_checkpoint(self, owner: str, path: TinkerPath) -> Checkpoint:
        """Returns a checkpoint of this key; one of another key may be read if it is public, but not changed."""
        checkpoint = self._service.checkpoint(owner, path)
        if checkpoint.owner != owner:
            raise HTTPError(403, f"{path} is public but of another key; it cannot be changed.")
        return checkpoint

    async def delete(self, owner: str, path: TinkerPath) -> None:
        self.owned_checkpoint(owner, path)
        await self._service.delete(path)

    async def set_public(self, owner: str, path: TinkerPath, *, public: bool) -> None:
        """Lets every key read a checkpoint, or not."""
        await self._service.save(replace(self.owned_checkpoint(owner, path), public=public))

    async def set_ttl(self, owner: str, path: TinkerPath, seconds: int | None) -> None:
        """Sets when a checkpoint expires, counted from now."""
        expires = time.time() + seconds if seconds is not None else None
        await self._service.save(replace(self.owned_checkpoint(owner, path), expires=expires))

    def sampler(self, owner: str, sampler_id: str) -> JSON:
        record = self._service.sampler(owner, sampler_id).record
        return {"sampler_id": sampler_id, "base_model": record.base_model, "model_path": record.path}

    def sessions(self, owner: str, limit: int, offset: int) -> JSON:
        """Returns a page of the ids of a key's sessions, newest first."""
        sessions = [session for session in self._state.sessions.values() if session.owner == owner]
        sessions.sort(key=lambda session: session.created, reverse=True)
        return {"sessions": [session.session_id for session in page(sessions, limit, offset)[0]]}

    def session(self, owner: str, session_id: str) -> JSON:
        record = self._service.session_record(owner, session_id)
        return {
            "training_run_ids": [run.run_id for run in self._state.runs.values() if run.session_id == session_id],
            "sampler_ids": [sampler.sampler_id for sampler in record.samplers],
            "user_metadata": record.user_metadata or None,
            "display_name": record.display_name,
        }
