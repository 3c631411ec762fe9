"""Recipes of published models: the planner's numbers, and a tiny run of each that equals one rank."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from postlude.cli import main
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.plan.parameter_count import total_parameters
from postlude.plan.search import USABLE_MEMORY
from postlude.recipes.config.packaged import DIRECTORY as PACKAGED
from postlude.recipes.config.raw import Loader
from postlude.recipes.config.rollout import LaunchedVLLM
from postlude.recipes.config.schema import file_schema
from postlude.recipes.registry import RECIPES
from tests.conftest import Ranks
from tests.recipes.model_families import RECIPES as DIRECTORY
from tests.recipes.model_families import ROOT, tiny_model

BILLIONS = {  # of parameters, as published
    "gpt-oss-20b": 20.91,
    "moonlight-16b-a3b": 15.96,
    "nemotron-h-8b": 8.10,
    "qwen3-30b-a3b": 30.53,
    "qwen3-8b": 8.19,
    "qwen3-next-80b-a3b": 79.67,
}
COMMANDS = ("sft", "dpo", "grpo")
PIPELINED = ("gpt-oss-20b-sft-8gpus-pp2", "moonlight-16b-a3b-grpo-8gpus-pp2")  # on one node, beside one without
NAMES = [f"{model}-{command}-{gpus}gpus" for model in BILLIONS for command in COMMANDS for gpus in (8, 16)]
NAMES += PIPELINED
# The servers of the one run on other machines; the other samples on the GPUs that train.
WITHOUT_SERVERS = ("qwen3-next-80b-a3b-grpo-8gpus", "moonlight-16b-a3b-grpo-8gpus-pp2")


def recipe_name_parts(name: str) -> tuple[str, str, int]:
    """Returns the model, command and GPU count of a recipe."""
    model, command, gpus = name.removesuffix("-pp2").rsplit("-", 2)
    return model, command, int(gpus.removesuffix("gpus"))


def layout_degrees(layout: Layout) -> str:
    """Returns the layout as written in a config."""
    sizes = {axis.name: getattr(layout, axis.name) for axis in fields(Layout)}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "pp=1"


def recipe(name: str, *overrides: str) -> Any:
    return RECIPES[recipe_name_parts(name)[1]].read(DIRECTORY / f"{name}.yaml", overrides)


def test_there_is_a_recipe_for_each_model_algorithm_and_number_of_gpus() -> None:
    assert sorted(file.stem for file in DIRECTORY.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("command", COMMANDS)
def test_recipe_passes_the_json_schema(command: str) -> None:
    schema = Draft202012Validator(file_schema(RECIPES[command].config))
    for file in [*DIRECTORY.glob(f"*-{command}-*.yaml"), DIRECTORY / "common" / f"{command}.yaml"]:
        schema.validate(Loader(file.read_text()).get_single_data())


@pytest.mark.parametrize("model", BILLIONS)
def test_a_stored_config_has_the_published_number_of_parameters(model: str) -> None:
    config = read_model(str(DIRECTORY / "configs" / model))[1]
    assert total_parameters(config) / 1e9 == pytest.approx(BILLIONS[model], abs=0.006)


def test_commands_trust_the_code_of_a_tokenizer_that_is_code() -> None:
    """Moonlight's tokenizer is Python code. The preflight refuses the commands of other comments."""
    for name in NAMES:
        comment = (DIRECTORY / f"{name}.yaml").read_text().partition("extends:")[0]
        (command,) = re.findall(
            rf"^#   .*postlude {recipe_name_parts(name)[1]} models/{name} .*$", comment, re.MULTILINE
        )
        assert ("--trust_remote_code true" in command) == name.startswith("moonlight"), name


@pytest.mark.parametrize("name", PIPELINED)
def test_pipelined_recipe_has_two_stages_and_four_ranks_of_experts(name: str) -> None:
    layout = recipe(name).layout
    assert (layout.pp, layout.ep, layout.world_size) == (2, 4, 8)


def planned(name: str) -> tuple[str, str, str]:
    """Returns the planner command in a recipe's comment, and the memory and bubble that the comment states."""
    comment = (DIRECTORY / f"{name}.yaml").read_text().partition("extends:")[0]
    command = re.search(r"^#   postlude (plan .*)$", comment, re.MULTILINE)
    stated = re.search(r"^#   memory (.*) per rank, bubble (.*)$", comment, re.MULTILINE)
    assert command is not None
    assert stated is not None
    return command[1], stated[1], stated[2]


