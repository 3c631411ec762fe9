"""Training state on disk: written aside and renamed, checked on load, from any layout to any other. Never pickle.

A checkpoint is a directory of safetensors, each rank's parts in a file of its own, and `state.json`, which says what
belongs to it. torch's distributed checkpoint does the resharding.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import hf_storage, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

if TYPE_CHECKING:
    from postlude.engine.engine import Engine

STATE = "state.json"
FORMAT = 1


class Saving:
    """A checkpoint on its way to disk. `wait` returns when it is there, or raises what went wrong."""

    def __init__(self, work: Any) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="postlude-checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def wait(self) -> None:
        """Until it is written."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def save(
    engine: Engine, directory: str | os.PathLike[str], extra: Mapping[str, Any] | None, group: dist.ProcessGroup
) -> Saving:
    """Take a copy of the state now, and write it in the background, over a `group` of its own."""
    target = Path(directory).expanduser().resolve()
    extra = json.loads(json.dumps(dict(extra or {})))  # refused here and now if it is not JSON
    if target.exists():
        raise FileExistsError(f"{target} exists already; a checkpoint is written to a new directory.")
    aside = target.parent / f".{target.name}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    copied = {name: tensor.detach().clone() for name, tensor in tensors_to_save(engine).items()}
    state = {
        "format": FORMAT,
        "step": engine.step,
        "skipped": engine.skipped,
        "optimizer": type(engine.optimizer_config).__name__,
        "layout": str(engine.layout),
        "extra": extra,
    }

    def write() -> None:
        writer = hf_storage.HuggingFaceStorageWriter(str(aside), save_distributed=True)
        state_dict_saver.save(copied, storage_writer=writer, process_group=group)
        _finish(aside, target, state, group)

    return Saving(write)


def load(engine: Engine, directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore everything from a checkpoint of any layout. Returns the caller's `extra`."""
    source = Path(directory).expanduser().resolve()
    state = _read_state(source)
    _check_files(source, state["files"])
    if state["optimizer"] != type(engine.optimizer_config).__name__:
        raise ValueError(
            f"{source} was saved with {state['optimizer']}, but this engine has "
            f"{type(engine.optimizer_config).__name__}. Give the engine the same optimizer."
        )
    engine.step, engine.skipped = state["step"], state["skipped"]
    if engine.step:
        _make_optimizer_state(engine)
    wanted = tensors_to_save(engine)
    reader = hf_storage.HuggingFaceStorageReader(str(source))
    _check_tensors(source, wanted, reader.read_metadata().state_dict_metadata)
    state_dict_loader.load(wanted, storage_reader=reader)
    torch.set_rng_state(wanted["rng/cpu"])
    for parameter in engine.parameters.values():
        if "step" in engine.optimizer.state.get(parameter, {}):
            engine.optimizer.state[parameter]["step"].fill_(engine.step)
    extra: dict[str, Any] = state["extra"]
    return extra


def tensors_to_save(engine: Engine) -> dict[str, Tensor]:
    """Weights, optimizer state and random state, by names that are the same in every layout."""
    found: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in engine.tensors.items()}
    for name, parameter in engine.parameters.items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and key != "step":
                found[f"optimizer/{key}/{name}"] = value
    found["rng/cpu"] = torch.get_rng_state()
    return found


def _make_optimizer_state(engine: Engine) -> None:
    """Have the optimizer make its state, to be overwritten: a step that changes nothing."""
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.zero_grad()
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _finish(aside: Path, target: Path, state: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Each rank sums up its share of the files; the first writes what belongs to the checkpoint and renames it."""
    sums = _share_of_files(sorted(aside.glob("*.safetensors")), group)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, sums, group=group)
    if dist.get_rank(group) == 0:
        state["files"] = {name: entry for part in everyone for name, entry in part.items()}
        (aside / STATE).write_text(json.dumps(state, indent=2) + "\n")
        aside.rename(target)
    dist.barrier(group)


def _share_of_files(files: list[Path], group: dist.ProcessGroup | None = None) -> dict[str, dict[str, int]]:
    own = files[dist.get_rank(group) :: dist.get_world_size(group)]
    return {path.name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in own}


def _crc32(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            total = zlib.crc32(chunk, total)
    return total


def _read_state(source: Path) -> dict[str, Any]:
    if not (source / STATE).is_file():
        raise FileNotFoundError(f"{source} has no {STATE}, so it is not a checkpoint, or not a complete one.")
    try:
        state: dict[str, Any] = json.loads((source / STATE).read_text())
        found = state["format"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{source / STATE} cannot be read ({error}); load another checkpoint.") from error
    if found != FORMAT:
        raise ValueError(f"{source} has format {found}, but this version of postlude reads format {FORMAT}.")
    return state


def _check_files(source: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Every rank checks its share, and all hear of what is wrong."""
    missing = [name for name in files if not (source / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{source} lacks {', '.join(missing)}; load another checkpoint.")
    sums = _share_of_files([source / name for name in sorted(files)])
    wrong = [name for name, entry in sums.items() if entry != files[name]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    damaged = [name for part in everyone for name in part]
    if damaged:
        raise ValueError(
            f"{source} is damaged: {', '.join(damaged)} is not what was saved there. Load another checkpoint."
        )


def _check_tensors(source: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} tensor(s) of this model and optimizer, such as {missing[0]}.")
    for name, tensor in wanted.items():
        entry = saved[name]
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise ValueError(
                f"{name} is {tuple(entry.size)} in {source}, but {tuple(tensor.shape)} in this model: another model's."
            )
