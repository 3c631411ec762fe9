"""The repository's configs are valid, and the small ones run."""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.packaged import DIRECTORY
from postlude.recipes.config.raw import Loader
from postlude.recipes.config.schema import file_schema, options, plain
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.report.summary import read_summary
from tests.conftest import Ranks

ROOT = Path(__file__).parents[2]
FILES = [*sorted(DIRECTORY.glob("*.yaml")), ROOT / "examples" / "calculator.yaml"]


def command_of(file: Path) -> str:
    named = file.stem.removeprefix("tiny-")
    return named if named in RECIPES else "grpo"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_is_valid(file: Path) -> None:
    load(RECIPES[command_of(file)].config, file)


@pytest.mark.parametrize(("command", "lr"), [("sft", 2e-5), ("distill", 2e-5), ("dpo", 1e-6), ("grpo", 1e-6)])
def test_the_default_learning_rate_fits_the_recipe(command: str, lr: float) -> None:
    """Also where other keys of the optimizer are set."""
    needed = {"sft": ["--data.path=x"], "dpo": ["--data.path=x"], "distill": ["--teacher=x"]}.get(command, [])
    for words in ([], ["--optimizer.weight_decay=0.1"]):
        assert load(RECIPES[command].config, None, [*needed, *words]).optimizer.lr == lr


def required_by_kinds(recipe: str) -> list[tuple[str, str, str]]:
    """Returns (section, kind, key) of every key that its section's kind requires."""
    required = []
    for option in options(RECIPES[recipe].config):
        section, _, key = option.path.rpartition(".")
        named = "*" in section or section == "objective.kl"  # by the user, or has no kinds itself
        named |= option.path.endswith("environment.sandbox.kind")  # the sandbox is given by its kind
        if option.kind and option.default is MISSING and not named:
            required.append((section, option.kind, key))
    return required


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_names_a_missing_key_of_a_section_kind(recipe: str, tmp_path: Path) -> None:
    values, file = {"max_turns": "2", "tools": "[a.py:b]"}, tmp_path / "config.yaml"
    required = required_by_kinds(recipe)
    for section, kind, key in required:
        siblings = [sibling for *where, sibling in required if where == [section, kind] and sibling != key]
        environment = section.removesuffix(".sandbox")
        agent = [f"--{environment}.kind=agent", f"--{environment}.path=x", f"--{environment}.command=[x]"]
        overrides = [
            f"--{section}.kind={kind}",
            *(agent if environment != section else []),
            *(f"--{section}.{sibling}={values.get(sibling, 'a.py:b')}" for sibling in siblings),
        ]
        paths = {recipe: ["--data.path=x"] for recipe in ("sft", "dpo", "kto", "rm") if section != "data"}
        overrides += {**paths, "distill": ["--teacher=x"]}.get(recipe, [])
        with pytest.raises(ConfigError) as error:
            load(RECIPES[recipe].config, None, overrides)
        assert str(error.value).startswith(f'config key "{section}.{key}" is missing on the command line; give ')
        assert str(error.value).endswith(f" there or as --{section}.{key}.")
        file.write_text("seed: 1\n" + "{}{}: {{kind: {}}}\n".format(*_indented(section), kind))
        with pytest.raises(ConfigError) as error:
            load(RECIPES[recipe].config, file, overrides[1:])
        assert f'"{section}.{key}" is missing in {file} line ' in str(error.value)


def _indented(section: str) -> tuple[str, str]:
    """Returns the lines of YAML before a section, and its name."""
    *outer, name = section.split(".")
    kinds = {"environment": "agent"}
    lines = (
        f"{part}:\n{'  ' * depth}kind: {kinds.get(part, 'on_policy')}\n{'  ' * depth}"
        for depth, part in enumerate(outer, 1)
    )
    return "".join(lines), name


PLACES = [
    ("sft", "data: {path: NAME}", "data.path", "rows.jsonl"),
    ("dpo", "data: {path: NAME}", "data.path", "rows.jsonl"),
    ("sft", "data: {path: a}\nobjective: NAME", "objective.file", "mine.py:name"),
    ("grpo", "objective: {kind: file, file: NAME}", "objective.file", "mine.py:name"),
    ("grpo", "environment: {kind: dataset, path: NAME, reward: math}", "environment.path", "rows.jsonl"),
    ("eval", "environment: {kind: dataset, path: a, reward: NAME}", "environment.reward", "mine.py:name"),
    ("grpo", "environment: {kind: episodes, path: a, episode: NAME, max_turns: 2}", "environment.episode", "mine.py:A"),
    ("grpo", "environment: {kind: conversation, path: a, reply: NAME, max_turns: 2}", "environment.reply", "mine.py:a"),
    (
        "grpo",
        "environment: {kind: tools, path: a, reward: math, tools: [NAME], max_turns: 2}",
        "environment.tools.0",
        "mine.py:search",
    ),
    ("distill", "teacher: NAME", "teacher", "models/one"),
    ("distill", "teacher: a\ndata: {kind: examples, path: NAME}", "data.path", "rows.jsonl"),
    ("eval", "model: NAME", "model", "models/one"),
    ("grpo", "rollout: {kind: vllm, python: NAME}", "rollout.python", "models/one"),
]


