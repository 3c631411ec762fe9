"""Checkpoints: a resumed run equals an uninterrupted one in any layout; errors are raised on every rank."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from postlude import Layout
from postlude import ranks as started
from postlude.engine import SGD, AdamW, Engine, checkpoint
from postlude.sharded_tensors import StagedFile
from tests.engine.training import (
    batch,
    bitwise_equal,
    build,
    config,
    error_text,
    infinite_gradient,
    optimizer_state,
    policy,
    train,
    weights,
)
from tests.equality import assert_equal

DENSE, MOE = config("tiny-dense", num_hidden_layers=2), config("tiny-moe", num_hidden_layers=2)
DEEP = config("tiny-dense")
ODD = config("tiny-dense", num_hidden_layers=2, hidden_size=48, intermediate_size=40, tie_word_embeddings=False)
ODD_MOE = config("tiny-moe", num_hidden_layers=2, num_experts=5)  # over 4 ranks: 2, 2, 1 and none
EXTRA = {"epoch": 3, "seen": ["a", "ü"], "nested": {"share": 0.25, "none": None}}


def size(layout: str) -> int:
    return Layout.parse(layout).world_size


def save_and_continue(group: Any, hf: PretrainedConfig, layout: str, directory: str) -> dict[str, Any]:
    engine = build(layout, hf)
    train(engine, [1, 2])
    engine.forward_backward(batch(3), infinite_gradient)
    engine.optimizer_step()
    train(engine, [3])
    torch.manual_seed(7)
    engine.save(directory, extra=EXTRA)
    return continued(engine)


def load_and_continue(group: Any, hf: PretrainedConfig, layout: str, directory: str) -> dict[str, Any]:
    engine = build(layout, hf, seed=1)
    torch.manual_seed(8)
    extra = engine.load(directory)
    return {**continued(engine), "extra": extra}


def continued(engine: Engine) -> dict[str, Any]:
    draws = torch.rand(3)
    results = {"weights": weights(engine), "losses": train(engine, range(4, 6))}
    return {**results, "counts": (engine.step, engine.skipped), "draws": draws}


MOVES = [(DENSE, "", "tp=2"), (DENSE, "pp=2", "cp=2"), (MOE, "dp_shard=2,ep=2", "")]
MORE_MOVES = [
    (DEEP, "pp=2,vpp=2", "tp=2,cp=2"),
    (DENSE, "tp=2,pp=2", "dp_shard=4"),
    (MOE, "dp_shard=4,ep=4", "pp=2,dp_shard=2,ep=2"),
    (MOE, "cp=2,ep=2", "tp=2,ep=2"),
    (DEEP, "dp_replicate=2,dp_shard=2", "pp=4"),
    (ODD, "tp=2,dp_shard=2", ""),
    (ODD, "", "tp=2,dp_shard=2"),
    (ODD_MOE, "dp_shard=4", "tp=2,cp=2"),
]


@pytest.mark.parametrize(
    ("hf", "before", "after"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.thorough) for move in MORE_MOVES)]
)
@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(
    ranks: Any, tmp_path: Path, hf: PretrainedConfig, before: str, after: str
) -> None:
    directory = str(tmp_path / "checkpoint")
    uninterrupted = ranks(size(before), save_and_continue, hf, before, directory)
    resumed = ranks(size(after), load_and_continue, hf, after, directory)
    for actual in resumed:
        assert actual["extra"] == EXTRA
        assert bitwise_equal(actual["weights"], uninterrupted[0]["weights"])
        assert_equal(torch.tensor(actual["losses"]), torch.tensor(uninterrupted[0]["losses"]), "losses")
        assert actual["counts"] == uninterrupted[0]["counts"] == (5, 1)
        assert torch.equal(actual["draws"], uninterrupted[0]["draws"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def resume_in_same_engine(group: Any, before: list[int], directory: str) -> tuple[Any, ...]:
    engine = build("dp_shard=2", DENSE)
    train(engine, before)
    engine.save(directory)
    expected = train(engine, [3, 4]), weights(engine)
    engine.forward_backward(batch(9), policy)  # gradients of another life
    engine.load(directory)
    return expected, (engine.step, train(engine, [3, 4]), weights(engine))


@pytest.mark.slow
@pytest.mark.parametrize("before", [[1, 2], []], ids=["trained", "from before the first step"])
def test_loading_in_the_same_engine_is_bit_exact(ranks: Any, tmp_path: Path, before: list[int]) -> None:
    for (losses, tensors), (step, resumed_losses, tensors_again) in ranks(
        2, resume_in_same_engine, before, str(tmp_path / "checkpoint")
    ):
        assert step == len(before)
        assert losses == resumed_losses
        assert bitwise_equal(tensors, tensors_again)


def step_without_gradients(engine: Engine) -> None:
    """A first step without gradients."""
    engine.optimizer_step()


def step_with_infinite_gradient(engine: Engine) -> None:
    """A first step whose gradient is not finite."""
    engine.forward_backward(batch(0), infinite_gradient)
    assert engine.optimizer_step().skipped


def infinite_gradient_after_set_optimizer(engine: Engine) -> None:
    """A first step of a new optimizer whose gradient is not finite."""
    train(engine, [1])
    engine.set_optimizer(AdamW(lr=1e-4))
    step_with_infinite_gradient(engine)


def idle_step_after_a_step(engine: Engine) -> None:
    """A step without gradients after one that had some."""
    train(engine, [1])
    step_without_gradients(engine)


UNMOVED = {
    function.__name__: function
    for function in (
        step_without_gradients,
        step_with_infinite_gradient,
        infinite_gradient_after_set_optimizer,
        idle_step_after_a_step,
    )
}


def save_unmoved(group: Any, start: str, layout: str, optimizer: AdamW, directory: str) -> list[tuple[Any, ...]]:
    """Returns the next steps: uninterrupted, in a new engine that loads the checkpoint, and in a used one."""

    def go_on(engine: Engine) -> tuple[Any, ...]:
        return engine.step, engine.skipped, train(engine, [2, 3]), weights(engine), optimizer_state(engine)

    engine = build(layout, DENSE, optimizer=optimizer)
    UNMOVED[start](engine)
    engine.save(directory)
    fresh, used = (build(layout, DENSE, optimizer=engine.optimizer_config, seed=1) for _ in range(2))
    train(used, [7])
    for other_engine in (fresh, used):
        other_engine.load(directory)
    return [go_on(engine), go_on(fresh), go_on(used)]


@pytest.mark.parametrize(
    ("start", "layout", "moments"),
    [
        ("idle_step_after_a_step", "", "fp32"),
        ("step_with_infinite_gradient", "", "8bit"),
        pytest.param("infinite_gradient_after_set_optimizer", "pp=2", "fp32", marks=pytest.mark.slow),
        pytest.param("step_without_gradients", "dp_shard=2", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_after_a_step_without_an_update_resumes(
    ranks: Any, tmp_path: Path, start: str, layout: str, moments: Any
) -> None:
    optimizer = AdamW(lr=1e-3, moments=moments)
    for expected, *resumed_runs in ranks(
        size(layout), save_unmoved, start, layout, optimizer, str(tmp_path / "checkpoint")
    ):
        for resumed in resumed_runs:
            assert resumed[:3] == expected[:3]
            assert bitwise_equal(resumed[3], expected[3])
            assert bitwise_equal(resumed[4], expected[4])


def random_numbers_after_load(group: Any, saves: bool, layout: str, directory: str) -> list[float]:
    """Returns this rank's random numbers after a save or a load, whatever it sampled before."""
    rank = dist.get_rank()
    engine = build(layout, DENSE)
    torch.manual_seed(100 + rank if saves else 200)
    if saves:
        engine.save(directory)
    else:
        engine.load(directory)
    return torch.rand(3).tolist()


