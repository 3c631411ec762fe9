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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import hf_storage, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

if TYPE_CHECKING:
    from postlude.engine.engine import Engine

STATE = "state.json"
FORMAT = 1
ENTRIES = ("step", "skipped", "optimizer_start", "optimizer", "layout", "extra", "files")
CRITIC = "model/value_head.weight"
UNWRITTEN = "What was written is not a checkpoint; mend the cause and save again."
Result = TypeVar("Result")


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
    try:
        extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`extra` is kept as JSON, which cannot hold it ({error}); give numbers, strings, lists and dicts."
        ) from error
    if target.exists():
        raise FileExistsError(f"{target} exists already; a checkpoint is written to a new directory.")
    aside = target.parent / f".{target.name}.partial"
    with _telling(f"{target} could not be written", UNWRITTEN):
        _together(lambda: _make_empty(aside) if dist.get_rank() == 0 else None)
    copied = {name: tensor.detach().clone() for name, tensor in tensors_to_save(engine).items()}
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)  # the copies are read by another thread, on another stream
    state = {
        "format": FORMAT,
        "step": engine.step,
        "skipped": engine.skipped,
        "optimizer_start": engine.optimizer_start,
        "optimizer": type(engine.optimizer_config).__name__,
        "layout": str(engine.layout),
        "extra": extra,
    }

    def write() -> None:
        if engine.device.type == "cuda":
            torch.cuda.set_device(engine.device)  # a thread begins on the first GPU
        writer = hf_storage.HuggingFaceStorageWriter(str(aside), save_distributed=True)
        with _telling(f"{target} could not be written", UNWRITTEN):
            state_dict_saver.save(copied, storage_writer=writer, process_group=group)
            _finish(aside, target, state, group)

    return Saving(write)


def load(engine: Engine, directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore everything from a checkpoint of any layout. Returns the caller's `extra`.

    What can be refused is refused before the engine is touched, on every rank alike.
    """
    source = Path(directory).expanduser().resolve()
    state = _on_every_rank(lambda: _read_state(source))[dist.get_rank()]
    _check_files(source, state["files"])
    if state["optimizer"] != type(engine.optimizer_config).__name__:
        raise ValueError(
            f"{source} was saved with {state['optimizer']}, but this engine has "
            f"{type(engine.optimizer_config).__name__}. Give the engine the same optimizer."
        )
    reader = hf_storage.HuggingFaceStorageReader(str(source))
    with _optimizer_at(engine, state["step"] - state["optimizer_start"]):
        wanted = tensors_to_save(engine)
        _check_tensors(source, wanted, reader)
    telling = _telling(f"{source} could not be read", "The engine may hold parts of it; load again.")
    with engine.condition.writing("load"), telling:
        state_dict_loader.load(wanted, storage_reader=reader)
    engine.condition.mended(weights=True)
    engine.zero_grad()
    engine.step, engine.skipped = state["step"], state["skipped"]
    engine.optimizer_start = state["optimizer_start"]
    torch.set_rng_state(wanted["rng/cpu"])
    for parameter in engine.parameters.values():
        if "step" in engine.optimizer.state.get(parameter, {}):
            engine.optimizer.state[parameter]["step"].fill_(engine.step - engine.optimizer_start)
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


@contextmanager
def _optimizer_at(engine: Engine, step: int) -> Iterator[None]:
    """Give the optimizer the state it has after `step` steps, to be overwritten; or what it had if that is refused."""
    before = dict(engine.optimizer.state)
    if not step:
        engine.optimizer.state.clear()
    elif not before:
        _make_optimizer_state(engine)
    try:
        yield
    except BaseException:
        engine.optimizer.state.clear()
        engine.optimizer.state.update(before)
        raise


def _make_optimizer_state(engine: Engine) -> None:
    """Have the optimizer make its state: a step that changes nothing. Gradients that wait for a step keep waiting."""
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    waiting = {name: parameter.grad for name, parameter in engine.parameters.items()}
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    for name, parameter in engine.parameters.items():
        parameter.grad = waiting[name]
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _make_empty(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _finish(aside: Path, target: Path, state: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Each rank sums up its share of the files; the first writes what belongs to the checkpoint and renames it."""
    parts = _together(lambda: _share_of_files(sorted(aside.glob("*.safetensors")), group), group)
    state["files"] = {name: entry for part in parts for name, entry in part.items()}

    def rename() -> None:
        (aside / STATE).write_text(json.dumps(state, indent=2) + "\n")
        aside.rename(target)

    _together(lambda: rename() if dist.get_rank(group) == 0 else None, group)


class _Failure(Exception):
    """What a rank met, as every rank hears of it."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


def _together(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's result. If work fails on one, it fails on all: none is left waiting."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # one that surely pickles, or its words
        failure = error if isinstance(error, OSError | ValueError) else RuntimeError(f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (result, failure), group=group)
    for rank, (_, failed) in enumerate(everyone):
        if failed is not None:
            raise _Failure(rank, failed)
    return [found for found, _ in everyone]


def _on_every_rank(work: Callable[[], Result]) -> list[Result]:
    """`_together`, where a failure is a sentence already and needs no rank."""
    try:
        return _together(work)
    except _Failure as failure:
        raise failure.cause from None


@contextmanager
def _telling(what: str, then: str) -> Iterator[None]:
    """Failures of one rank or more as one sentence that names the first. torch's own are not even `Exception`s."""
    try:
        yield
    except (CheckpointException, _Failure) as error:
        if isinstance(error, _Failure):
            rank, cause = error.rank, error.cause
        else:
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise OSError(f"{what}: rank {rank} met {type(cause).__name__}: {cause}. {then}") from cause


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
        missing = [entry for entry in ENTRIES if entry not in state]
        if found == FORMAT and missing:
            raise ValueError(f"{missing[0]!r} is missing")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source / STATE} cannot be read ({error}); load another checkpoint.") from error
    if found != FORMAT:
        raise ValueError(f"{source} has format {found}, but this version of postlude reads format {FORMAT}.")
    return state


