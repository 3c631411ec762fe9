"""Config files that extend another: their keys win, paths are relative to their own file, errors name the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.raw import Loader
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.config.schema import file_schema


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_keys_are_merged_and_the_nearest_file_wins(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml", "seed: 1\nbudget: 2048\noptimizer: {lr: 1e-3, betas: [0.8, 0.9], schedule: {warmup: 5}}"
    )
    write(
        tmp_path / "middle.yaml", "extends: base.yaml\nbudget: 1024\noptimizer: {schedule: {shape: linear}}\nsteps: 9"
    )
    last = write(
        tmp_path / "sub" / "last.yaml", "extends: ../middle.yaml\noptimizer: {betas: [0.7, 0.9]}\nlayout: pp=2"
    )
    config = load(GRPOConfig, last, ["--optimizer.lr=1e-4"])
    assert (config.seed, config.budget, config.steps, config.layout.pp) == (1, 1024, 9, 2)
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-4, (0.7, 0.9))
    assert (config.optimizer.schedule.shape, config.optimizer.schedule.warmup) == ("linear", 5)


def test_section_of_another_kind_replaces_the_base_section(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "rollout: {kind: vllm, count: 4, sync: network}\noptimizer: {lr: 1e-3, eps: 1e-6}")
    same_kind = write(tmp_path / "same.yaml", "extends: base.yaml\nrollout: {kind: vllm, gpus: 2}")
    other_file = write(
        tmp_path / "other.yaml", "extends: base.yaml\nrollout: {kind: generators, gpus: 2}\noptimizer: sgd"
    )
    assert load(GRPOConfig, same_kind).rollout.model_dump()["count"] == 4  # type: ignore[union-attr]
    config = load(GRPOConfig, other_file)
    assert (type(config.rollout).__name__, type(config.optimizer).__name__) == ("LaunchedGenerators", "SGD")
    assert config.rollout.count == 1  # type: ignore[union-attr]


def test_paths_are_relative_to_the_file_that_sets_them(tmp_path: Path) -> None:
    write(tmp_path / "common" / "base.yaml", "data: {path: rows.jsonl}")
    write(tmp_path / "common" / "rows.jsonl", "")
    own_file = write(tmp_path / "mine.yaml", "extends: common/base.yaml\ndata: {overlong: drop}")
    data = load(SFTConfig, own_file).data
    assert (data.path, data.overlong) == (tmp_path / "common" / "rows.jsonl", "drop")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: bas.yaml", r'there is no config file "{0}/bas.yaml", which "extends" names in {0}/mine.yaml line 1; '
         r'did you mean "{0}/base.yaml"\?'),
        ("extends: mine.yaml", 'config key "extends" in {0}/mine.yaml line 1 leads back to a file that it extends: '
         "{0}/mine.yaml → {0}/mine.yaml."),
        ("extends: loop.yaml", 'config key "extends" in {0}/loop.yaml line 1 leads back to a file that it extends: '
         "{0}/mine.yaml → {0}/loop.yaml → {0}/mine.yaml."),
        ("extends: [a.yaml]", 'config key "extends" is a list in {0}/mine.yaml line 1; give the path of one config '),
        ("extends:", 'config key "extends" is empty in {0}/mine.yaml line 1; give the path of one config file.'),
        ("extends: wrong.yaml", 'config key "stepps" is unknown in {0}/wrong.yaml line 1; did you mean "steps"'),
        ("extends: .", '"{0}", which "extends" names in {0}/mine.yaml line 1 is a directory'),
    ],
)  # fmt: skip
def test_error_names_the_file_of_the_mistake(tmp_path: Path, text: str, sentence: str) -> None:
    write(tmp_path / "base.yaml", "seed: 1")
    write(tmp_path / "loop.yaml", "extends: mine.yaml")
    write(tmp_path / "wrong.yaml", "stepps: 1")
    with pytest.raises(ConfigError, match=sentence.format(tmp_path)):
        load(GRPOConfig, write(tmp_path / "mine.yaml", text))


def test_extends_is_refused_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='config key "extends" is unknown on the command line'):
        load(GRPOConfig, None, [f"--extends={write(tmp_path / 'base.yaml', 'seed: 1')}"])


def test_json_schema_accepts_required_keys_from_the_base() -> None:
    check = Draft202012Validator(file_schema(SFTConfig))
    assert check.is_valid(Loader("extends: base.yaml\nsteps: 3").get_single_data())
    assert not check.is_valid(Loader("steps: 3").get_single_data())