@pytest.mark.slow
def test_every_rank_gets_its_own_random_state_back(ranks: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    expected = ranks(2, random_numbers_after_load, True, "dp_shard=2", directory)
    assert expected[0] != expected[1]
    assert ranks(2, random_numbers_after_load, False, "tp=2", directory) == expected
    assert ranks(1, random_numbers_after_load, False, "", directory) == expected[:1]
    assert ranks(4, random_numbers_after_load, False, "dp_shard=4", directory) == [*expected, expected[0], expected[0]]


@pytest.mark.gpu
def test_the_random_state_of_a_gpu_is_restored(tmp_path: Path) -> None:
    with started(device="cuda"):
        engine = Engine(DENSE, budget=32)
        torch.cuda.manual_seed(5)
        engine.save(tmp_path / "checkpoint")
        expected = torch.rand(3, device="cuda")
        engine.load(tmp_path / "checkpoint")
        assert torch.equal(torch.rand(3, device="cuda"), expected)


def sgd_run(group: Any, momentum: float, directory: str) -> tuple[list[float], list[float]]:
    engine = build("dp_shard=2", DENSE, optimizer=SGD(lr=0.05, momentum=momentum))
    train(engine, [1, 2])
    engine.save(directory)
    expected = train(engine, [3, 4])
    fresh = build("dp_shard=2", DENSE, optimizer=SGD(lr=0.05, momentum=momentum), seed=1)
    fresh.load(directory)
    return expected, train(fresh, [3, 4])


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_sgd_resumes_with_and_without_momentum(ranks: Any, tmp_path: Path, momentum: float) -> None:
    for expected, actual in ranks(2, sgd_run, momentum, str(tmp_path / "checkpoint")):
        assert expected == actual


# --- written aside and renamed


def save_and_change_immediately(group: Any, directory: str) -> tuple[Any, ...]:
    engine = build("tp=2", DENSE)
    train(engine, [1])
    at_save = weights(engine), optimizer_state(engine)
    engine.save(directory, wait=False)
    train(engine, [2])
    moved = not bitwise_equal(weights(engine), at_save[0])
    engine.finish_saving()
    engine.load(directory)
    return (
        moved,
        bitwise_equal(weights(engine), at_save[0]),
        bitwise_equal(optimizer_state(engine), at_save[1]),
        engine.step,
    )


def test_a_background_save_holds_the_values_at_its_start(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, save_and_change_immediately, str(tmp_path / "checkpoint")) == [(True, True, True, 1)] * 2


def save_with_a_fault(group: Any, fault: str, directory: str, wait: bool) -> tuple[str, str, bool, str]:
    """Returns the errors of `save` and `finish_saving` with the fault, whether the target exists, and a later save."""
    engine = build("dp_shard=2", DENSE)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == FAULTS[fault][0]:
            FAULTS[fault][1](patch)
        at_once = error_text(lambda: engine.save(directory, wait=wait))
        later = error_text(engine.finish_saving)
    exists = os.path.exists(directory)
    dist.barrier()
    return at_once, later, exists, error_text(lambda: engine.save(directory))


def disk_full(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def no_room_for_tensors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedFile, "write", disk_full)


def no_room_for_the_state(patch: pytest.MonkeyPatch) -> None:
    write = Path.write_text
    patch.setattr(
        Path,
        "write_text",
        lambda path, text, *arguments: disk_full() if path.name == "state.json" else write(path, text, *arguments),
    )


def no_room_for_the_directory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "mkdir", disk_full)


