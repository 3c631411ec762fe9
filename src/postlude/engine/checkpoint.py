"""Training state on disk: written aside and renamed, checked on load, from any layout to any other. Never pickle.

A checkpoint is a directory of safetensors, each rank's parts in a file of its own, and `state.json`, which says what
belongs to it (`parts.py`). With its config.json, and the tokenizer if one was given, it is a model that can be loaded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postlude.engine.failure_state import FailureState
from postlude.engine.optimizers import kind, state_shard
from postlude.engine.streaming import is_owner
from postlude.hf.tensor_sources import MODEL
from postlude.model.parallel import local_shard, region
from postlude.model.recast import RecastPlan
from postlude.optimizer import OptimizerConfig, WeightStorage
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
from postlude.world.mesh import Mesh

ENTRIES = ("step", "skipped", "optimizer_start", "optimizer", "layout", "extra", "files", "tensors")
OPTIMIZER = "optimizer/"  # before the names of moments, as MODEL is before those of tensors
CRITIC = f"{MODEL}value_head.weight"
RANDOM = "rng/"  # before a kind of generator, and a rank's number after it; the first rank's has none
UNWRITTEN = "What was written is not a checkpoint; mend the cause and save again."


class TrainingState(Protocol):
    """What has a state to save: a model in parts, its optimizer, and how far it has come."""

    step: int
    skipped: int
    optimizer_start: int
    idle: int
    """Steps since the optimizer's first that had no gradients: they count, but changed nothing."""
    began_later: dict[str, int]
    """Parameters that the optimizer has known for less long: the step that each began at, idle ones left out."""

    @property
    def mesh(self) -> Mesh:
        """The ranks it is spread over."""
        ...

    @property
    def failure_state(self) -> FailureState:
        """Whether it is whole."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What moves the parameters."""
        ...

    @property
    def optimizer_config(self) -> OptimizerConfig:
        """The value it was made from."""
        ...

    @property
    def weights(self) -> WeightStorage:
        """How its weights are stored."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by their global names."""
        ...

    @property
    def shared(self) -> Collection[str]:
        """The names of what both ends of a pipeline hold."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters and persistent buffers by their global names."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...


class PendingSave:
    """A checkpoint on its way to disk. `wait` returns when it is there, or raises what went wrong."""

    def __init__(self, work: Callable[[], None]) -> None:
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
    trained: TrainingState,
    directory: str | os.PathLike[str],
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    staging: StagingBuffers,
    describe: Callable[[Path], None],
) -> PendingSave:
    """Take a copy of the state now, and write it in the background, over a `group` of its own.

    `describe` puts the model's config into the directory, on the first rank. The copy is in `staging`, which must not
    be used again before the checkpoint is written.
    """
    target = Path(directory).expanduser().resolve()
    aside = target.parent / f".{target.name}.partial"
    try:
        extra = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`extra` is kept as JSON, which cannot hold it ({error}); give numbers, strings, lists and dicts."
        ) from error

    def prepare() -> bool:
        if target.exists():
            return False
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        describe(aside)
        return True

    with _telling(f"{target} could not be written", UNWRITTEN):
        if not gather_and_decide(lambda: None, lambda _: prepare(), group):
            raise FileExistsError(f"{target} exists already; a checkpoint is written to a new directory.")
    staged = staging.take(shards_to_save(trained))
    state = {
        "format": FORMAT,
        "step": trained.step,
        "skipped": trained.skipped,
        "optimizer_start": trained.optimizer_start,
        "optimizer": kind(trained.optimizer_config, trained.weights),
        "idle": trained.idle,
        "began_later": trained.began_later,
        "layout": str(trained.mesh.layout),
        "extra": extra,
    }

    def finish(written: list[CheckpointIndex]) -> None:
        entries = (state | merge_indexes(written)).items()
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
        (aside / STATE).write_text(f"{{\n{lines}\n}}\n")
        aside.rename(target)

    def write() -> None:
        with _telling(f"{target} could not be written", UNWRITTEN):
            gather_and_decide(
                lambda: staged.write(aside / f"part-{dist.get_rank(group):05d}.safetensors"), finish, group
            )

    return PendingSave(write)


def load(trained: TrainingState, directory: str | os.PathLike[str], moved: RecastPlan | None = None) -> dict[str, Any]:
    """Restore everything from a checkpoint of any layout. Returns the caller's `extra`.

    What can be refused is refused before anything is touched, on every rank alike. The first rank reads what the
    checkpoint holds and tells the others; each opens only the files that have parts it needs. `moved` says where
    tensors are in one of another pattern; those that are not there keep their values, and moments start from zero.
    """
    source = Path(directory).expanduser().resolve()
    state = on_rank0(lambda: read_state(source, ENTRIES))
    _check_files(source, state["files"])
    if state["optimizer"] != (here := kind(trained.optimizer_config, trained.weights)):
        raise ValueError(
            f"{source} was saved with {state['optimizer']}, but this engine has {here}. Give the engine the same "
            "optimizer, and the same weights."
        )
    there = _There(state, moved)
    random = _random_states(trained)
    with _optimizer_state(trained, saved=there.has_optimizer_state):
        named = _named(trained)
        wanted = {there.name(name): part for name, (part, _) in named.items() if there.has(name)}
        wanted |= {there.random(kind): _part(values) for kind, values in random.items() if there.random(kind)}
        _check_tensors(source, wanted, state["tensors"], there.spare)
    reader = ShardReader(source, state)
    telling = _telling(f"{source} could not be read", "The engine may hold parts of it; load again.")
    with trained.failure_state.writing("load"), telling:
        gather_and_decide(lambda: reader.read_into(wanted), lambda _: None)
    for name, (part, _) in named.items():
        if name.startswith(OPTIMIZER) and not there.has(name):
            part.values.zero_()
    trained.failure_state.mended(weights=True)
    trained.zero_grad()
    trained.step, trained.skipped = state["step"], state["skipped"]
    trained.optimizer_start, trained.began_later = state["optimizer_start"], there.began_later()
    trained.idle = there.idle
    _set_random_states(random)
    for name, parameter in trained.parameters.items():
        if "step" in trained.optimizer.state.get(parameter, {}):
            began = trained.began_later.get(name, trained.optimizer_start)
            trained.optimizer.state[parameter]["step"].fill_(trained.step - trained.idle - began)
    extra: dict[str, Any] = state["extra"]
    return extra


class _There:
    """What a checkpoint holds, by the names that an engine of another pattern has for it."""

    def __init__(self, state: Mapping[str, Any], moved: RecastPlan | None) -> None:
        self.state, self.moved = state, moved
        self.fresh = frozenset(() if moved is None else moved.fresh)

    def name(self, ours: str) -> str:
        """What a tensor is called there."""
        room, _, tensor = ours.rpartition("/")
        return ours if self.moved is None else f"{room}/{self.moved.kept.get(tensor, tensor)}"

    def has(self, ours: str) -> bool:
        """Whether a tensor is to be read. Moments may be missing: those of what was not trained there."""
        if self.moved is None:
            return True
        if ours.rpartition("/")[2] in self.fresh:
            return False
        return not ours.startswith(OPTIMIZER) or self.name(ours) in self.state["tensors"]

    def random(self, kind: str) -> str:
        """What the state of a kind of generator is called there: this rank's, else the first one's; "" for none."""
        own, first = f"{RANDOM}{kind}/{dist.get_rank()}", f"{RANDOM}{kind}"
        return next((name for name in (own, first) if name in self.state["tensors"]), "")

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the optimizer there had made its state: when it first met gradients, not when it first moved."""
        return any(name.startswith(OPTIMIZER) for name in self.state["tensors"])

    @property
    def idle(self) -> int:
        """How many steps changed nothing."""
        return int(self.state.get("idle", 0))

    @property
    def spare(self) -> frozenset[str]:
        """What may be left over there: random states, what has no place here, and moments of what is not trained."""
        names = self.state["tensors"]
        random = frozenset(name for name in names if name.startswith(RANDOM))
        if self.moved is None:
            return random
        dropped = {f"{MODEL}{name}" for name in self.moved.dropped}
        return random | frozenset(name for name in names if name.startswith(OPTIMIZER) or name in dropped)

    def began_later(self) -> dict[str, int]:
        """The parameters whose moments began later than the others': as it says there, and now those without any."""
        earlier: Mapping[str, int] = self.state.get("began_later", {})
        if self.moved is None:
            return dict(earlier)
        moments = {name.rpartition("/")[2] for name in self.state["tensors"] if name.startswith(OPTIMIZER)}
        if not moments:  # nothing has begun
            return {}
        now = {ours: earlier[then] for ours, then in self.moved.kept.items() if then in earlier}
        lacking = [ours for ours, then in self.moved.kept.items() if then not in moments]
        return now | dict.fromkeys((*self.moved.fresh, *lacking), self.state["step"] - self.idle)


