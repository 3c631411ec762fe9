"""No secret is in anything that a run writes or prints, and a run resumes when its secrets are given again."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from postlude.hf.export import ModelCard
from postlude.pool.limits import is_secret_name
from postlude.recipes.config.load import load, to_yaml
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.schema import plain
from postlude.recipes.config.secrets import MASK, mask, mask_arguments
from postlude.recipes.report.page import write_report
from postlude.recipes.run.config_changes import AllowedChanges
from postlude.recipes.run.directory import open_run
from postlude.recipes.run.files import read_config, read_record
from postlude.recipes.run.start_mode import resume_command

WORDS = (
    "--rollout=vllm",
    "--rollout.env.HF_TOKEN=hf_secret1",
    "--environment.settings={min_terms: 2, api_key: secret2, inner: [{dbPassword: secret3}], password: 987123, max: 7}",
    "--rollout.arguments=[--api-key, secret4, secret5, --max-model-len, '64', '--hf-token=secret6']",
)
JUDGE = "--environment.rewards.judge"
JUDGED = (
    "--environment=dataset",
    "--environment.path=rows.jsonl",
    f"{JUDGE}.kind=judge",
    f"{JUDGE}.url=https://user:secret7@host/v1?size=3&api_key=secret8",
    f"{JUDGE}.model=m",
    f"{JUDGE}.template={{completion}}",
    f"{JUDGE}.extra={{headers: {{Authorization: Bearer secret9}}, api_keys: [secret10], auth: {{value: secret11}}}}",
    f"{JUDGE}.system=it is my-own-secret12, or not",
)
SECRETS = ("secret", "98712")


def config_of(*words: str) -> GRPOConfig:
    return load(GRPOConfig, None, ["--model=tiny-dense", *words])


def shows_secret(text: str) -> bool:
    return any(re.search(rf"{secret}\d", text) for secret in SECRETS)


def test_run_files_contain_no_secret(tmp_path: Path) -> None:
    config = config_of(*WORDS)
    with open_run(tmp_path / "run", plain(config)) as run:
        run.log(1, {"loss": 1.0}, phase="train")
        run.record_start(step=1, command=resume_command(["grpo", *WORDS]))
    with open_run(tmp_path / "run", plain(config_of(*WORDS, "--steps=7")), changes=AllowedChanges(("steps",))) as run:
        run.record_start(step=1, command="")
    write_report([tmp_path / "run"], tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "report.html"} <= {path.name for path in files}
    assert not [path for path in files if shows_secret(path.read_bytes().decode(errors="replace"))]
    saved_config = read_config(tmp_path / "run")
    assert saved_config["rollout"]["env"] == {"HF_TOKEN": MASK}
    assert saved_config["environment"]["settings"] == {
        "min_terms": 2, "api_key": MASK, "inner": [{"dbPassword": MASK}], "password": MASK, "max": 7
    }  # fmt: skip
    arguments = ["--api-key", MASK, MASK, "--max-model-len", "64", f"--hf-token={MASK}"]
    assert saved_config["rollout"]["arguments"] == arguments
    assert not shows_secret(ModelCard(settings=saved_config).text("tiny", {}))
    assert not shows_secret(to_yaml(config, masked=True))


def test_secrets_of_a_judge_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In URLs, below names of secrets, and the value of a variable, also once the environment has it no more."""
    monkeypatch.setenv("MY_API_KEY", "my-own-secret12")
    with open_run(tmp_path / "run", plain(config_of(*JUDGED))) as run:
        run.log(1, {"loss": 1.0}, phase="train")
        run.record_start(step=1, command=resume_command(["grpo", *JUDGED]))
    write_report([tmp_path / "run"], tmp_path / "run")
    monkeypatch.delenv("MY_API_KEY")
    with open_run(tmp_path / "run", plain(config_of(*JUDGED))) as run:
        assert run.changed == {}
    judge = read_config(tmp_path / "run")["environment"]["rewards"]["judge"]
    assert judge["url"] == f"https://{MASK}@host/v1?size=3&api_key={MASK}"
    assert judge["extra"] == {"headers": {"Authorization": MASK}, "api_keys": [MASK], "auth": {"value": MASK}}
    assert judge["system"] == "it is ***MY_API_KEY***, or not"
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if shows_secret(path.read_bytes().decode(errors="replace"))]
    with pytest.raises(ValueError, match=r"judge.system is .* there and .* here"):
        open_run(tmp_path / "run", plain(config_of(*JUDGED[:-1], f"{JUDGE}.system=it was my-own-secret12, or not")))
    file = tmp_path / "again.yaml"
    file.write_text((tmp_path / "run" / "config.yaml").read_text())
    for key, word in (("url", JUDGED[3]), ("extra.headers.Authorization", JUDGED[6]), ("system", JUDGED[7])):
        with pytest.raises(ValueError, match=rf"judge.{key} has .*{re.escape(MASK)}.* for a secret. Give it again: --"):
            load(GRPOConfig, file, [other for other in JUDGED[3:] if other != word])
    assert load(GRPOConfig, file, JUDGED[3:]) == config_of(*JUDGED)