FAULTS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None]]] = {
    "tensors": (1, no_room_for_tensors),
    "state": (0, no_room_for_the_state),
    "directory": (0, no_room_for_the_directory),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.slow), False])
def test_save_that_fails_on_one_rank_raises_on_all_ranks_and_leaves_no_directory(
    ranks: Any, tmp_path: Path, fault: str, wait: bool
) -> None:
    outputs = ranks(2, save_with_a_fault, fault, str(tmp_path / "checkpoint"), wait)
    for at_once, later, exists, after in outputs:
        complaint, silence = (at_once, later) if wait or fault == "directory" else (later, at_once)
        assert silence == "nothing"
        assert complaint == (
            f"OSError: {tmp_path / 'checkpoint'} could not be written: rank {FAULTS[fault][0]} raised OSError: "
            "[Errno 28] No space left on device. What was written is not a checkpoint; fix the cause and save again."
        )
        assert not exists
        assert after == "nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def save_over_incomplete_save(group: Any, directory: str) -> tuple[str, bool]:
    engine = build("dp_shard=2", DENSE)
    if dist.get_rank() == 0:  # as a save that was killed leaves it
        aside = Path(directory).parent / f".{Path(directory).name}.partial"
        aside.mkdir()
        (aside / "part-00009.safetensors").write_bytes(b"half a file")
    dist.barrier()
    engine.save(directory)
    before = weights(engine)
    engine.load(directory)
    return error_text(lambda: engine.save(directory)), bitwise_equal(before, weights(engine))


