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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.durable_files import publish
from postlude.engine.adapters import DEFAULT, AdaptedModel, add_adapter_configs, discard_adapter
from postlude.engine.checkpoint_checks import check_adapter, check_base, check_files, check_tensors, refuse_damaged
from postlude.engine.optimizers import state_shard
from postlude.engine.streaming import is_owner
from postlude.engine.training_state import TrainingState
from postlude.hf.tensor_sources import LOW_BITS, MODEL
from postlude.lora import AdapterConfig
from postlude.model.parallel import local_shard, region
from postlude.model.recast import RecastPlan
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
ADAPTERS = "adapters/"  # prefix of all that belongs to an adapter; its name follows
RANDOM = "rng/"  # prefix of a kind of generator; a rank's number follows, except rank 0's
UNWRITTEN = "What was written is not a checkpoint; fix the cause and save again."


def saved_training_states(trained: AdaptedModel) -> dict[str, TrainingState]:
    """Returns the training states of a checkpoint: of all adapters by name; "" is the default one, or all weights."""
    named = {name: trained.training_states[name] for name in trained.adapters.names if name != DEFAULT}
    return {"": trained.training_states.get(DEFAULT) or trained.training_states[None], **named}


def _prefix(name: str) -> str:
    return f"{ADAPTERS}{name}/" if name else ""


class CheckpointWriter:
    """Writes one checkpoint at a time, in a background thread with its own group and reused host memory."""

    def __init__(self) -> None:
        self._staging = StagingBuffers()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        trained: AdaptedModel,
        directory: str | os.PathLike[str],
        extra: Mapping[str, Any] | None,
        write_model_files: Callable[[Path], None] = lambda directory: None,
        *,
        adapter: TrainingState | None = None,
    ) -> None:
        """Copies the state to host memory, and starts to write it. `write_model_files` writes the model's config.

        With an `adapter`, its state alone is saved, without the states of random generators.
        """
        self.finish()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        training_states = saved_training_states(trained) if adapter is None else {"": adapter}
        shards = shards_to_save(trained, training_states)
        if adapter is None:
            shards |= _random_shards(trained)
        state = _describe(trained, training_states, extra)
        write = _prepare_save(shards, state, directory, self._group, self._staging, write_model_files)

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="postlude-checkpoint")
        self._thread.start()

    def close(self) -> None:
        """Destroys its group. Every rank calls it, after `finish`."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None

    def finish(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _prepare_save(
    shards: Mapping[str, TensorShard],
    state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    group: dist.ProcessGroup,
    staging: StagingBuffers,
    write_model_files: Callable[[Path], None],
) -> Callable[[], None]:
    target = Path(directory).expanduser().resolve()
    partial = target.parent / f".{target.name}.partial"

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
    staged = staging.take(shards)

    def finish(indexes: list[CheckpointIndex]) -> None:
        entries = {**state, **merge_indexes(indexes)}.items()
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
        (partial / STATE).write_text(f"{{\n{lines}\n}}\n")
        publish(partial, target)

    def write() -> None:
        with _as_os_error(f"{target} could not be written", UNWRITTEN):
            file = partial / f"part-{dist.get_rank(group):05d}.safetensors"
            gather_and_decide(lambda: staged.write(file), finish, group)

    return write


def _describe(
    trained: AdaptedModel, training_states: Mapping[str, TrainingState], extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the entries of state.json besides the index."""
    try:
        extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`extra` is kept as JSON, which cannot hold it ({error}); give numbers, strings, lists and dicts."
        ) from error
    entries = {
        name: {
            "step": training_state.step,
            "skipped": training_state.skipped,
            "optimizer_start": training_state.optimizer_start_step,
            "optimizer": training_state.optimizer_kind,
            "steps_without_gradients": training_state.steps_without_gradients,
            "late_start_steps": training_state.late_start_steps,
            "adapter": {layer: astuple(config) for layer, config in training_state.adapters.items()},
        }
        for name, training_state in training_states.items()
    }
    state = {"format": FORMAT, "base": trained.base_fingerprint(), **entries.pop("")}
    return {**state, "layout": str(trained.mesh.layout), "extra": extra, "adapters": entries}


