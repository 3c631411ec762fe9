"""Configs in the package are found by name from any working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from postlude.cli import _parse
from postlude.recipes.config.load import ConfigError
from postlude.recipes.config.packaged import DIRECTORY, config_names, find_config
from postlude.recipes.registry import RECIPES

GRPO = RECIPES["grpo"]


@pytest.fixture(autouse=True)
def _in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", config_names())
def test_every_packaged_config_is_found_by_its_name(name: str) -> None:
    assert find_config(Path(name)) == DIRECTORY / f"{name}.yaml"


def test_every_packaged_config_belongs_to_one_recipe_which_reads_it() -> None:
    by_recipe = {command: config_names(command) for command in RECIPES}
    assert sorted(name for names in by_recipe.values() for name in names) == config_names()
    assert by_recipe["grpo"][:4] == ["demo", "lora", "models/gpt-oss-20b-grpo-16gpus", "models/gpt-oss-20b-grpo-8gpus"]
    for command, names in by_recipe.items():
        for name in names:
            RECIPES[command].read(Path(name))


def test_help_lists_the_configs_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("grpo", "demo, lora, one-gpu, smollm2"), ("sft", "tiny-sft"), ("ppo", "tiny-ppo")):
        with pytest.raises(SystemExit):
            _parse([command, "--help"])
        assert f"a config that comes with Postlude: {names}.\n" in capsys.readouterr().out


def test_a_packaged_config_finds_its_data_and_names_its_run(tmp_path: Path) -> None:
    config = GRPO.read(Path("demo"))
    assert config.environment.path.is_file()
    assert config.run == Path("runs/demo"), "relative to the working directory"


def test_user_file_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("steps: 7\n")
    assert GRPO.read(Path("demo")).steps == 7


def test_a_file_can_extend_a_packaged_config(tmp_path: Path) -> None:
    Path("mine.yaml").write_text("extends: demo\nsteps: 7\n")
    config, demo = GRPO.read(Path("mine.yaml")), GRPO.read(Path("demo"))
    assert config.model_dump() == demo.model_dump() | {"steps": 7}
    Path("demo.yaml").write_text("extends: demo\nsteps: 8\n")
    assert GRPO.read(Path("demo.yaml")).model_dump() == demo.model_dump() | {"steps": 8}
    Path("demo").write_text("steps: 9\n")
    assert GRPO.read(Path("mine.yaml")).seed == 0
    assert GRPO.read(Path("mine.yaml")).prompts_per_step != demo.prompts_per_step, "the file beside it comes first"


@pytest.mark.parametrize("name", ["dmo", "recipes/demo.yaml", "../demo.yml"])
def test_similar_config_name_is_suggested(name: str) -> None:
    with pytest.raises(ConfigError, match=r'did you mean "demo"\?'):
        GRPO.read(Path(name))


def test_paths_are_not_looked_up_in_the_package() -> None:
    for path in (Path("../configs/demo"), Path("/demo"), Path("data")):
        assert find_config(path) == path


def test_demo_is_a_command() -> None:
    """It takes the options of `grpo`, and no file."""
    options = _parse(["demo", "--steps", "3", "--run", "runs/x"])
    assert (options.module, options.config, options.parser.recipe.command) == ("recipe", Path("demo"), "grpo")
    assert options.overrides == ["--steps", "3", "--run", "runs/x"]
    assert options.resume_command.startswith("postlude demo --steps 3")