def at(config: Any, key: str) -> str:
    value = plain(config)
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    return str(value)


@pytest.mark.parametrize(("recipe", "text", "key", "name"), PLACES)
def test_paths_in_a_config_are_relative_to_it_first(
    recipe: str,
    text: str,
    key: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first_directory, second_directory = tmp_path / "here", tmp_path / "there"
    for folder in (first_directory, second_directory):
        folder.mkdir()
    monkeypatch.chdir(first_directory)
    file = Path("../there/config.yaml")
    file.write_text(text.replace("NAME", name))
    path = name.partition(":")[0]

    def read(*overrides: str) -> str:
        return at(load(RECIPES[recipe].config, file, overrides), key)

    assert read() == name, "what is in neither place is left for its reader to refuse"
    (first_directory / path).mkdir(parents=True)
    assert read() == name
    (second_directory / path).mkdir(parents=True)
    assert read() == f"../there/{name}"
    assert f"{path} exists next to the config and in the working directory; ../there/{path} is used" in caplog.text
    (first_directory / path).rmdir()
    caplog.clear()
    assert read() == f"../there/{name}"
    assert not caplog.text
    if not key[-1].isdigit():
        assert read(f"--{key}={name}") == name, "one of the command line is of the working directory"


def test_built_in_model_is_not_searched_next_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "tiny-moe").mkdir()
    (tmp_path / "config.yaml").write_text("model: tiny-moe")
    assert RECIPES["eval"].read(tmp_path / "config.yaml").model == "tiny-moe"


def test_run_name_comes_from_its_config_or_its_recipe_and_model(tmp_path: Path) -> None:
    file = tmp_path / "sums.yaml"
    file.write_text("model: tiny-moe")

    def run(recipe: str, file: Path | None, *overrides: str) -> str:
        return str(RECIPES[recipe].read(file, overrides).run)

    assert run("grpo", file) == run("grpo", file, "--steps=3") == "runs/sums"
    assert run("grpo", None) == "runs/grpo-tiny-dense"
    assert run("eval", None, "--model=models/Qwen3-0.6B/") == "runs/eval-Qwen3-0.6B"
    assert run("eval", None, "--model=runs/sums/model") == "runs/eval-sums"
    assert run("grpo", None, "--model=/data/sums/checkpoints/step-000100") == "runs/grpo-sums-step-000100"
    assert run("grpo", file, "--run=other/{name}-2") == "other/sums-2"
    assert run("grpo", file, "--run=mine") == "mine"


@pytest.mark.parametrize(("command", "words"), [("sft", ["--data.path=a"]), ("grpo", []), ("ppo", [])])
def test_a_run_has_one_length(tmp_path: Path, command: str, words: list[str]) -> None:
    """What is set later replaces the other one of `steps` and `epochs`."""
    read, file = RECIPES[command].read, tmp_path / "both.yaml"
    for text, override in (("steps: 9", "--epochs=2"), ("epochs: 2", "--steps=9"), ("steps: 9", "--epochs=none")):
        file.write_text(text)
        config = read(file, [*words, override])
        assert {name: getattr(config, name) for name in ("steps", "epochs")} == {
            "--epochs=2": {"steps": None, "epochs": 2.0},
            "--steps=9": {"steps": 9, "epochs": None},
            "--epochs=none": {"steps": None, "epochs": None},
        }[override]
        assert read(file, words, [{"epochs": 3}]).steps is None
    (tmp_path / "over.yaml").write_text("extends: both.yaml\nepochs: 4")
    assert (read(tmp_path / "over.yaml", words).steps, read(tmp_path / "over.yaml", words).epochs) == (None, 4.0)
    with pytest.raises(ConfigError, match="steps is 9 and epochs is 2, but each is the length of the run"):
        read(file, [*words, "--steps=9", "--epochs=2"])


