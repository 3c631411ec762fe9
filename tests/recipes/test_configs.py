"""The configs that come with the repository are read, and the small ones do what they say."""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from postlude.recipes.commands import RECIPES
from postlude.recipes.config.reading import ConfigError, load
from postlude.recipes.config.schema import json_schema, options
from postlude.recipes.config.written import Loader
from postlude.recipes.metrics import explain
from postlude.recipes.verdict import read_verdict
from tests.conftest import Ranks

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*.yaml"))


def command_of(file: Path) -> str:
    named = file.stem.removeprefix("tiny-")
    return named if named in RECIPES else "grpo"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_is_read(file: Path) -> None:
    load(RECIPES[command_of(file)].config, file)


def required_by_kinds() -> list[tuple[str, str, str, str]]:
    """(recipe, section, kind, key) of every key that must be given once its section is of that kind."""
    found = []
    for recipe in RECIPES:
        for option in options(RECIPES[recipe].config):
            section, _, key = option.path.rpartition(".")
            if option.kind and option.default is MISSING and section != "objective.kl":  # which has no kinds itself
                found.append((recipe, section, option.kind, key))
    return found


@pytest.mark.parametrize(("recipe", "section", "kind", "key"), required_by_kinds())
def test_a_key_that_a_kind_requires_is_named_where_it_is_missing(
    recipe: str, section: str, kind: str, key: str, tmp_path: Path
) -> None:
    values = {"max_turns": "2", "tools": "[a.py:b]"}
    siblings = [each[3] for each in required_by_kinds() if each[:3] == (recipe, section, kind) and each[3] != key]
    given = [f"--{section}.kind={kind}", *(f"--{section}.{each}={values.get(each, 'a.py:b')}" for each in siblings)]
    given += {"sft": ["--data.path=x"], "dpo": ["--data.path=x"], "distill": ["--teacher=x"]}.get(recipe, [])
    with pytest.raises(ConfigError) as error:
        load(RECIPES[recipe].config, None, given)
    assert str(error.value).startswith(f'config key "{section}.{key}" is missing on the command line; give ')
    assert str(error.value).endswith(f" there or as --{section}.{key}.")
    file = tmp_path / "config.yaml"
    file.write_text("seed: 1\n" + "{}{}: {{kind: {}}}\n".format(*_indented(section), kind))
    with pytest.raises(ConfigError) as error:
        load(RECIPES[recipe].config, file, given[1:])
    assert f'"{section}.{key}" is missing in {file} line ' in str(error.value)


def _indented(section: str) -> tuple[str, str]:
    outer, dot, name = section.rpartition(".")
    return (f"{outer}:\n  kind: own_answers\n  " if dot else ""), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_editor_finds_no_mistake_in_a_config(file: Path) -> None:
    schema = json_schema(RECIPES[command_of(file)].config)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(Loader(file.read_text()).get_single_data())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"steps": 0}, "steps"),
        ({"stepps": 1}, ""),
        ({"optimizer": {"kind": "sgd", "eps": 1e-8}}, "optimizer"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"advantages": "best"}, "advantages"),
        ({"answers": {"top_p": 2}}, "answers.top_p"),
        ({"warm_start": {"steps": -1}}, "warm_start.steps"),
        ({"optimizer": {"lr": -1}}, "optimizer"),
        ({"layout": {"pp": 0}}, "layout"),
        ({"dtype": "none"}, None),
        ({"optimizer": "sgd"}, None),
        ({"layout": "pp=2"}, None),
        ({"objective": "mine.py:loss"}, None),
    ],
)
def test_an_editor_finds_the_mistakes_that_the_command_finds(change: dict[str, Any], where: str | None) -> None:
    found = list(Draft202012Validator(json_schema(RECIPES["grpo"].config)).iter_errors(change))
    assert [".".join(map(str, each.path)) for each in found] == ([] if where is None else [where])


def test_the_schema_describes_every_option() -> None:
    schema = json_schema(RECIPES["grpo"].config)
    assert schema["properties"]["steps"] == {
        "description": "Steps of GRPO, after those of the warm start.",
        "type": "integer",
        "exclusiveMinimum": 0,
        "default": 200,
    }
    assert schema["$defs"]["SGD"]["properties"]["kind"] == {"const": "sgd"}
    assert schema["properties"]["environment"]["default"]["kind"] == "reasoning_gym"


def all_small(group: Any, directory: str) -> dict[str, list[dict[str, Any]]]:
    """The tiny configs one after another, cut short; each may build on the ones before."""
    found = {}
    for name, sizes in (
        ("demo", ("--warm_start.steps=3", "--steps=2", "--prompts=8", "--evaluation.tasks=8")),
        ("tiny-sft", ("--steps=30",)),
        ("tiny-dpo", ("--steps=15", f"--model={directory}/tiny-sft/model")),
        ("tiny-distill", ("--steps=6", f"--teacher={directory}/tiny-sft/model")),
        ("tiny-eval", ("--tasks=8", f"--model={directory}/demo/model")),
    ):
        file = ROOT / "recipes" / f"{name}.yaml"
        command = RECIPES[command_of(file)]
        config: Any = load(command.config, file, [f"--run={directory}/{name}", *sizes])
        command.run(config, "cpu")
        found[name] = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return found


@pytest.mark.slow
def test_small_configs_run_and_learn(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks(1, all_small, str(tmp_path))
    assert found["demo"][-1]["phase"] == "grpo"
    assert found["tiny-sft"][-1]["eval/loss"] < 0.6 * found["tiny-sft"][0]["eval/loss"]
    assert found["tiny-dpo"][-1]["eval/loss"] < found["tiny-dpo"][0]["eval/loss"]
    assert found["tiny-distill"][-1]["eval/loss"] < found["tiny-distill"][0]["eval/loss"]
    assert {"eval/pass@1", "eval/pass@4"} <= found["tiny-eval"][0].keys()
    for name, rows in found.items():
        unexplained = {key for row in rows for key in row if explain(key) is None} - {"step", "phase"}
        assert not unexplained, f"docs/metrics.md has every metric of {name}"
        verdict = read_verdict(tmp_path / name)
        assert verdict.score is not None, f"{name} has a held-out score"
        assert verdict.score.moved == (name != "tiny-eval"), f"{name} was measured before and after"
