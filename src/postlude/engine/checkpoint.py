"""Training state on disk: written to a temporary directory and renamed, checked on load. Never pickle.

A checkpoint is a directory of safetensors files, one per rank with its shards, and `state.json`, which has their index
(`sharded_tensors.py`). Any layout loads it. With its config.json, and the tokenizer if one was given, it can be loaded
as a model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postlude.engine.failure_state import FailureState
from postlude.engine.optimizers import optimizer_kind, state_shard
from postlude.engine.streaming import DistributedModel, is_owner
from postlude.hf.tensor_sources import MODEL
from postlude.model.parallel import local_shard, region
from postlude.model.recast import RecastPlan
from postlude.optimizer import OptimizerConfig
from postlude.options import WeightStorage
from postlude.sharded_tensors import (
    FORMAT,
    STATE,
    CheckpointIndex,
    ShardReader,
    StagingBuffers,
    TensorShard,
    damaged_files,
    merge_indexes,
    read_state,
)
from postlude.world.agreement import RankFailure, gather_and_decide, on_rank0

ENTRIES = ("step", "skipped", "optimizer_start", "optimizer", "layout", "extra", "files", "tensors")
OPTIMIZER = "optimizer/"  # prefix of optimizer states, as MODEL is of tensors
CRITIC = f"{MODEL}value_head.weight"
RANDOM = "rng/"  # prefix of a kind of generator; a rank's number follows, except rank 0's
UNWRITTEN = "What was written is not a checkpoint; fix the cause and save again."


class TrainingState(DistributedModel, Protocol):
    """What a checkpoint saves: a model, its optimizer, and its step counts."""

    step: int
    skipped: int
    optimizer_start_step: int
    """The step at which the optimizer was built."""
    steps_without_gradients: int
    """Steps of the optimizer in which no parameter had a gradient: they count in `step`, but changed nothing."""
    late_start_steps: dict[str, int]
    """By parameter whose moments started later than the optimizer: the step then, less `steps_without_gradients`."""
    optimizer_config: OptimizerConfig
    weights: WeightStorage
    failure_state: FailureState

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its state is saved."""
        ...

    @property
    def trained_tensors(self) -> Mapping[str, Tensor]:
        """This rank's tensors that training may change, by their global names: all others are not saved."""
        ...

    def base_fingerprint(self) -> str | None:
        """Returns a digest of the tensors that are not saved; None if all are. Every rank calls it."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's trained parameters by their global names."""
        ...

    def zero_grad(self) -> None:
        """Frees the gradients."""
        ...


class CheckpointWriter:
    """Writes one checkpoint at a time, in the background: over its own group, from host memory that it reuses."""

    def __init__(self) -> None:
        self._staging = StagingBuffers()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        trained: TrainingState,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
        write_model_files: Callable[[Path], None],
    ) -> None:
        """Copies the state to host memory, and starts to write it. `write_model_files` writes the model's config."""
        self.finish()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        write = _prepare_save(trained, directory, extra, self._group, self._staging, write_model_files)

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="postlude-checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Waits until the checkpoint is written. Raises what went wrong."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _prepare_save(
    trained: TrainingState,
    directory: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    staging: StagingBuffers,
    write_model_files: Callable[[Path], None],
) -> Callable[[], None]:
    """Copies the state into `staging`. Returns the function that writes it."""
    target = Path(directory).expanduser().resolve()
    partial = target.parent / f".{target.name}.partial"
    try:
        extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`extra` is kept as JSON, which cannot hold it ({error}); give numbers, strings, lists and dicts."
        ) from error

    def prepare() -> bool:
        if target.exists():
            return False
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_model_files(partial)
        return True

    with _as_os_error(f"{target} could not be written", UNWRITTEN):
        if not gather_and_decide(lambda: None, lambda _: prepare(), group):
            raise FileExistsError(f"{target} exists already; a checkpoint is written to a new directory.")
    staged = staging.take(shards_to_save(trained))
    state = {
        "format": FORMAT,
        "base": trained.base_fingerprint(),
        "step": trained.step,
        "skipped": trained.skipped,
        "optimizer_start": trained.optimizer_start_step,
        "optimizer": optimizer_kind(trained.optimizer_config, trained.weights),
        "idle": trained.steps_without_gradients,
        "began_later": trained.late_start_steps,
        "layout": str(trained.mesh.layout),
        "extra": extra,
    }

    def finish(indexes: list[CheckpointIndex]) -> None:
        entries = (state | merge_indexes(indexes)).items()
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
        (partial / STATE).write_text(f"{{\n{lines}\n}}\n")
        partial.rename(target)

    def write() -> None:
        with _as_os_error(f"{target} could not be written", UNWRITTEN):
            file = partial / f"part-{dist.get_rank(group):05d}.safetensors"
            gather_and_decide(lambda: staged.write(file), finish, group)

    return write