def test_incomplete_saves_are_removed_and_checkpoints_are_never_overwritten(ranks: Any, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    sentence = f"FileExistsError: {target} exists already; a checkpoint is written to a new directory."
    assert ranks(2, save_over_incomplete_save, str(target)) == [(sentence, True)] * 2


def save_invalid_extra(group: Any, directory: str) -> str:
    return error_text(lambda: build("dp_shard=2", DENSE).save(directory, extra={"when": object()}))


def test_extra_that_is_not_json_is_refused_before_anything_is_written(ranks: Any, tmp_path: Path) -> None:
    for answer in ranks(2, save_invalid_extra, str(tmp_path / "checkpoint")):
        assert answer == (
            "TypeError: `extra` is kept as JSON, which cannot hold it (Object of type object is not JSON "
            "serializable); give numbers, strings, lists and dicts."
        )
    assert list(tmp_path.iterdir()) == []


# --- checked on load


def make(group: Any, directory: str) -> None:
    engine = build("pp=2", DENSE)
    train(engine, [1])
    engine.save(directory)


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    ranks(2, make, str(directory))
    return directory


def load_in_layout(
    group: Any, directory: str, hf: PretrainedConfig, layout: str, optimizer: Any
) -> tuple[str, bool, bool]:
    """Returns the errors of `load` in a used and a new engine, and whether they are unchanged. Both then continue."""
    engine, fresh = (build(layout, hf, optimizer=optimizer) for _ in range(2))
    train(engine, [1])
    before = [(weights(target), optimizer_state(target), target.step) for target in (engine, fresh)]
    complaints = {error_text(lambda target=target: target.load(directory)) for target in (engine, fresh)}
    unchanged = all(
        bitwise_equal(weights(target), tensors)
        and bitwise_equal(optimizer_state(target), state)
        and target.step == step
        for target, (tensors, state, step) in zip((engine, fresh), before, strict=True)
    )
    train(engine, [2])
    return complaints.pop(), unchanged, not complaints


def refused(
    ranks: Any, directory: Path, *, hf: PretrainedConfig = DENSE, layout: str = "pp=2", optimizer: Any = None
) -> str:
    outputs = ranks(size(layout), load_in_layout, str(directory), hf, layout, optimizer or AdamW(lr=1e-3))
    assert all(answer == outputs[0] for answer in outputs)
    complaint, unchanged, still_trains = outputs[0]
    assert unchanged
    assert still_trains
    return str(complaint)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def flip_byte(directory: Path) -> str:
    path = files(directory)[1]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    return f"ValueError: {directory} is damaged: {path.name} is not what was saved there. Load another checkpoint."


def truncate_file(directory: Path) -> str:
    path = files(directory)[0]
    path.write_bytes(path.read_bytes()[:1000])
    return f"ValueError: {directory} is damaged: {path.name} is not what was saved there. Load another checkpoint."


def delete_file(directory: Path) -> str:
    path = files(directory)[1]
    path.unlink()
    return f"FileNotFoundError: {directory} lacks {path.name}; load another checkpoint."


def delete_state(directory: Path) -> str:
    (directory / "state.json").unlink()
    return f"FileNotFoundError: {directory} has no state.json, so it is not a checkpoint, or not a complete one."


def corrupt_state(directory: Path) -> str:
    (directory / "state.json").write_text('{"format": 2,')
    return (
        f"ValueError: {directory / 'state.json'} cannot be read (Expecting property name enclosed in double quotes: "
        "line 1 column 14 (char 13)); load another checkpoint."
    )


def empty_state(directory: Path) -> str:
    (directory / "state.json").write_text('{"format": 2}')
    return f"ValueError: {directory / 'state.json'} cannot be read ('step' is missing); load another checkpoint."


def write_unknown_format(directory: Path) -> str:
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(state | {"format": 99}))
    return f"ValueError: {directory} has format 99, but this version of postlude reads format 2."


