"""The section `sandbox` of configs: kinds by name or with keys, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from postlude.recipes.config.environments import AgentSettings, SandboxSettings
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.schema import Settings
from postlude.rollout.sandbox import Bubblewrap, Docker, Prefix


class Config(Settings):
    sandbox: SandboxSettings | None = None


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("sandbox: none", None),
        ("sandbox: bubblewrap", Bubblewrap()),
        ("sandbox: {kind: docker, image: python:3.12, mounts: [/data]}", Docker("python:3.12", mounts=("/data",))),
        ("sandbox: {kind: prefix, words: [nice, -n, '10']}", Prefix(("nice", "-n", "10"))),
    ],
)
def test_a_section_is_a_kind(tmp_path: Path, text: str, settings: object) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert load(Config, tmp_path / "config.yaml").sandbox == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sandbox: docker", 'config key "sandbox.image" is missing'),
        ("sandbox: {kind: bubblewrap, image: x}", "is a key of docker, podman, apptainer: set sandbox.kind"),
        ("sandbox: {kind: bubblewrap, mounts: [data]}", "mounts has 'data', but needs absolute paths"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(Config, tmp_path / "config.yaml")


def test_an_agent_that_is_no_command_has_no_sandbox() -> None:
    fields = {"path": "rows.jsonl", "function": "agent.py:run"}
    with pytest.raises(ValueError, match="sandbox isolates a command, but the agent is a function, which runs with"):
        AgentSettings(**fields, sandbox=Bubblewrap())
    assert AgentSettings(**fields).sandbox is None