def load(trained: TrainingState, directory: str | os.PathLike[str], recast: RecastPlan | None = None) -> dict[str, Any]:
    """Restores everything from a checkpoint of any layout. Returns the caller's `extra`.

    What can be refused is refused on every rank before anything changes. Rank 0 reads the index and broadcasts it; each
    rank opens only the files that have shards it needs. `recast` maps the tensors of a checkpoint of another pattern:
    tensors that it lacks keep their values, and their moments start from zero.
    """
    source = Path(directory).expanduser().resolve()
    state = on_rank0(lambda: read_state(source, ENTRIES))
    _check_files(source, state["files"])
    if state["optimizer"] != (present := optimizer_kind(trained.optimizer_config, trained.weights)):
        raise ValueError(
            f"{source} was saved with {state['optimizer']}, but this engine has {present}. Give the engine the same "
            "optimizer, and the same weights."
        )
    _check_base(source, state.get("base"), trained.base_fingerprint())
    saved = _SavedTensors(state, recast)
    random_states = _random_states(trained)
    with _optimizer_state(trained, saved=saved.has_optimizer_state):
        shards = _all_shards(trained)
        wanted = {saved.name(name): shard for name, (shard, _) in shards.items() if saved.has(name)}
        for kind, values in random_states.items():
            if name := saved.random_state(kind):
                wanted[name] = _shard(values)
        _check_tensors(source, wanted, state["tensors"], saved.optional)
    reader = ShardReader(source, state)
    with (
        trained.failure_state.guard_write("load"),
        _as_os_error(f"{source} could not be read", "The engine may hold parts of it; load again."),
    ):
        gather_and_decide(lambda: reader.read_into(wanted), lambda _: None)
    for name, (shard, _) in shards.items():
        if name.startswith(OPTIMIZER) and not saved.has(name):
            shard.values.zero_()
    trained.failure_state.recovered(weights=True)
    trained.zero_grad()
    trained.step, trained.skipped = state["step"], state["skipped"]
    trained.optimizer_start_step, trained.late_start_steps = state["optimizer_start"], saved.late_start_steps()
    trained.steps_without_gradients = saved.steps_without_gradients
    torch.set_rng_state(random_states["cpu"])
    if "cuda" in random_states:
        torch.cuda.set_rng_state(random_states["cuda"])
    for name, parameter in trained.parameters.items():
        if "step" in trained.optimizer.state.get(parameter, {}):
            began = trained.late_start_steps.get(name, trained.optimizer_start_step)
            trained.optimizer.state[parameter]["step"].fill_(trained.step - trained.steps_without_gradients - began)
    extra: dict[str, Any] = state["extra"]
    return extra


def _check_base(source: Path, saved: str | None, present: str | None) -> None:
    """Raises ValueError unless a checkpoint has what this engine trains: adapters of the same model, or a model."""
    if saved is not None and present is None:
        raise ValueError(
            f"{source} holds LoRA adapters only, but this engine trains all weights. Give it the same lora."
        )
    if saved is None and present is not None:
        raise ValueError(
            f"{source} holds a whole model, but this engine trains LoRA adapters. Export it and start from the export."
        )
    if saved != present:
        raise ValueError(
            f"{source} holds adapters of another base model: its weights have the fingerprint {saved}, and this "
            f"model's {present}. Start from the model that the adapters were trained on."
        )