def _check_files(source: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Every rank checks its share, and all hear of what is wrong."""

    def wrong() -> list[str]:
        missing = [name for name in files if not (source / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{source} lacks {', '.join(missing)}; load another checkpoint.")
        added = sorted(path.name for path in source.glob("*.safetensors") if path.name not in files)
        if added:
            raise ValueError(f"{source} holds {', '.join(added)}, which was not saved there. Take it out.")
        sums = _share_of_files([source / name for name in sorted(files)])
        return [name for name, entry in sums.items() if entry != files[name]]

    damaged = [name for part in _on_every_rank(wrong) for name in part]
    if damaged:
        raise ValueError(
            f"{source} is damaged: {', '.join(damaged)} is not what was saved there. Load another checkpoint."
        )


def _check_tensors(source: Path, wanted: Mapping[str, Tensor], reader: hf_storage.HuggingFaceStorageReader) -> None:
    """What all ranks together want is what was saved, no less and no more."""
    entries = reader.read_metadata().state_dict_metadata
    saved = {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    here: dict[str, tuple[int, ...]] = {}
    for part in _together(lambda: {name: tuple(tensor.shape) for name, tensor in wanted.items()}):
        here |= part
    if CRITIC in here and CRITIC not in saved:
        raise ValueError(
            f"{source} was saved without a critic, but this engine has one. Load it with critic=False, or export that "
            "engine and start this one from the export."
        )
    if CRITIC in saved and CRITIC not in here:
        raise ValueError(f"{source} was saved with a critic, but this engine has none. Give the engine critic=True.")
    missing = [name for name in here if name not in saved]
    beyond = [name for name in saved if name not in here]
    if missing:
        raise ValueError(
            f"{source} is of another model: it lacks {len(missing)} tensor(s) of this model and optimizer, such as "
            f"{missing[0]}."
        )
    if beyond:
        raise ValueError(
            f"{source} is of another model: it holds {len(beyond)} tensor(s) this model and optimizer have no place "
            f"for, such as {min(beyond)}."
        )
    for name, shape in here.items():
        if saved[name] != shape:
            raise ValueError(f"{source} is of another model: {name} is {saved[name]} there, but {shape} here.")
