"""`--help` of a recipe: the keys that most runs set; with `--help KEY` those of a section, with `--help-all` all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import PositiveInt

from postlude.checks import Bounds, check_bounds
from postlude.cli import main
from postlude.optimizer import LRSchedule
from postlude.options import Common
from postlude.recipes.config.help import full_help, key_help, short_help
from postlude.recipes.config.keys import Node, options_of, stored_schema, type_text
from postlude.recipes.config.schema import Settings, TaggedUnion, structure
from postlude.recipes.registry import RECIPES
from tests.test_start import started

EXAMPLE = Path(__file__).parents[2] / "examples/recipe.py"


class Section(Settings):
    often: Common[int] = 1
    """Set often."""
    rarely: int = 2
    """Set rarely."""


class Other(Settings):
    often: Common[int] = 3
    """Set often, too."""


class Config(Settings):
    steps: Common[Annotated[PositiveInt, Bounds(most=5)] | None] = None
    """Number of steps. It has more to say."""
    shown: Common[Annotated[Section | Other, TaggedUnion(section=Section, other=Other)]] = Section()
    """A common section."""
    hidden: Section = Section()
    """A section that is not common, but has a common key."""
    rest: bool = False
    """Another key."""


@pytest.fixture
def root() -> Node:
    return structure(Config, helpful=True)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "112")


def test_short_help_has_the_common_keys_and_names_the_others(root: Node) -> None:
    lines = short_help(root).splitlines()
    assert lines[0].startswith("The 3 keys that most runs set, of 7 ")
    assert [" ".join(line.split()) for line in lines if "--" in line][1:] == [
        "--steps N Number of steps.",
        "shown (1 more: --help shown)",
        '--shown KIND A common section: section, other. Default "section".',
        "--shown.often N Set often. Default 1.",
        "Further keys, explained by --help KEY:",
    ]
    assert lines[-1] == "  hidden (2 keys), rest"


def test_help_of_a_key_is_that_of_its_section(root: Node) -> None:
    assert key_help(root, "hidden").splitlines()[::2] == [
        "--hidden: keys and values",
        "--hidden.often: a whole number, default 1",
        "--hidden.rarely: a whole number, default 2",
    ]
    assert key_help(root, "--steps").splitlines()[1:] == ["    Number of steps. It has more to say."]
    assert "--shown.rarely (section): a whole number, default 2" in key_help(root, "shown")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("hiden", "hidden"), ("rarely", "shown.rarely"), ("shown.rarly", "shown.rarely"), ("oftn", "shown.often")],
)
def test_unknown_key_is_refused_with_the_nearest(root: Node, key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"'{re.escape(key)}' is not a key of the config; did you mean {meant}\?"):
        key_help(root, key)


def test_bounds_inside_of_a_common_option_hold() -> None:
    with pytest.raises(ValueError, match="warmup is -1"):
        check_bounds(LRSchedule(warmup=-1))


def described(root: Node) -> list[tuple[Any, ...]]:
    return [(o.path, o.kind, type_text(o.node), o.default, o.help, o.common) for o in options_of(root)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_stored_schemas_are_those_of_the_configs(recipe: str) -> None:
    of_classes = described(structure(RECIPES[recipe].config, helpful=True))
    assert described(stored_schema(recipe)) == of_classes, "write them by `python -m tests.recipes.keyword_types`"


@pytest.mark.parametrize("recipe", RECIPES)
def test_short_help_is_short_and_explains_where_the_rest_is(recipe: str) -> None:
    root = stored_schema(recipe)
    text = short_help(root)
    rows = re.findall(r"^  --(\S+) ", text, re.M)
    assert {"model", "run", "budget"} <= set(rows)
    assert 15 <= len(rows) <= 40
    assert len(text.splitlines()) < 110
    everything = full_help(root)
    for path in {option.path for option in options_of(root) if "." not in option.path}:
        assert re.search(rf"(^  --{path}[ .]|^{path} \(|[ ,]{path}[ ,]|[ ,]{path}$)", text, re.M), path
        assert f"--{path}" in key_help(root, path)
        assert f"--{path}" in everything
    assert "reference_every" in text or recipe not in ("grpo", "ppo")


def lines_of(command: str, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code in (0, 2)
    printed = capsys.readouterr()
    return iter([str(stop.value.code), *(printed.out + printed.err).splitlines()])


def test_commands_print_short_help_a_section_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    short, everything = list(lines_of("grpo --help", capsys)), list(lines_of("grpo --help-all", capsys))
    assert short[0] == everything[0] == "0"
    assert len(short) < 140
    assert len(everything) > 500
    assert any(line.startswith("  --dry-run") for line in short)
    assert list(lines_of("grpo --help asynchrony.max_staleness", capsys))[:2] == [
        "0",
        "--asynchrony.max_staleness: a whole number of at least 0, default 0",
    ]
    assert list(lines_of("demo -h steps", capsys))[1].startswith("--steps: ")
    assert list(lines_of("sft --help optimzer", capsys)) == [
        "2",
        "postlude sft: 'optimzer' is not a key of the config; did you mean optimizer? See `postlude sft --help`.",
    ]


def test_help_of_a_recipe_of_the_user_has_its_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines_of(f"{EXAMPLE}:RowMeanTrainer --help short_row_weight", capsys))
    assert "--short_row_weight: a number above 0, default 1.0\n    Weight of rows" in text


def test_help_reads_no_class_of_a_config() -> None:
    results = started(["grpo", "--help"], ["grpo", "--help", "rollout"], ["--help"])
    assert not any(code for code, _, _ in results)
    assert "--rollout.urls (server)" in results[1][1]
    *_, (_, _, modules) = results
    assert not {name for name in modules if name.split(".")[0] in ("torch", "pydantic", "yaml", "rich", "numpy")}
