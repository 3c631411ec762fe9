"""`push_to_hub`: the exported model is uploaded, and what the Hub would refuse is refused before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.export import check_push
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.outcome import read_outcome
from tests.conftest import Ranks

TOKEN = "hf_secret"


def run_sft(group: Any, directory: str, failure: str | None) -> list[Any]:
    """Returns the calls of the Hub and what is printed."""
    calls: list[Any] = []

    class Api:
        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append((repository, options))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir()), commit_message))
            if failure is not None:
                raise OSError(failure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "HfApi", Api)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
        patch.setattr("postlude.recipes.export.LOG.warning", lambda text, *values: calls.append(text % values))
        options = ["--budget=128", "--batch_size=4", "--steps=1", "--loggers=[]", "--push_to_hub=me/model"]
        paths = [f"--data.path={directory}/rows.jsonl", f"--run={directory}/run"]
        RECIPES["sft"].run(load(RECIPES["sft"].config, None, [*options, *paths]), "cpu")
    return calls


@pytest.mark.slow
def test_model_is_uploaded_and_a_failure_leaves_the_run_finished(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    run = tmp_path / "run"
    (calls,) = ranks(1, run_sft, str(tmp_path), f"no connection with {TOKEN}.")
    created, (name, files, message), warning = calls
    assert created == ("me/model", {"private": True, "exist_ok": True})
    assert (name, message) == ("me/model", "Model after step 1")
    assert {"README.md", "config.json", "model.safetensors"} <= set(files)
    sentence = "was not pushed to me/model: no connection with ***. Repeat it with: hf upload me/model"
    assert warning == f"{run}/model {sentence} {run}/model"
    outcome = read_outcome(run)
    assert outcome is not None
    assert outcome.status == "finished"
    (calls,) = ranks(1, run_sft, str(tmp_path), None)
    assert len(calls) == 2, "the same command pushes again"


ME = {"name": "me", "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]}


@pytest.mark.parametrize(
    ("answer", "repository", "expected"),
    [
        (ME, "me/model", "me/model, as me"),
        (ME, "lab/model", "lab/model, as me"),
        (ME, "other/model", r"me is not a member of other\. Push to one of: me, lab, club\."),
        (ME, "club/model", "me may only read club"),
        (ME | {"auth": {"accessToken": {"role": "read"}}}, "me/model", "me may only read me"),
        (
            errors.LocalTokenNotFoundError("none"),
            "me/model",
            "there is no token of the Hub. Log in with `hf auth login`",
        ),
        (OSError("no route"), "me/model", "me/model, not checked: no route"),
    ],
)
def test_preflight_asks_who_may_write(
    monkeypatch: pytest.MonkeyPatch, answer: Any, repository: str, expected: str
) -> None:
    def whoami(_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    if expected.startswith(repository):
        assert check_push(repository) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            check_push(repository)


@pytest.mark.parametrize("options", [["--push_to_hub=model"], ["--push_to_hub=me/model", "--export=false"]])
def test_invalid_settings_are_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="push_to_hub"):
        load(RECIPES["sft"].config, None, ["--data.path=rows.jsonl", *options])