DAMAGES = (flip_byte, truncate_file, delete_file, delete_state, corrupt_state, empty_state, write_unknown_format)


@pytest.mark.parametrize("damage", [flip_byte, delete_state], ids=["flip_byte", "delete_state"])
@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_on_every_rank_and_changes_nothing(
    ranks: Any, saved: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(saved, directory)
    sentence = damage(directory)
    assert refused(ranks, directory) == sentence


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
def test_a_checkpoint_can_be_checked_without_an_engine(
    saved: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(saved, directory)
    checkpoint.check_checkpoint(directory)
    sentence = damage(directory)
    assert error_text(lambda: checkpoint.check_checkpoint(directory)) == sentence


def test_file_not_reported_by_any_rank_is_missing_from_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(saved, directory)
    shutil.copy(files(directory)[0], directory / "model.safetensors")  # nobody's business
    checkpoint.check_checkpoint(directory)
    state = json.loads((directory / "state.json").read_text())
    name, entry = next((name, entry) for name, entry in state["tensors"].items() if name.startswith("model/layers.1"))
    entry["parts"].pop()
    (directory / "state.json").write_text(json.dumps(state))
    expected = f"ValueError: {directory} does not hold all of {name}; load another checkpoint."
    assert error_text(lambda: checkpoint.check_checkpoint(directory)) == expected


def files_read_by_rank(group: Any, directory: str) -> list[str]:
    """Returns the files of a checkpoint that this rank opens to list its contents."""
    read, read_directories = checkpoint.read_state, list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint,
            "read_state",
            lambda source, *arguments: (read_directories.append(source.name), read(source, *arguments))[1],
        )
        build("dp_shard=2", DENSE).load(directory)
    return read_directories


def test_only_rank_0_reads_the_directory(ranks: Any, saved: Path) -> None:
    assert ranks(2, files_read_by_rank, str(saved)) == [[saved.name], []]


@pytest.mark.parametrize(
    ("hf", "layout", "sentence"),
    [
        pytest.param(
            DEEP,
            "pp=2",
            "it lacks 54 tensor(s) of this model and optimizer, such as model/layers.2.attention.norm.weight.",
            id="more layers",
        ),
        pytest.param(
            config("tiny-dense", num_hidden_layers=1),
            "dp_shard=2",
            "it holds 27 tensor(s) this model and optimizer do not have, such as "
            "model/layers.1.attention.k_proj.weight.",
            id="fewer layers",
        ),
        pytest.param(
            config("tiny-dense", num_hidden_layers=2, intermediate_size=256),
            "pp=2",
            "model/layers.0.mlp.gate_proj.weight is (384, 128) there, but (256, 128) here.",
            id="narrower",
        ),
        pytest.param(
            config("tiny-dense", num_hidden_layers=2, tie_word_embeddings=False),
            "pp=2",
            "it lacks 3 tensor(s) of this model and optimizer, such as model/head.weight.",
            id="untied",
        ),
    ],
)
@pytest.mark.slow
def test_another_models_checkpoint_is_refused_on_every_rank(
    ranks: Any, saved: Path, hf: PretrainedConfig, layout: str, sentence: str
) -> None:
    assert refused(ranks, saved, hf=hf, layout=layout) == f"ValueError: {saved} is of another model: {sentence}"


def test_another_optimizers_checkpoint_is_refused(ranks: Any, saved: Path) -> None:
    assert refused(ranks, saved, optimizer=SGD(lr=1e-3)) == (
        f"ValueError: {saved} was saved with AdamW, but this engine has SGD. Give the engine the same optimizer, and "
        "the same weights."
    )