class _SavedTensors:
    """The tensors of a checkpoint, by the names of an engine whose pattern may be another."""

    def __init__(self, state: Mapping[str, Any], recast: RecastPlan | None) -> None:
        self.state, self.recast = state, recast
        self.new_tensors = frozenset(() if recast is None else recast.new_tensors)

    def name(self, ours: str) -> str:
        """Returns a tensor's name in the checkpoint."""
        prefix, _, tensor = ours.rpartition("/")
        return ours if self.recast is None else f"{prefix}/{self.recast.kept.get(tensor, tensor)}"

    def has(self, ours: str) -> bool:
        """Returns whether a tensor is read. Moments may be missing: those of what was not trained then."""
        if self.recast is None:
            return True
        if ours.rpartition("/")[2] in self.new_tensors:
            return False
        return not ours.startswith(OPTIMIZER) or self.name(ours) in self.state["tensors"]

    def random_state(self, kind: str) -> str:
        """Returns the name of a generator's state: this rank's, else rank 0's; "" if there is none."""
        names = (f"{RANDOM}{kind}/{dist.get_rank()}", f"{RANDOM}{kind}")
        return next((name for name in names if name in self.state["tensors"]), "")

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the optimizer had made its state: it does so when it first meets gradients."""
        return any(name.startswith(OPTIMIZER) for name in self.state["tensors"])

    @property
    def steps_without_gradients(self) -> int:
        """Steps that changed nothing."""
        return int(self.state.get("idle", 0))

    @property
    def optional(self) -> frozenset[str]:
        """Tensors that may stay unread: random states, dropped tensors, and moments of what is not trained."""
        names = self.state["tensors"]
        random = frozenset(name for name in names if name.startswith(RANDOM))
        if self.recast is None:
            return random
        dropped = {f"{MODEL}{name}" for name in self.recast.dropped}
        return random | frozenset(name for name in names if name.startswith(OPTIMIZER) or name in dropped)

    def late_start_steps(self) -> dict[str, int]:
        """Returns the parameters whose moments began later than the others': the saved ones, and now those without."""
        earlier: Mapping[str, int] = self.state.get("began_later", {})
        if self.recast is None:
            return dict(earlier)
        moments = {name.rpartition("/")[2] for name in self.state["tensors"] if name.startswith(OPTIMIZER)}
        if not moments:  # nothing has begun
            return {}
        kept = self.recast.kept
        now = {ours: earlier[then] for ours, then in kept.items() if then in earlier}
        lacking = [ours for ours, then in kept.items() if then not in moments]
        return now | dict.fromkeys(
            (*self.recast.new_tensors, *lacking), self.state["step"] - self.steps_without_gradients
        )


def check_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Raises OSError or ValueError unless a checkpoint is complete and every byte is what was saved.

    It reads all of it, in this process, and needs no engine.
    """
    source = Path(directory).expanduser().resolve()
    state = read_state(source, ENTRIES)
    _refuse_damaged(source, damaged_files(source, state["files"]))
    for name, entry in state["tensors"].items():
        if sum(math.prod(size) for _, _, size in entry["parts"]) != math.prod(entry["shape"]):
            raise ValueError(f"{source} does not hold all of {name}; load another checkpoint.")


def shards_to_save(trained: TrainingState) -> dict[str, TensorShard]:
    """Returns what this rank, of all that hold the same, writes."""
    shards = {
        name: shard
        for name, (shard, like) in _all_shards(trained).items()
        if shard.values.numel() and is_owner(name.rsplit("/", 1)[1], like, trained.mesh, trained.shared_parameters)
    }
    suffix = f"/{rank}" if (rank := dist.get_rank()) else ""
    return shards | {f"{RANDOM}{kind}{suffix}": _shard(values) for kind, values in _random_states(trained).items()}


def _random_states(trained: TrainingState) -> dict[str, Tensor]:
    """Returns the state of each of this rank's random generators, by kind."""
    states = {"cpu": torch.get_rng_state()}
    if trained.mesh.device_type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _all_shards(trained: TrainingState) -> dict[str, tuple[TensorShard, Tensor]]:
    """Returns this rank's weights and optimizer state, by names that are the same in every layout.

    Each comes with the tensor that it is sharded like. Waits for copies of state in host memory.
    """
    if trained.mesh.device_type == "cuda":
        torch.cuda.synchronize()
    shards = {f"{MODEL}{name}": (_shard(tensor), tensor) for name, tensor in trained.trained_tensors.items()}
    for name, parameter in trained.parameters.items():
        for key, value in trained.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and key != "step":
                shards[f"{OPTIMIZER}{key}/{name}"] = state_shard(value, parameter), parameter
    return shards


