"""The model that a run exports at its end: that of the last step, or with `export: best` of the best evaluated one."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from postlude.engine.adapters import export_adapter
from postlude.recipes.hub_push import push_model
from postlude.recipes.report.finish import model_card
from postlude.recipes.report.metrics import FALLING, SCORES
from postlude.recipes.run.directory import RunDirectory, checkpoint_step, is_rank0, read_metrics
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
    """Returns the name of the score in a line of metrics, or ""."""
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
