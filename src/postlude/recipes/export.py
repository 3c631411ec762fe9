"""The model that a run exports at its end: that of the last step, or with `export: best` of the best evaluated one.

`push_to_hub` makes it a repository of the Hugging Face Hub. The token is what huggingface_hub finds: HF_TOKEN, or that
of `hf auth login`.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from postlude.data.hub import failure_reason
from postlude.engine.adapters import export_adapter
from postlude.json_log import print_line
from postlude.recipes.report.finish import model_card
from postlude.recipes.report.metrics import FALLING, SCORES
from postlude.recipes.run.directory import RunDirectory, checkpoint_step, is_rank0
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.start_mode import EXPORTED_ADAPTER, EXPORTED_MODEL
from postlude.recipes.trainer import Trainer
from postlude.world.agreement import on_rank0

LOG = logging.getLogger("postlude")


class BestCheckpoint:
    """The checkpoint with the best score of a run, which is the one that its summary reports. Every rank has one.

    Of equal scores the first counts. Steps before the recipe's own have none.
    """

    def __init__(self, *, kept: bool, after: int) -> None:
        self.kept, self.after = kept, after
        self.step: int | None = None
        """Its step; None before the first evaluation, and if it is not kept."""
        self._line: Mapping[str, Any] = {}  # the metrics of the step, on rank 0

    def resume(self, run: RunDirectory) -> None:
        """Finds it among the steps that are logged and have a checkpoint."""

        def lines() -> list[dict[str, Any]]:
            saved = {checkpoint_step(path) for path in run.checkpoints()}
            return [line for line in read_metrics(run.path) if line["step"] in saved]

        self.step, self._line = None, {}
        self._choose(run, lines)

    def update(self, run: RunDirectory, step: int, metrics: Mapping[str, Any]) -> None:
        """Compares the metrics of a step with those of the best one before."""
        self._choose(run, lambda: [{"step": step} | dict(metrics)])

    def _choose(self, run: RunDirectory, lines: Any) -> None:
        def choose() -> int | None:
            best = _best([self._line, *lines()], self.after)
            if best and best is not self._line:
                self._line = best
                metric = _score_name(best)
                run.record(best={"step": best["step"], "metric": metric, "value": best[metric]})
            return best.get("step")

        if self.kept:
            self.step = on_rank0(choose)


def _best(lines: Iterable[Mapping[str, Any]], after: int) -> Mapping[str, Any]:
    best: Mapping[str, Any] = {}
    for line in lines:
        name = _score_name(line)
        if not name or line["step"] <= after:
            continue
        sign = -1 if name in FALLING else 1
        if name != _score_name(best) or sign * line[name] > sign * best[name]:
            best = line
    return best


def _score_name(line: Mapping[str, Any]) -> str:
    return next((name for name in SCORES if math.isfinite(line.get(name, math.nan))), "")


def export_run(trainer: Trainer, best: BestCheckpoint) -> None:
    """Exports the model, in Hugging Face's format if a family describes it, and adapters. Every rank calls it."""
    run, step, config = trainer.run, trainer.step, trainer.config
    if best.step is not None and best.step != step:
        step = best.step
        trainer.engine.load(run.checkpoint(step))
    elif config.export == "best" and best.step is None and is_rank0():
        LOG.warning("export is best, but the run ended before a step was evaluated: the last step is exported.")
    card = model_card(run.path, trainer.name, str(config.model), step) if is_rank0() else None
    trainer.export(run.path / EXPORTED_MODEL, card)
    if config.lora is not None:
        export_adapter(trainer.engine, run.path / EXPORTED_ADAPTER, base=str(config.model))
    run.record(exported_step=step)


def push_run(trainer: Trainer, best: BestCheckpoint) -> None:
    """Uploads the exported model from rank 0, if the config says so."""
    repository = trainer.config.push_to_hub
    if repository is not None and is_rank0():
        push_model(trainer.run.path / EXPORTED_MODEL, repository, best.step or trainer.step)


def push_model(folder: Path, repository: str, step: int) -> None:
    """Uploads a model, to a new private repository if there is none. A failure is logged, with how to repeat it."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Model after step {step}")
    except Exception as error:  # whatever the library and its HTTP client raise
        LOG.warning(
            "%s was not pushed to %s: %s. Repeat it with: hf upload %s %s",
            folder,
            repository,
            _reason(error),
            repository,
            shlex.quote(str(folder)),
        )
    else:
        print_line(f"pushed: https://huggingface.co/{repository}")


def check_push(repository: str) -> str:
    """Refuses a repository that the user cannot write. Returns a line about it. Without a connection all is allowed."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"push_to_hub is {repository}, but HF_HUB_OFFLINE is set. Unset it, or leave push_to_hub out.")
    login = "Log in with `hf auth login`, or set HF_TOKEN, with a token that can write"
    try:
        user = HfApi().whoami()
    except errors.LocalTokenNotFoundError as error:
        raise ValueError(f"push_to_hub is {repository}, but there is no token of the Hub. {login}.") from error
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ValueError(f"push_to_hub is {repository}, but the Hub refuses the token. {login}.") from error
        return f"{repository}, not checked: {_reason(error)}"
    except Exception as error:
        return f"{repository}, not checked: {_reason(error)}"
    owner = repository.partition("/")[0]
    roles = {user["name"]: "admin"} | {each["name"]: each.get("roleInOrg", "") for each in user.get("orgs", [])}
    if owner not in roles:
        raise ValueError(
            f"push_to_hub is {repository}, but {user['name']} is not a member of {owner}. Push to one of: "
            f"{', '.join(roles)}."
        )
    token_role = user.get("auth", {}).get("accessToken", {}).get("role")
    if "read" in (token_role, roles[owner]):
        raise ValueError(f"push_to_hub is {repository}, but {user['name']} may only read {owner}. {login}.")
    return f"{repository}, as {user['name']}"


def _reason(error: BaseException) -> str:
    from huggingface_hub import get_token

    reason, token = failure_reason(error), get_token()
    return reason.replace(token, "***") if token else reason