@pytest.mark.parametrize("name", NAMES)
def test_recipe_comment_equals_the_planner_and_fits(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, command, gpus = recipe_name_parts(name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    words, memory, bubble = planned(name)
    assert words.startswith(f"plan models/configs/{model}/config.json --recipe {command} models/{name}")
    assert main(shlex.split(words)) == 0, "it fits"
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert printed["memory"].strip() == memory
    assert printed["bubble"].strip() == f"{bubble} of the schedule"
    needed, usable = (float(size.removesuffix(" GiB")) for size in memory.split(" of "))
    assert needed <= USABLE_MEMORY * usable, "as much stays free as a search leaves"
    config, page = recipe(name), (ROOT / "docs" / "recipes.md").read_text()
    row = f"`{layout_degrees(config.layout)}` | {memory.partition(' of ')[0]} | {bubble} |"
    assert f"[{name}](../src/postlude/configs/models/{name}.yaml) | {row}" in page
    servers = config.rollout if command == "grpo" else None
    serving = int(servers.count * servers.gpus) if isinstance(servers, LaunchedVLLM) else 0
    assert config.layout.world_size + serving == gpus
    assert (servers is not None and not serving) == (name in WITHOUT_SERVERS)


# The tiny run of a recipe: its own file with another model, other data and smaller sizes, the native generator in place
# of servers, and a layout of the same kind. The rest is the recipe's: recompute, overlap, offload, optimizer, loss.
# Weights are in fp32 and the learning rate is small: steps amplify rounding, with `split` weights most. Measured with
# Qwen3-Next in pp=2,tp=2,ep=2 at lr 1e-3: GRPO losses differ after three steps by 2e-3 with `split`, by 1e-4 with fp32.
# Given one rank's gradients, all weights equal one rank's to the bit, and losses are within 5e-7. With their own, Adam
# turns gradients of 2e-8 and 3e-8 into first updates 1e-4 apart, and a few of 400,000 weights round to another bf16. In
# one run at most 12 of them, which moved a token to another expert, changed the next loss by 1.2e-3, and one rank with
# these weights had exactly the layout's loss. So only the first step of `split` is compared here, and later ones with
# given gradients in tests/engine/test_optimizers.py.
COMMON = ("--steps=3", "--save_every=0", "--export=false", "--loggers=[]", "--budget=256")
COMMON += ("--optimizer.lr=1e-4", "--optimizer.schedule.warmup=0", "--dtype=float32", "--weights=fp32")
ROWS = ("--batch_size=6", "--held_out.rows=0")
DATA = {"sft": PACKAGED / "data" / "sums.jsonl", "dpo": PACKAGED / "data" / "sum_pairs.jsonl"}
TOOL_SUMS = ROOT / "examples" / "data" / "tool_sums.jsonl"
FAULTY = Path(__file__).parent / "scaled_objective.py"
TINY = {
    "sft": (*COMMON, *ROWS),
    "dpo": (*COMMON, *ROWS),
    "grpo": (
        *COMMON,
        "--steps=2",  # of two optimizer steps
        f"--environment.path={TOOL_SUMS}",
        f"--environment.reward={ROOT / 'tests' / 'rollout' / 'functions.py'}:ascii_share",
        "--environment.workers=0",
        "--rollout=native",
        "--asynchrony.max_staleness=0",
        "--prompts_per_step=4",
        "--samples_per_prompt=3",
        "--minibatches=2",
        "--sampling.max_new_tokens=4",
        "--overlong=learn",  # random weights end hardly a completion
        "--evaluation.every=0",
    ),
}


def small_layout(layout: Layout) -> Layout:
    """Returns the same kind of layout on at most four ranks: no degree above two, and dp_shard 1 if others use four."""
    degrees = {axis.name: min(2, getattr(layout, axis.name)) for axis in fields(Layout)}
    others = degrees["pp"] * degrees["cp"] * degrees["tp"] * degrees["dp_replicate"]
    return Layout(**degrees | {"dp_shard": 1 if others == 4 else degrees["dp_shard"]})


def first_rows(command: str, directory: Path) -> tuple[str, ...]:
    """As many rows as the steps need, with which each run is over sooner."""
    if command not in DATA:
        return ()
    path = directory / DATA[command].name
    path.write_text("".join(DATA[command].read_text().splitlines(keepends=True)[:24]))
    return (f"--data.path={path}",)


def trained(group: Any, name: str, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = recipe(name, *TINY[recipe_name_parts(name)[1]], *overrides, f"--run={directory}")
    RECIPES[recipe_name_parts(name)[1]].run(config, "cpu")
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def assert_equal_to_one_rank(
    alone: list[dict[str, Any]], spread: list[dict[str, Any]], command: str, steps: int
) -> None:
    assert len([row for row in alone if row["step"]]) == steps
    for expected, actual in zip(alone, spread, strict=True):
        if not expected["step"]:
            continue
        assert math.isfinite(expected["grad_norm"])
        assert expected["grad_norm"] > 1e-2
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5, rel=1e-4)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        if command == "grpo":
            assert actual["rewards"] == expected["rewards"]
            assert len(set(expected["rewards"])) > 2, "completions differ in reward"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    written: dict[tuple[str, int], str] = {}

    def model(name: str, layers: int = 2) -> str:
        if (name, layers) not in written:
            directory = tmp_path_factory.mktemp("models") / name
            written[name, layers] = str(tiny_model(name, directory, layers))
        return written[name, layers]

    return model


OFTEN = (("qwen3-30b-a3b", "sft"), ("qwen3-8b", "dpo"), ("qwen3-next-80b-a3b", "grpo"))


def tiny_runs() -> list[Any]:
    """Every model with every algorithm; `make test` has each algorithm with one model."""
    cases = [(model, command) for model in BILLIONS for command in COMMANDS]
    return [
        pytest.param(model, command, marks=pytest.mark.slow if (model, command) in OFTEN else pytest.mark.thorough)
        for model, command in cases
    ]


@pytest.mark.parametrize(("model", "command"), tiny_runs())
def test_a_tiny_run_of_a_recipe_equals_one_rank(
    ranks: Ranks, tmp_path: Path, tiny: Callable[..., str], model: str, command: str
) -> None:
    alone: dict[str, list[dict[str, Any]]] = {}  # by objective: how a rank computes and stores changes no result
    checked = set()
    names = [name for name in NAMES if recipe_name_parts(name)[:2] == (model, command)]
    layers = 2 * max(recipe(name).layout.vpp for name in names)
    source = (f"--model={tiny(model, layers)}", *first_rows(command, tmp_path))
    for name in names:
        config = recipe(name)
        objective, layout = str(config.objective), small_layout(config.layout)
        if (objective, layout, config.overlap, config.recompute) in checked:
            continue
        checked.add((objective, layout, config.overlap, config.recompute))
        if objective not in alone:
            (alone[objective],) = ranks(1, trained, name, str(tmp_path / f"one-{name}"), *source, "--layout=pp=1")
        settings = (*source, f"--layout={layout_degrees(layout)}")
        spread = ranks(layout.world_size, trained, name, str(tmp_path / name), *settings)[0]
        assert_equal_to_one_rank(alone[objective], spread, command, steps=2 if command == "grpo" else 3)


@pytest.mark.slow
def test_first_step_with_the_recipes_weight_dtype_equals_one_rank(
    ranks: Ranks, tmp_path: Path, tiny: Callable[..., str]
) -> None:
    name = "qwen3-next-80b-a3b-sft-8gpus"
    config = recipe(name)
    assert (config.weights, config.optimizer.offload) == ("split", True)
    rows, data = [], first_rows("sft", tmp_path)
    for layout in (Layout(), small_layout(config.layout)):
        settings = (f"--model={tiny('qwen3-next-80b-a3b')}", *data, "--weights=split", "--steps=1")
        directory = str(tmp_path / str(layout))
        rows.append(
            ranks(layout.world_size, trained, name, directory, *settings, f"--layout={layout_degrees(layout)}")[0]
        )
    assert_equal_to_one_rank(*rows, "sft", steps=1)


@pytest.mark.slow
def test_zero_policy_loss_on_other_ranks_is_detected(ranks: Ranks, tmp_path: Path, tiny: Callable[..., str]) -> None:
    name = "qwen3-30b-a3b-grpo-8gpus"
    layout = small_layout(recipe(name).layout)

    def rows(layout: Layout, factor: float) -> list[dict[str, Any]]:
        faulty_settings = (
            f"--model={tiny('qwen3-30b-a3b')}",
            f"--objective={FAULTY}:scaled_on_other_ranks",
            "--steps=1",
        )
        settings = (*faulty_settings, f"--objective.settings.factor={factor}", f"--layout={layout_degrees(layout)}")
        return ranks(layout.world_size, trained, name, str(tmp_path / f"{layout}-{factor}"), *settings)[0]

    alone = rows(Layout(), 0.0)
    assert_equal_to_one_rank(alone, rows(layout, 1.0), "grpo", steps=1)
    with pytest.raises(AssertionError, match="comparison failed"):
        assert_equal_to_one_rank(alone, rows(layout, 0.0), "grpo", steps=1)
