"""Trainer: what a recipe is made of, a config and its `train_step`. `training_run.py` is the loop around the steps.

All randomness derives from the seed and the step, so a resumed run equals an uninterrupted one, unless servers sample
its rollouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.checkpoint import checkpoint_problem
from postlude.engine.options import EngineOptions
from postlude.hf.export import ModelCard
from postlude.objectives import Objective
from postlude.objectives.loss import Reduction
from postlude.optimizer import OptimizerConfig
from postlude.recipes.config import schema
from postlude.recipes.config.recipe_configs import MASK
from postlude.recipes.config.settings import TrainingConfig
from postlude.recipes.mtp import MTPLoss, model_source
from postlude.recipes.report.metrics import LOSS, SHARED, SKIPPED
from postlude.recipes.run.config_changes import allowed_changes, check_same_config
from postlude.recipes.run.directory import ReadOnlyRun, RunDirectory, check_run, is_rank0
from postlude.recipes.run.health import Health
from postlude.recipes.run.monitor import RunMonitor
from postlude.recipes.run.progress import RunProgress
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.run.signals import StopSignals
from postlude.recipes.run.split import Split
from postlude.recipes.sequence_limit import sequence_limit

StepMetrics: TypeAlias = dict[str, Any]
"""Metrics of a step by name: numbers, or lists of numbers."""


class Closable(Protocol):
    """Anything with `close`."""

    def close(self) -> None:
        """Releases what it holds."""


Resource = TypeVar("Resource", bound=Closable)


class Trainer(ABC):
    """A recipe: how a step of it trains and how it is evaluated, with its engine. Every rank has one.

    The constructor reads and checks everything that the run needs. Nothing is written to the run directory but the
    files of servers that the constructor launches.
    """

    name: str
    """The recipe's name, under which its steps are logged."""
    config: TrainingConfig
    total_steps: int
    """The run ends after this step."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 for none. The first is before the recipe's own steps, and the last at the end."""
    evaluate_at_start: bool = True
    """Whether there is an evaluation before the recipe's own steps."""
    warm_start_steps: int = 0
    """SFT steps before the recipe's own steps."""
    loss_column: str = MASK
    """The column of a batch that marks the tokens to train on; the MTP loss is averaged over it."""

    def __init__(
        self,
        config: TrainingConfig,
        device: str,
        optimizer: OptimizerConfig | None = None,
        runtime: Runtime = LOCAL_RUNTIME,
    ) -> None:
        self.config, self.runtime = config, runtime
        self.resources = ExitStack()  # closed in reverse order by `close`
        self.progress = RunProgress()
        self.run: RunDirectory = ReadOnlyRun(config.run)  # until `TrainingRun` opens it
        self.plain_config = schema.plain(config)
        check_same_config(self.plain_config)
        self.allowed_changes = allowed_changes(config)
        check_run(config.run, self.plain_config, changes=self.allowed_changes)
        with ExitStack() as opened:
            self.monitor = opened.enter_context(closing(RunMonitor(config.run, config.observe, self.progress)))
            self._load(config, device, optimizer)
            opened.pop_all()  # `close` closes the monitor

    def _load(self, config: TrainingConfig, device: str, optimizer: OptimizerConfig | None) -> None:
        torch.manual_seed(config.seed)  # only a user's objective may use the global generator
        self.tokenizer: Any = config.load_tokenizer()
        self.with_mtp_loss = MTPLoss(config.mtp, self.loss_column)
        options = EngineOptions.of(
            config,
            optimizer=optimizer or config.optimizer,
            compute_dtype=None if config.dtype is None else getattr(torch, config.dtype),
            device=device,
            critic=config.has_value_head,
            mtp=config.mtp is not None,
            batch_invariant=config.batch_invariant,
        )
        self.engine = Engine(model_source(config.model, config.mtp), **vars(options))
        self.limit = sequence_limit(config, self.engine.config)
        self.step = 0  # finished steps
        self.signals = StopSignals(verbose=is_rank0())
        self.reductions: dict[str, Reduction] = {}  # how each metric is combined over minibatches
        self.layer_vectors: dict[str, list[float]] = {}  # sums over the step's minibatches
        self.health = Health(config.limits, config.max_skipped_steps, verbose=is_rank0())
        self.timer = StepTimer(self.progress, self.monitor.recorder)

    @property
    def phase(self) -> str:
        """The name under which the next step is logged: "sft" in a warm start, else the recipe's `name`."""
        return self.name

    @abstractmethod
    def train_step(self) -> StepMetrics:
        """Runs the next training step, of one or more optimizer steps, and returns its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Returns metrics of the current model on held-out data."""

    def split(self) -> Split | None:
        """Returns all tasks or rows, and which are held out, for the run directory; None for a recipe without."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the JSON-serialisable state that a checkpoint holds besides the engine."""

    @abstractmethod
    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        """Loads a checkpoint: the engine, and what `state` returned. Returns the checkpoint's `extra`."""

    def load_engine(self, checkpoint: Path) -> dict[str, Any]:
        extra = self.engine.load(checkpoint)
        self.step = extra["step"]
        self.health.restore(extra)
        return extra

    def save_models(self, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint. The engine is last: with it, the checkpoint is complete."""
        self.engine.save(checkpoint, extra=extra, tokenizer=self.tokenizer)

    def checkpoint_problem(self, checkpoint: Path) -> str:
        """Returns why a checkpoint cannot be loaded, or ""."""
        return checkpoint_problem(checkpoint)

    def prune_checkpoints(self, best: int | None) -> None:
        """Deletes old checkpoints, as `keep_checkpoints` says. That of the step `best` stays."""
        self.run.prune(self.config.keep_checkpoints, best)

    def export(self, path: Path, card: ModelCard | None) -> None:
        self.engine.export_model(path, tokenizer=self.tokenizer, card=card, overwrite=True)

    def train_batch(self, batch: Batch, objective: Objective) -> StepMetrics:
        """Runs one optimizer step on a batch; a training step may have several. Returns its metrics."""
        with self.timer("train"):
            result = self.engine.forward_backward(batch, self.with_mtp_loss(objective))
            update = self.engine.optimizer_step()
        self.reductions.update(result.reductions)
        for name, vector in result.layer_vectors.items():
            sums = self.layer_vectors.get(name, [0.0] * len(vector))
            self.layer_vectors[name] = [sum(pair) for pair in zip(sums, vector, strict=True)]
        self.health.check_update(result.loss, update.skipped, self.step + 1)
        metrics = {LOSS: result.loss, **result.metrics, "grad_norm": update.grad_norm, "lr": update.lr}
        return metrics | {SKIPPED: float(update.skipped), "tokens": result.tokens, SHARED: result.shared_tokens}

    def close_at_end(self, resource: Resource) -> Resource:
        """Returns `resource`, which `close` will close."""
        return self.resources.enter_context(closing(resource))

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Closes all resources if the block raises. A subclass's constructor uses it."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with closing(self.run), closing(self.monitor):
            self.resources.close()