def check(directory: str | os.PathLike[str]) -> None:
    """Raise a sentence (`OSError` or `ValueError`) unless a checkpoint is whole and every byte is what was saved.

    It reads all of it, in this process alone, and needs no engine.
    """
    source = Path(directory).expanduser().resolve()
    state = read_state(source, ENTRIES)
    _refuse_damaged(source, damaged_files(source, state["files"]))
    for name, entry in state["tensors"].items():
        if sum(math.prod(size) for _, _, size in entry["parts"]) != math.prod(entry["shape"]):
            raise ValueError(f"{source} does not hold all of {name}; load another checkpoint.")


def shards_to_save(trained: TrainingState) -> dict[str, TensorShard]:
    """What this rank, of all that hold the same, is to write."""
    found = {}
    for name, (part, of) in _named(trained).items():
        if part.values.numel() and is_owner(name.rsplit("/", 1)[1], of, trained.mesh, trained.shared):
            found[name] = part
    own = f"/{rank}" if (rank := dist.get_rank()) else ""
    return found | {f"{RANDOM}{kind}{own}": _part(values) for kind, values in _random_states(trained).items()}


def _random_states(trained: TrainingState) -> dict[str, Tensor]:
    """The state of each of this rank's generators, by its kind."""
    found = {"cpu": torch.get_rng_state()}
    if trained.mesh.device_type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _named(trained: TrainingState) -> dict[str, tuple[TensorShard, Tensor]]:
    """WeightStorage and optimizer state, by names that are the same in every layout.

    Each with the tensor that it is spread over ranks as. Of state in host memory, what the device still has to copy
    there is waited for.
    """
    if trained.mesh.device_type == "cuda":
        torch.cuda.synchronize()
    found = {f"{MODEL}{name}": (_part(tensor), tensor) for name, tensor in trained.tensors.items()}
    for name, parameter in trained.parameters.items():
        for key, value in trained.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and key != "step":
                found[f"{OPTIMIZER}{key}/{name}"] = state_shard(value, parameter), parameter
    return found


