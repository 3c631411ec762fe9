"""Keys of other frameworks are refused with the key to use, and all unknown keys of a config at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.peer_keys import PEER_KEYS, equivalent
from postlude.recipes.config.schema import options
from postlude.recipes.registry import RECIPES
from tests.test_migration import PAGES

KEYS = {command: {option.path for option in options(recipe.config)} for command, recipe in RECIPES.items()}


def migration_rows(page: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields the recipe, their keys and our keys of each row of a page's tables."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        command = re.search(r"`postlude (\w+)`", section.partition("\n")[0])
        for line in section.splitlines() if command else ():
            if line.startswith("| `"):
                theirs, ours, *_ = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|"))
                yield command[1], theirs, [key.partition(":")[0] for key in ours]


def test_every_key_to_use_exists() -> None:
    exists = set().union(*KEYS.values())
    assert [key for keys in PEER_KEYS.values() for key in keys if key not in exists] == []
    names = [name for names in PEER_KEYS for name in names.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_messages_agree_with_the_migration_pages(page: Path) -> None:
    checked = 0
    for command, names, keys in migration_rows(page):
        for name in names if keys else ():
            named = equivalent(name.rpartition(".")[2], KEYS[command])
            if named is not None and "vllm_cfg" not in name and ".rollout." not in name:
                assert named in keys, f"{page.name}: {name}"
                checked += 1
    assert checked > 8


def test_every_key_of_trl_that_its_page_lists_is_refused_with_one_of_ours() -> None:
    checked = 0
    (page,) = (page for page in PAGES if page.stem == "from-trl")
    for command, names, keys in migration_rows(page):
        not_ours = set(names) - KEYS[command] - {"accuracy_reward", "solution"} if keys else set()
        for name in filter(str.isidentifier, not_ours):
            with pytest.raises(ConfigError) as refusal:
                load(RECIPES[command].config, None, [f"--{name}=1"])
            hinted = re.findall(r'(?:use|[Dd]id you mean) "(.+)"', str(refusal.value))
            assert set(hinted[:1]) & set(keys), f"{command}: {refusal.value}"
            checked += 1
    assert checked > 90


@pytest.mark.parametrize(
    ("command", "name", "key"),
    [
        ("sft", "learning_rate", "optimizer.lr"),
        ("grpo", "num_generations", "samples_per_prompt"),
        ("grpo", "max_prompt_length", "budget"),
        ("sft", "per_device_train_batch_size", "batch_size"),
        ("grpo", "per_device_train_batch_size", "prompts_per_step"),
        ("grpo", "beta", "objective.kl.coefficient"),
        ("dpo", "beta", "objective.beta"),
        ("grpo", "kl_coef", "reward_kl.coefficient"),
        ("ppo", "optimizer.learning_rate", "optimizer.lr"),
        ("ppo", "num_train_epochs", "epochs"),
        ("grpo", "num_iterations", "rollout_epochs"),
    ],
)
def test_key_of_another_framework_is_refused_with_the_one_to_use(command: str, name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf'"{name}" is unknown .*on the command line; use "{key}"\.'):
        load(RECIPES[command].config, None, [f"--{name}=1"])


def test_all_unknown_keys_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("learning_rate: 1\noptimizer: {lrr: 2}\nsteps: {a: 3}\nenvironment: {kind: dataset, pth: x}\n")
    with pytest.raises(ConfigError) as refusal:
        load(RECIPES["grpo"].config, file, ["--stepz=4"])
    assert re.findall(r'config key "([\w.]+)" is unknown', str(refusal.value)) == [
        "learning_rate", "optimizer.lrr", "steps.a", "environment.pth", "stepz"
    ]  # fmt: skip