def _shard(tensor: Tensor) -> TensorShard:
    return TensorShard(local_shard(tensor), tuple(where.start for where in region(tensor)), tuple(tensor.shape))


@contextmanager
def _optimizer_state(trained: TrainingState, *, saved: bool) -> Iterator[None]:
    """Gives the optimizer a state to overwrite, if one was saved; restores the old one if the block raises."""
    before = dict(trained.optimizer.state)
    if not saved:
        trained.optimizer.state.clear()
    elif not before:
        _make_optimizer_state(trained)
    try:
        yield
    except BaseException:
        trained.optimizer.state.clear()
        trained.optimizer.state.update(before)
        raise


def _make_optimizer_state(trained: TrainingState) -> None:
    """Makes the optimizer create its state, by a step that changes nothing. Present gradients are kept."""
    rates = [group["lr"] for group in trained.optimizer.param_groups]
    gradients = {name: parameter.grad for name, parameter in trained.parameters.items()}
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trained.optimizer.step()
    for name, parameter in trained.parameters.items():
        parameter.grad = gradients[name]
    for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _as_os_error(problem: str, fix: str) -> Iterator[None]:
    """Turns the failure of a rank into one OSError that names the rank."""
    try:
        yield
    except RankFailure as failure:
        cause = failure.cause
        raise OSError(f"{problem}: rank {failure.rank} met {type(cause).__name__}: {cause}. {fix}") from cause


def _check_files(source: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Every rank checks its share of the files, and all raise if one is damaged."""

    def damaged() -> list[str]:
        names = sorted(files)[dist.get_rank() :: dist.get_world_size()]
        return damaged_files(source, {name: files[name] for name in names})

    def refuse(names_by_rank: list[list[str]]) -> None:
        _refuse_damaged(source, [name for names in names_by_rank for name in names])

    gather_and_decide(damaged, refuse, raise_cause=True)


def _refuse_damaged(source: Path, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{source} is damaged: {', '.join(names)} is not what was saved there. Load another checkpoint."
        )


def _check_tensors(
    source: Path, wanted: Mapping[str, TensorShard], saved: Mapping[str, Any], optional: Container[str]
) -> None:
    """Checks that all ranks together want exactly what was saved, except for `optional` tensors.

    Each rank sends a short comparison.
    """
    numbers = {name: number for number, name in enumerate(saved)}

    def compare() -> tuple[int, list[str], list[str]]:
        used = sum(1 << numbers[name] for name in wanted if name in numbers)
        missing = [name for name in wanted if name not in numbers]
        shapes = [
            f"{name} is {tuple(saved[name]['shape'])} there, but {shard.shape} here"
            for name, shard in wanted.items()
            if name in saved and tuple(saved[name]["shape"]) != shard.shape
        ]
        return used, missing, shapes[:1]

    def decide(comparisons: list[tuple[int, list[str], list[str]]]) -> None:
        used_by_any = 0
        for used, _, _ in comparisons:
            used_by_any |= used
        missing = list(dict.fromkeys(name for _, names, _ in comparisons for name in names))
        unused = [name for name, number in numbers.items() if not used_by_any >> number & 1 and name not in optional]
        _refuse_other_model(source, missing, unused, [shape for _, _, shapes in comparisons for shape in shapes])

    gather_and_decide(compare, decide, raise_cause=True)


def _refuse_other_model(source: Path, missing: list[str], unused: list[str], shapes: list[str]) -> None:
    if CRITIC in missing:
        raise ValueError(
            f"{source} was saved without a critic, but this engine has one. Load it with critic=False, or export that "
            "engine and start this one from the export."
        )
    if CRITIC in unused:
        raise ValueError(f"{source} was saved with a critic, but this engine has none. Give the engine critic=True.")
    if missing:
        raise ValueError(
            f"{source} is of another model: it lacks {len(missing)} tensor(s) of this model and optimizer, such as "
            f"{missing[0]}."
        )
    if unused:
        raise ValueError(
            f"{source} is of another model: it holds {len(unused)} tensor(s) this model and optimizer have no place "
            f"for, such as {min(unused)}."
        )
    if shapes:
        raise ValueError(f"{source} is of another model: {shapes[0]}.")