def _part(tensor: Tensor) -> TensorShard:
    return TensorShard(local_shard(tensor), tuple(where.start for where in region(tensor)), tuple(tensor.shape))


@contextmanager
def _optimizer_state(trained: TrainingState, *, saved: bool) -> Iterator[None]:
    """Give the optimizer a state, to be overwritten, if one was saved; or what it had if that is refused."""
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
    """Have the optimizer make its state: a step that changes nothing. Gradients that wait for a step keep waiting."""
    rates = [group["lr"] for group in trained.optimizer.param_groups]
    waiting = {name: parameter.grad for name, parameter in trained.parameters.items()}
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in trained.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trained.optimizer.step()
    for name, parameter in trained.parameters.items():
        parameter.grad = waiting[name]
    for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _telling(what: str, then: str) -> Iterator[None]:
    """A failure of one rank or more as one sentence that names the first."""
    try:
        yield
    except RankFailure as failure:
        cause = failure.cause
        raise OSError(f"{what}: rank {failure.rank} met {type(cause).__name__}: {cause}. {then}") from cause


def _check_files(source: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Every rank checks its share, and all hear of what is wrong."""

    def wrong() -> list[str]:
        names = sorted(files)[dist.get_rank() :: dist.get_world_size()]
        return damaged_files(source, {name: files[name] for name in names})

    try:
        gather_and_decide(wrong, lambda found: _refuse_damaged(source, [name for part in found for name in part]))
    except RankFailure as failure:
        raise failure.cause from None


def _refuse_damaged(source: Path, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{source} is damaged: {', '.join(names)} is not what was saved there. Load another checkpoint."
        )


def _check_tensors(
    source: Path, wanted: Mapping[str, TensorShard], saved: Mapping[str, Any], spare: Container[str]
) -> None:
    """What all ranks together want is what was saved, no less and, but for what is `spare`, no more.

    Each says briefly how its own compares.
    """
    numbers = {name: number for number, name in enumerate(saved)}

    def compare() -> tuple[int, list[str], list[str]]:
        has = sum(1 << numbers[name] for name in wanted if name in numbers)
        lacks = [name for name in wanted if name not in numbers]
        other = [
            f"{name} is {tuple(saved[name]['shape'])} there, but {part.shape} here"
            for name, part in wanted.items()
            if name in saved and tuple(saved[name]["shape"]) != part.shape
        ]
        return has, lacks, other[:1]

    def decide(found: list[tuple[int, list[str], list[str]]]) -> None:
        used = 0
        for has, _, _ in found:
            used |= has
        missing = list(dict.fromkeys(name for _, lacks, _ in found for name in lacks))
        beyond = [name for name, number in numbers.items() if not used >> number & 1 and name not in spare]
        _refuse_other_model(source, missing, beyond, [sentence for _, _, other in found for sentence in other])

    try:
        gather_and_decide(compare, decide)
    except RankFailure as failure:
        raise failure.cause from None


def _refuse_other_model(source: Path, missing: list[str], beyond: list[str], shapes: list[str]) -> None:
    if CRITIC in missing:
        raise ValueError(
            f"{source} was saved without a critic, but this engine has one. Load it with critic=False, or export that "
            "engine and start this one from the export."
        )
    if CRITIC in beyond:
        raise ValueError(f"{source} was saved with a critic, but this engine has none. Give the engine critic=True.")
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
    if shapes:
        raise ValueError(f"{source} is of another model: {shapes[0]}.")