def test_schedule_covers_all_optimizer_steps_by_default() -> None:
    grpo, decay = RECIPES["grpo"], ("--steps=10", "--minibatches=4", "--optimizer.schedule.shape=linear")
    warm = ("--warm_start.steps=7", "--warm_start.optimizer.schedule.shape=cosine")
    assert [optimizer.schedule.steps for optimizer in grpo.read(None, [*decay, *warm]).fit_optimizers(10)] == [7, 40]
    assert grpo.read(None, [*decay, "--optimizer.schedule.steps=50"]).fit_optimizers(10)[1].schedule.steps == 50
    decayed = grpo.read(None, [*decay, "--optimizer.schedule.steps=10", "--optimizer.schedule.floor=0.1"])
    assert decayed.fit_optimizers(10)[1].schedule.steps == 10, "then it stays at the floor"
    with pytest.raises(ConfigError, match=r"optimizer.schedule.steps is 10, but the run makes 40 optimizer steps: .*"):
        grpo.read(None, [*decay, "--optimizer.schedule.steps=10"])
    with pytest.raises(ConfigError, match=r"schedule\.steps is 3, but the run makes 5 optimizer steps"):
        RECIPES["sft"].read(
            None, ["--data.path=a", "--steps=5", "--optimizer.schedule.shape=linear", "--optimizer.schedule.steps=3"]
        )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_passes_the_json_schema(file: Path) -> None:
    schema = file_schema(RECIPES[command_of(file)].config)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(Loader(file.read_text()).get_single_data())


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"steps": 0}, "steps"),
        ({"stepps": 1}, ""),
        ({"optimizer": {"kind": "sgd", "eps": 1e-8}}, "optimizer"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"advantages": "best"}, "advantages"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"warm_start": {"steps": -1}}, "warm_start.steps"),
        ({"optimizer": {"lr": -1}}, "optimizer"),
        ({"layout": {"pp": 0}}, "layout"),
        ({"dtype": "none"}, None),
        ({"optimizer": "sgd"}, None),
        ({"layout": "pp=2"}, None),
        ({"objective": "mine.py:loss"}, None),
    ],
)
def test_json_schema_rejects_what_the_command_rejects(change: dict[str, Any], location: str | None) -> None:
    errors = list(Draft202012Validator(file_schema(RECIPES["grpo"].config)).iter_errors(change))
    assert [".".join(map(str, error.path)) for error in errors] == ([] if location is None else [location])


def test_json_schema_describes_every_option() -> None:
    schema = file_schema(RECIPES["grpo"].config)
    assert schema["properties"]["prompts_per_step"] == {
        "description": "Prompts per step.",
        "type": "integer",
        "exclusiveMinimum": 0,
        "default": 32,
        "x-common": True,
    }
    assert schema["$defs"]["SGD"]["properties"]["kind"] == {"const": "sgd"}
    assert schema["properties"]["environment"]["default"]["kind"] == "reasoning_gym"


def small_config_runs(group: Any, directory: str) -> dict[str, list[dict[str, Any]]]:
    """Runs the tiny configs one after another with few steps; each may use the results of earlier ones."""
    rows_by_config = {}
    for name, sizes in (
        ("demo", ("--warm_start.steps=3", "--steps=2", "--prompts_per_step=8", "--evaluation.tasks=8")),
        ("lora", ("--steps=2", "--prompts_per_step=8", "--evaluation.tasks=8", f"--model={directory}/demo/model")),
        ("tiny-sft", ("--steps=12",)),
        ("tiny-dpo", ("--steps=5", f"--model={directory}/tiny-sft/model")),
        ("tiny-distill", ("--steps=3", f"--teacher={directory}/tiny-sft/model")),
        ("tiny-eval", ("--tasks=8", f"--model={directory}/demo/model")),
    ):
        file = DIRECTORY / f"{name}.yaml"
        command = RECIPES[command_of(file)]
        config: Any = load(command.config, file, [f"--run={directory}/{name}", *sizes])
        command.run(config, "cpu")
        rows_by_config[name] = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return rows_by_config


@pytest.mark.slow
def test_small_configs_run_and_train(ranks: Ranks, tmp_path: Path) -> None:
    (rows_by_config,) = ranks(1, small_config_runs, str(tmp_path))
    assert rows_by_config["demo"][-1]["phase"] == "grpo"
    assert rows_by_config["lora"][-1]["step"] == 2
    assert (tmp_path / "lora" / "adapter" / "adapter_model.safetensors").is_file()
    assert rows_by_config["tiny-sft"][-1]["eval/loss"] < 0.6 * rows_by_config["tiny-sft"][0]["eval/loss"]
    assert rows_by_config["tiny-dpo"][0]["eval/accuracy"] == pytest.approx(0.5, abs=0.15), "no side is preferred yet"
    assert rows_by_config["tiny-dpo"][-1]["eval/accuracy"] > 0.8
    assert rows_by_config["tiny-distill"][-1]["eval/loss"] < rows_by_config["tiny-distill"][0]["eval/loss"]
    assert {"eval/pass@1", "eval/pass@4"} <= rows_by_config["tiny-eval"][0].keys()
    for name, rows in rows_by_config.items():
        unexplained = {key for row in rows for key in row if explain(key) is None} - {"step", "phase"}
        assert not unexplained, f"docs/metrics.md has every metric of {name}"
        summary = read_summary(tmp_path / name)
        assert summary.score is not None, f"{name} has a held-out score"
        assert summary.score.moved == (name != "tiny-eval"), f"{name} was measured before and after"