def load(
    trained: AdaptedModel,
    directory: str | os.PathLike[str],
    recast: RecastPlan | None = None,
    *,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Restores everything from a checkpoint of any layout. Returns the caller's `extra`.

    What can be refused is refused on every rank before anything changes. Rank 0 reads the index and broadcasts it; each
    rank opens only the files that have shards it needs. `recast` maps the tensors of a checkpoint of another pattern:
    tensors that it lacks keep their values, and their moments start from zero. Adapters that the engine lacks are made.
    With an `adapter`, the state of one is read into it, and random generators keep their states.
    """
    source = Path(directory).expanduser().resolve()
    state = on_rank0(lambda: read_state(source, ENTRIES))
    check_files(source, state["files"])
    check_base(source, state["base"], trained.base_fingerprint())
    random_states = {} if adapter is not None else _random_states(trained)
    with _adapters_of(trained, source, state, adapter, same_layers=recast is None) as loaded, ExitStack() as stack:
        saved_parts = [_SavedTrainingState(state, *named_state, recast) for named_state in loaded.items()]
        shards, optional = dict[str, TensorShard](), frozenset[str]()
        for saved in saved_parts:
            saved.check_optimizer(source)
            stack.enter_context(_optimizer_state(saved.training_state, saved=saved.has_optimizer_state))
            saved.shards = _all_shards(trained, saved.training_state)
            shards |= {saved.name(name): shard for name, (shard, _) in saved.shards.items() if saved.has(name)}
            optional |= saved.optional
        for kind, values in random_states.items():
            if name := _random_state_name(state, kind):
                shards[name] = _shard(values)
        optional |= frozenset(name for name in state["tensors"] if name.startswith(RANDOM))
        check_tensors(source, shards, state["tensors"], optional)
    reader = ShardReader(source, state)
    with (
        trained.failure_state.guard_write("load"),
        _as_os_error(f"{source} could not be read", "The engine may hold parts of it; load again."),
    ):
        gather_and_decide(lambda: reader.read_into(shards), lambda _: None)
    for saved in saved_parts:
        saved.restore_counts()
    trained.failure_state.mark_recovered(weights=adapter is None, adapter=adapter)
    if random_states:
        torch.set_rng_state(random_states["cpu"])
    if "cuda" in random_states:
        torch.cuda.set_rng_state(random_states["cuda"])
    extra: dict[str, Any] = state["extra"]
    return extra


@contextmanager
def _adapters_of(
    trained: AdaptedModel, source: Path, state: Mapping[str, Any], adapter: str | None, *, same_layers: bool
) -> Iterator[dict[str, TrainingState]]:
    """Yields the training states that a checkpoint is loaded into, by their names there.

    Adapters that the engine lacks are added, and removed again if the block raises.
    """
    entries = {"": state, **state["adapters"]}
    if adapter is not None and len(entries) > 1:
        raise ValueError(f"{source} has the adapters {', '.join(filter(None, entries))} too: load it with engine.load.")
    names: dict[str, str | None] = {"": adapter or DEFAULT} | {name: name for name in entries if name}
    if not trained.adapters.enabled:
        names = {"": None}
    elif not state["adapter"]:
        names[""] = None  # saved without a default adapter
    for name in trained.adapters.names:
        if adapter is None and name not in names.values():
            raise ValueError(f'{source} has no adapter "{name}", which this engine has: remove it with remove_adapter.')
    added = list[str]()
    try:
        for saved_name, present in names.items():
            configs = {layer: AdapterConfig(*values) for layer, values in entries[saved_name]["adapter"].items()}
            if present is not None and present not in trained.training_states:
                add_adapter_configs(trained, present, configs)
                added.append(present)
            elif present is not None and same_layers:
                check_adapter(source, present, configs, trained.training_states[present].adapters)
        yield {saved_name: trained.training_states[present] for saved_name, present in names.items()}
    except BaseException:
        for name in added:
            discard_adapter(trained, name)
        raise


class _SavedTrainingState:
    """The saved state of one adapter, or of all weights. The engine's pattern may differ from the saved one."""

    def __init__(
        self, state: Mapping[str, Any], name: str, training_state: TrainingState, recast: RecastPlan | None
    ) -> None:
        self.training_state, self.recast, self.prefix = training_state, recast, _prefix(name)
        self.state = state["adapters"][name] if name else state
        self.tensors = frozenset(
            saved.removeprefix(self.prefix)
            for saved in state["tensors"]
            if saved.startswith(self.prefix or (MODEL, OPTIMIZER))
        )
        self.new_tensors = frozenset(() if recast is None else recast.new_tensors)
        self.has_optimizer_state = any(name.startswith(OPTIMIZER) for name in self.tensors)
        """Optimizer state is created in the first step with gradients."""
        self.steps_without_gradients: int = self.state["steps_without_gradients"]
        self.shards: dict[str, tuple[TensorShard, Tensor]] = {}

    def check_optimizer(self, source: Path) -> None:
        if self.state["optimizer"] != (present := self.training_state.optimizer_kind):
            raise ValueError(
                f"{source} was saved with {self.state['optimizer']}, but this engine has {present}. Give the engine "
                "the same optimizer, and the same weights."
            )

    def restore_counts(self) -> None:
        """Sets the step counts, and zeroes moments that were not saved."""
        training_state = self.training_state
        for name, (shard, _) in self.shards.items():
            if name.startswith(OPTIMIZER) and not name.startswith(LOW_BITS) and not self.has(name):
                shard.values.zero_()
        training_state.zero_grad()
        training_state.step, training_state.skipped = self.state["step"], self.state["skipped"]
        training_state.optimizer_start_step = self.state["optimizer_start"]
        training_state.late_start_steps = self.late_start_steps()
        training_state.steps_without_gradients = self.steps_without_gradients
        for name, parameter in training_state.parameters.items():
            if "step" in training_state.optimizer.state.get(parameter, {}):
                began = training_state.late_start_steps.get(name, training_state.optimizer_start_step)
                count = training_state.step - training_state.steps_without_gradients - began
                training_state.optimizer.state[parameter]["step"].fill_(count)

    def name(self, tensor_name: str) -> str:
        return self.prefix + self._relative_name(tensor_name)

    def _relative_name(self, name: str) -> str:
        prefix, _, tensor = name.rpartition("/")
        return name if self.recast is None else f"{prefix}/{self.recast.old_names.get(tensor, tensor)}"

    def has(self, name: str) -> bool:
        """Returns whether a tensor is read. Moments of parameters that were not trained may be missing."""
        if self.recast is None:
            return True
        if name.rpartition("/")[2] in self.new_tensors:
            return False
        return not name.startswith(OPTIMIZER) or self._relative_name(name) in self.tensors

    @property
    def optional(self) -> frozenset[str]:
        """Tensors that may stay unread: dropped ones, and moments of what is not trained."""
        if self.recast is None:
            return frozenset()
        dropped = {f"{MODEL}{name}" for name in self.recast.dropped}
        names = (name for name in self.tensors if name.startswith(OPTIMIZER) or name in dropped)
        return frozenset(self.prefix + name for name in names)

    def late_start_steps(self) -> dict[str, int]:
        """Returns the parameters whose moments began later than the others': the saved ones, and now those without."""
        earlier: Mapping[str, int] = self.state["late_start_steps"]
        if self.recast is None:
            return dict(earlier)
        moments = {name.rpartition("/")[2] for name in self.tensors if name.startswith(OPTIMIZER)}
        if not moments:  # nothing has begun
            return {}
        old_names = self.recast.old_names
        renamed = {new_name: earlier[old_name] for new_name, old_name in old_names.items() if old_name in earlier}
        without_moments = [new_name for new_name, old_name in old_names.items() if old_name not in moments]
        return renamed | dict.fromkeys(
            (*self.recast.new_tensors, *without_moments), self.state["step"] - self.steps_without_gradients
        )


def check_checkpoint(directory: str | os.PathLike[str]) -> None:
    """Raises OSError or ValueError unless a checkpoint is complete and every byte is what was saved.

    It reads all of it, in this process, and needs no engine.
    """
    source = Path(directory).expanduser().resolve()
    state = read_state(source, ENTRIES)
    refuse_damaged(source, damaged_files(source, state["files"]))
    for name, entry in state["tensors"].items():
        if sum(math.prod(size) for _, _, size in entry["parts"]) != math.prod(entry["shape"]):
            raise ValueError(f"{source} does not hold all of {name}; load another checkpoint.")


def checkpoint_problem(directory: str | os.PathLike[str]) -> str:
    try:
        check_checkpoint(directory)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def shards_to_save(trained: AdaptedModel, training_states: Mapping[str, TrainingState]) -> dict[str, TensorShard]:
    """Returns the shards that this rank writes. Of ranks that hold the same shard, one writes it."""
    return {
        _prefix(adapter) + name: shard
        for adapter, training_state in training_states.items()
        for name, (shard, like) in _all_shards(trained, training_state).items()
        if shard.values.numel() and is_owner(name.rsplit("/", 1)[1], like, trained.mesh, trained.shared_parameters)
    }


def _random_shards(trained: AdaptedModel) -> dict[str, TensorShard]:
    suffix = f"/{rank}" if (rank := dist.get_rank()) else ""
    return {f"{RANDOM}{kind}{suffix}": _shard(values) for kind, values in _random_states(trained).items()}


def _random_state_name(state: Mapping[str, Any], kind: str) -> str:
    """Returns the name of a generator's state: this rank's, else rank 0's; "" if there is none."""
    names = (f"{RANDOM}{kind}/{dist.get_rank()}", f"{RANDOM}{kind}")
    return next((name for name in names if name in state["tensors"]), "")


def _random_states(trained: AdaptedModel) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if trained.mesh.device_type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _all_shards(trained: AdaptedModel, training_state: TrainingState) -> dict[str, tuple[TensorShard, Tensor]]:
    """Returns this rank's trained tensors and optimizer state, by names that are the same in every layout.

    Each comes with the tensor that it is sharded like. Waits for copies of state in host memory.
    """
    if trained.mesh.device_type == "cuda":
        torch.cuda.synchronize()
    shards = {f"{MODEL}{name}": (_shard(tensor), tensor) for name, tensor in training_state.tensors.items()}
    for name, parameter in training_state.parameters.items():
        for key, value in training_state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and key != "step":
                shards[f"{OPTIMIZER}{key}/{name}"] = state_shard(value, parameter), parameter
    return shards


def _shard(tensor: Tensor) -> TensorShard:
    return TensorShard(local_shard(tensor), tuple(dimension.start for dimension in region(tensor)), tuple(tensor.shape))


@contextmanager
def _optimizer_state(training_state: TrainingState, *, saved: bool) -> Iterator[None]:
    """Gives the optimizer a state to overwrite, if one was saved; restores the old one if the block raises."""
    before = dict(training_state.optimizer.state)
    if not saved:
        training_state.optimizer.state.clear()
    elif not before:
        _make_optimizer_state(training_state)
    try:
        yield
    except BaseException:
        training_state.optimizer.state.clear()
        training_state.optimizer.state.update(before)
        raise


def _make_optimizer_state(training_state: TrainingState) -> None:
    """Makes the optimizer create its state, by a step that changes nothing. Present gradients are kept."""
    rates = [group["lr"] for group in training_state.optimizer.param_groups]
    gradients = {name: parameter.grad for name, parameter in training_state.parameters.items()}
    for group in training_state.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in training_state.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    training_state.optimizer.step()
    for name, parameter in training_state.parameters.items():
        parameter.grad = gradients[name]
    for group, rate in zip(training_state.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _as_os_error(problem: str, fix: str) -> Iterator[None]:
    """Turns the failure of a rank into one OSError that names the rank."""
    try:
        yield
    except RankFailure as failure:
        cause = failure.cause
        raise OSError(f"{problem}: rank {failure.rank} raised {type(cause).__name__}: {cause}. {fix}") from cause