def test_files_of_a_config_with_secrets_are_for_their_owner(tmp_path: Path) -> None:
    for name, words, mode in (("private", WORDS, 0o600), ("open", (), 0o644)):
        old_umask = os.umask(0o022)
        try:
            with open_run(tmp_path / name, plain(config_of(*words))) as run:
                run.log(1, {"loss": 1.0}, phase="train")
                run.record_start(step=1, command="")
            with open_run(tmp_path / name, plain(config_of(*words, "--steps=7")), changes=AllowedChanges(("steps",))):
                pass
            write_report([tmp_path / name], tmp_path / name)
        finally:
            os.umask(old_umask)
        for file in ("config.yaml", "configs/001.yaml", "run.json", "report.html"):
            assert (tmp_path / name / file).stat().st_mode & 0o777 == mode, file


def test_changed_secret_is_not_a_config_change(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", plain(config_of(*WORDS))) as run:
        run.log(1, {"loss": 1.0}, phase="train")
    other_words = [word.replace("secret", "another") for word in WORDS]
    with open_run(tmp_path / "run", plain(config_of(*other_words))) as run:
        assert run.changed == {}
    other_words[2] = other_words[2].replace("min_terms: 2", "min_terms: 3")
    with pytest.raises(ValueError, match=r"environment.settings.min_terms is 2 there and 3 here"):
        open_run(tmp_path / "run", plain(config_of(*other_words)))
    written = tmp_path / "run" / "config.yaml"
    written.write_text(yaml.safe_dump(plain(config_of(*WORDS))))  # as it was written before secrets were masked
    with open_run(tmp_path / "run", plain(config_of(*WORDS))) as run:
        assert run.changed == {}
    assert not shows_secret(written.read_text())
    assert not shows_secret(json.dumps(read_record(tmp_path / "run")))


def test_resuming_without_secrets_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config_of(*WORDS[:2]), masked=True))
    with pytest.raises(ValueError, match=r"rollout.env.HF_TOKEN has \*\*\*.* --rollout.env.HF_TOKEN"):
        load(GRPOConfig, file, [])
    reloaded = load(GRPOConfig, file, [WORDS[1]])
    assert reloaded == config_of(*WORDS[:2])


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout.env.A", "secret1"],
        ["--rollout.env.A=secret1"],
        ["--rollout.env", "{A: secret1, B: secret2}"],
        ["--data.rollout.env={A: secret1}"],
        ["--rollout={kind: vllm, env: {A: secret1}}"],
        ["--environment.settings.api_key", "secret1"],
        ["--data.environment.settings={url: x, nested: {token: secret1}}"],
        ["--environment={kind: episodes, settings: {hfToken: secret1}}"],
        ["--environment.rewards.judge.url", "http://me:secret1@host"],
        ["--rollout", "http://secret1@host,http://other?token=secret2"],
        ["--rollout.arguments", "[--api-key, secret1]"],
        ["--environment.rewards.judge.extra.api_keys=[secret1]"],
    ],
)
def test_the_resume_command_shows_no_secret(words: list[str]) -> None:
    command = resume_command(["grpo", "my.yaml", *words, "--steps", "3"])
    assert "secret" not in command
    assert MASK in command
    assert shlex.split(command)[-2:] == ["--steps", "3"]


def test_values_that_are_no_secrets_are_not_masked() -> None:
    words = ["grpo", "my.yaml", "--rollout=vllm", "--environment.settings.max_tokens=5", "--rollout.api_key", "NAME"]
    assert mask_arguments(words) == words
    settings = {"keys": "a", "n_tokens": 3, "tokenizer": "x", "auth": True, "url": "hf://org/data@main?page=2"}
    plain_config = {
        "environment": {"settings": settings},
        "rollout": {"api_key": "NAME", "arguments": ["--key-size=8"]},
    }
    assert mask(plain_config) == plain_config
    names = ["api_key", "API-KEY", "apiKey", "api_keys", "token", "hf_token", "clientSecret", "db.password"]
    assert all(map(is_secret_name, [*names, "Authorization", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"]))
    assert not any(map(is_secret_name, ["max_tokens", "keys", "keyword", "monkey", "tokenizer", "secretary"]))
