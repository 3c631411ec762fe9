"""Preflight: everything that can be checked before a rank is started or the run directory is touched.

A recipe composes its `checks` from those in this file. Each returns one line about what it found, or raises. All are
run, so that one start reports every mistake. A check that depends on a failed one is left out.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from postlude.checks import USER_ERRORS, check_writable, error_message, nearest_existing
from postlude.data import Batch
from postlude.engine.adapters import Adapters
from postlude.error_output import escape_controls
from postlude.hf.family import Family
from postlude.hf.load import check_weights
from postlude.hf.read_model import Source, read_model, with_mtp
from postlude.layout import Layout, Stage
from postlude.lora import AdapterConfig
from postlude.model import LanguageModel, ModelConfig
from postlude.model.batch_invariant import check_batch_invariant
from postlude.model.blocks import BLOCKS
from postlude.model.fp8 import use_fp8
from postlude.ops.fp8 import MULTIPLE, check_fp8
from postlude.ops.kernels.capabilities import why_no_triton
from postlude.options import chosen_layers
from postlude.plan.memory import MemoryEstimate, estimate_memory, generator_bytes
from postlude.plan.parameter_count import count_parameters, total_parameters
from postlude.recipes.checks.objective_trial import try_mtp_processor, try_objective
from postlude.recipes.config.rollout import NativeRollout
from postlude.recipes.config.schema import plain
from postlude.recipes.config.settings import (
    MTPSettings,
    ObjectiveFile,
    SamplingSettings,
    TrainingConfig,
    build_objective,
)
from postlude.recipes.export import check_push
from postlude.recipes.mtp import describe_mtp, model_source
from postlude.recipes.report.formatting import format_bytes
from postlude.recipes.run.completion_tables import check_completion_tables
from postlude.recipes.run.config_changes import allowed_changes
from postlude.recipes.run.directory import OtherRun, check_run
from postlude.recipes.run.lock import LOCK, RunLock, check_overwrite, delete_run
from postlude.recipes.run.loggers import check_loggers
from postlude.recipes.run.monitor import check_port
from postlude.recipes.run.run_traces import check_traces
from postlude.recipes.sequence_limit import SequenceLimit, sequence_limit
from postlude.training_options import TrainingOptions

LOG = logging.getLogger(__name__)
SAVED_NUMBERS = 3  # of each parameter in a checkpoint: itself and at most two of the optimizer's


class PreflightError(ValueError):
    """Why a run cannot start: one line for each reason."""


@dataclass(frozen=True)
class Check:
    """One check. `run` returns a line about what it found, or raises. It depends on the checks in `after`."""

    name: str
    run: Callable[[], str]
    after: tuple[str, ...] = ()


def preflight(checks: Sequence[Check]) -> dict[str, str]:
    """Runs all checks. Returns a line for each, or raises all mistakes."""
    findings: dict[str, str] = {}
    mistakes: list[tuple[bool, str]] = []
    for check in checks:
        if all(name in findings for name in check.after):
            try:
                findings[check.name] = check.run()
            except USER_ERRORS as error:
                mistakes.append((isinstance(error, OtherRun), error_message(error)))
    if mistakes:  # a mistake in the config makes it another run's too, so that comes last
        raise PreflightError("\n".join(dict.fromkeys(text for _, text in sorted(mistakes, key=lambda entry: entry[0]))))
    return findings


@dataclass(frozen=True)
class LaunchInfo:
    """The device and the number of ranks that a recipe is started on."""

    device: str = "cpu"
    ranks: int = 1
    on_this_machine: bool = True
    """Whether the ranks run on this machine, so that its devices and memory can be checked."""
    ray: bool = False
    """Whether Ray assigns GPUs, and shares of them."""
    overwrite: bool = False
    """Whether to delete the run in the run directory once all checks passed."""


@dataclass
class PreflightInputs:
    """A config about to be run, and what its checks share."""

    config: Any
    launch: LaunchInfo
    on_success: list[Callable[[], None]] = field(default_factory=list)
    """Functions that write results of checks, such as encoded rows, to the run directory."""
    longest_prompt: int = 0
    """Tokens of the prompt of the longest request."""
    longest_completion: int = 0
    """Maximum number of tokens of its completion; 0 where no prompt was read, and training's counts."""
    grows: bool = False
    """Whether requests grow over several turns, up to the budget."""
    trained_tasks: list[int] = field(default_factory=list)
    """How many tasks of each environment are trained on, where the length of the run depends on it."""

    def succeed(self) -> None:
        """Writes what the checks made, after all of them passed."""
        for write in self.on_success:
            write()

    def max_request(self, sampling: SamplingSettings) -> tuple[int, str, str]:
        """Returns the maximum tokens of a request, prompt and completion, a clause that says why, and what to lower."""
        tokens, completion = self.limit.tokens(), self.longest_completion or sampling.max_new_tokens
        if self.grows:
            key = "budget" if tokens == self.config.budget else "context_length"
            return tokens, f"a conversation of several turns may have {key}={tokens} tokens", key
        total = self.longest_prompt + completion
        reason = f"a prompt of {self.longest_prompt} tokens and a completion of up to {completion} make {total}"
        return total, reason, "sampling.max_new_tokens"

    @cached_property
    def source(self) -> Source:
        config = self.config
        if isinstance(config, TrainingConfig):
            return model_source(config.model, config.mtp)
        return with_mtp(config.model) if config.sampling.draft else str(config.model)

    @cached_property
    def model(self) -> tuple[Family | None, ModelConfig]:
        return read_model(self.source)

    @cached_property
    def limit(self) -> SequenceLimit:
        return sequence_limit(self.config, self.model[1])

    @cached_property
    def size(self) -> int:
        return total_parameters(self.model[1])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.config.load_tokenizer()

    @property
    def dtype(self) -> torch.dtype:
        default = "bfloat16" if self.launch.device == "cuda" else "float32"
        dtype: torch.dtype = getattr(torch, self.config.dtype or default)
        return dtype

    @cached_property
    def adapters(self) -> Mapping[str, AdapterConfig]:
        """The adapters; none without LoRA. Raises ValueError for targets that the model does not have."""
        family, model = self.model
        return Adapters(self.config, model, family, BLOCKS).configs

    @cached_property
    def memory(self) -> list[MemoryEstimate]:
        config: TrainingConfig = self.config
        rollout, generator = getattr(config, "rollout", None), 0
        if isinstance(rollout, NativeRollout):
            fp8 = rollout.quantization is not None
            generator = generator_bytes(self.model[1], self.dtype.itemsize, fp8=fp8)
        estimates = estimate_memory(
            self.model[1],
            config,
            compute_bytes=self.dtype.itemsize,
            frozen=sum(total_parameters(read_model(name)[1]) for name in config.other_models),
            device=self.launch.device,
            mtp=config.mtp is not None,
            sizes=count_parameters(self.model[1], config.layout, adapters=self.adapters),
        )
        return [replace(estimate, generator=generator) for estimate in estimates]


def model_checks(inputs: PreflightInputs) -> Iterator[Check]:
    """Checks of every recipe: device, run directory, loggers, model."""
    yield Check("device", lambda: _device(inputs.launch))
    yield Check("run", lambda: _run(inputs))
    yield Check("loggers", lambda: check_loggers(inputs.config.loggers))
    if inputs.config.observe.metrics_port is not None and inputs.launch.on_this_machine:
        yield Check("observe.metrics_port", lambda: check_port(inputs.config.observe))
    if inputs.config.observe.traces:
        yield Check("observe.traces", check_traces)
    if getattr(getattr(inputs.config, "data", inputs.config), "save_completions", False):
        yield Check("completions", check_completion_tables)
    yield Check("model", lambda: _model(inputs))
    yield Check("weights", lambda: describe_weights(inputs.source, _cold_start(inputs)), after=("model",))
    yield Check("tokenizer", lambda: _tokenizer(inputs), after=("model",))
    if inputs.config.batch_invariant:
        yield Check("batch_invariant", lambda: _batch_invariant(inputs), after=("device", "model"))


def training_checks(inputs: PreflightInputs, trial: Batch) -> Iterator[Check]:
    """Checks of every recipe that trains: also layout, memory, disk and objective.

    The objective is called once, on `trial`: a small batch with the columns of the recipe.
    """
    yield from model_checks(inputs)
    if (mtp := inputs.config.mtp) is not None:
        yield Check("mtp", lambda: describe_mtp(inputs.config.model, mtp), after=("model",))
        if mtp.processor is not None:
            yield Check("mtp.processor", lambda: _mtp_processor(inputs, mtp, trial), after=("model",))
    if (repository := inputs.config.push_to_hub) is not None:
        yield Check("push_to_hub", lambda: check_push(repository))
    if inputs.config.lora is not None:
        yield Check("lora", lambda: _lora(inputs), after=("model",))
    yield Check("layout", lambda: _layout(inputs), after=("model",))
    if inputs.config.fp8:
        yield Check("fp8", lambda: _fp8(inputs), after=("device", "layout"))
    if inputs.config.head.backend == "triton":
        yield Check("head", lambda: _head(inputs), after=("device",))
    yield Check("memory", lambda: _memory(inputs), after=("device", "layout"))
    yield Check("disk", lambda: _disk(inputs), after=("model", "run"))
    yield Check("objective", lambda: _objective(inputs, trial), after=("model",))


def check_vocabulary(tokens: int, inputs: PreflightInputs) -> None:
    """Refuses a tokenizer whose largest token, `tokens`, is beyond the model's vocabulary."""
    size = inputs.model[1].vocab_size
    if tokens >= size:
        raise ValueError(
            f"the tokenizer of {inputs.config.model} gives token {tokens}, but the model's vocabulary ends at "
            f"{size - 1}. The two do not belong together: put the model's own tokenizer next to it."
        )


def print_findings(inputs: PreflightInputs, findings: Mapping[str, str], console: Console) -> None:
    """Prints a line for each check, and a table of the memory of each pipeline stage."""
    for name, finding in findings.items():
        console.print(escape_controls(f"{name}: {finding}"), markup=False, highlight=False, soft_wrap=True)
    if "memory" not in findings:
        return
    table = Table("memory per rank", *(f"stage {rank}" for rank in range(len(inputs.memory))))
    for part in fields(MemoryEstimate):
        table.add_row(part.name, *(format_bytes(getattr(rank_memory, part.name)) for rank_memory in inputs.memory))
    table.add_row("all", *(format_bytes(rank_memory.total) for rank_memory in inputs.memory))
    console.print(table)


def _device(start: LaunchInfo) -> str:
    device = start.device
    if not start.on_this_machine:
        return f"{device}, of the cluster"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is cuda, but torch {torch.__version__} sees no GPU on this machine. Use --device cpu, or "
            "install a torch with CUDA and look at nvidia-smi."
        )
    if device == "cuda":
        return f"{torch.cuda.device_count()} GPU(s)"
    if warning := busy_cpu_warning(os.getloadavg()[0], len(os.sched_getaffinity(0)), os.environ):
        LOG.warning("%s", warning)
    return device


def busy_cpu_warning(load: float, cores: int, environment: Mapping[str, str]) -> str:
    """Returns a warning about CPU threads that will wait for busy cores; empty if most cores are free or one is used.

    OpenMP's threads wait for each other after every operation, so one that has no core delays all.
    """
    if "OMP_NUM_THREADS" in environment or cores == 1 or load <= cores / 2:
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores} cores), and torch's threads slow each other down where "
        "cores are not free. OMP_NUM_THREADS=1 before the command may make a small model several times faster."
    )


def _run(inputs: PreflightInputs) -> str:
    path = check_writable("run", inputs.config.run, "--run")
    config = inputs.config
    if inputs.launch.overwrite:
        check_overwrite(path, plain(config))
        inputs.on_success.insert(0, partial(delete_run, path))
        return f"{path}, overwritten"
    check_run(path, plain(config), changes=allowed_changes(config))
    if (path / LOCK).exists():
        RunLock(path).release()  # raises if another process holds it
    return str(path)


def _model(inputs: PreflightInputs) -> str:
    config = inputs.model[1]
    if (rate := getattr(inputs.config, "selection_bias_rate", None)) is not None:
        config.with_selection_bias_rate(rate)  # raises if no router has a selection bias
    if (losses := getattr(inputs.config, "router_losses", None)) is not None:
        config.with_router_losses(losses)  # raises if there is no router
    length = inputs.limit.context_length
    context = "no limit of the context" if length is None else f"a context of {length:,} tokens"
    return f"{inputs.config.model}, {config.pattern}, {inputs.size:,} parameters, {context}"


def describe_weights(source: Source, if_random: str = "") -> str:
    """Checks the weights of a model. Returns a line about them."""
    count = check_weights(source)
    return f"random{if_random}" if count is None else f"{count} tensors"


def _cold_start(inputs: PreflightInputs) -> str:
    """Returns a clause about random weights that are to learn from rewards alone."""
    warm_start = getattr(inputs.config, "warm_start", None)
    if warm_start is None or warm_start.steps:
        return ""
    return "; only chance finds a reward. Set warm_start.steps if tasks have answers, or give a trained model"


def _tokenizer(inputs: PreflightInputs) -> str:
    tokenizer = inputs.tokenizer
    if tokenizer.eos_token_id is not None:
        check_vocabulary(tokenizer.eos_token_id, inputs)
    return f"{len(tokenizer)} tokens"


def _layout(inputs: PreflightInputs) -> str:
    config, layout = inputs.model[1], inputs.config.layout
    if layout.world_size != inputs.launch.ranks:
        raise ValueError(
            f"{layout} runs on {_ranks(layout.world_size)}, but {inputs.launch.ranks} are to be started. Start "
            f"{layout.world_size}, or choose degrees whose product pp·dp_replicate·dp_shard·cp·tp is "
            f"{inputs.launch.ranks}."
        )
    config.check_layout(layout)
    if layout.ep > 1 and not any(block.has_experts for block in config.blocks.values()):
        raise ValueError(f"ep is {layout.ep}, but {inputs.config.model} has no experts to spread. Use ep=1.")
    return f"{layout} on {_ranks(layout.world_size)}"


def _lora(inputs: PreflightInputs) -> str:
    trained = count_parameters(inputs.model[1], adapters=inputs.adapters).trained(Stage()).used
    return f"{trained:,} trained parameters"


def _batch_invariant(inputs: PreflightInputs) -> str:
    config, device = inputs.config, torch.device(inputs.launch.device)
    rollout = getattr(config, "rollout", None)
    keys, quantization = getattr(rollout, "kv_cache_dtype", "auto"), getattr(rollout, "quantization", None)
    options = config.batch_dependent if isinstance(config, TrainingOptions) else {}
    options |= {"rollout.kv_cache_dtype": None if keys == "auto" else keys, "rollout.quantization": quantization}
    check_batch_invariant(inputs.model[1], getattr(config, "layout", Layout()), options)
    if device.type != "cuda":
        return "each token is a product by itself, which is slow"
    if inputs.launch.on_this_machine and (reason := why_no_triton(device, inputs.dtype, False)) is not None:
        raise ValueError(
            f"batch_invariant needs Triton's kernels on a GPU, but {reason}. Set batch_invariant to false."
        )
    return "a token has the same bits in every batch"


def _fp8(inputs: PreflightInputs) -> str:
    """Describes products in FP8: how they are computed, and which layers stay in the compute dtype."""
    with torch.device("meta"):
        model = LanguageModel(inputs.model[1])
    unquantized = use_fp8(model, inputs.config.fp8, inputs.config.layout.tp)
    chosen, count = chosen_layers("fp8", inputs.config.fp8, len(model.layers)), len(model.layers)
    device = torch.device(inputs.launch.device)
    description = check_fp8(device, inputs.dtype) if inputs.launch.on_this_machine else "on the cluster's GPUs"
    names = ", ".join(unquantized[:3]) + (f" and {len(unquantized) - 3} more" if len(unquantized) > 3 else "")
    description += f", in {len(chosen)} of {count} layers" if len(chosen) < count else ""
    return description + (
        f"; {names} stay in {inputs.dtype}, as a size is no multiple of {MULTIPLE}" if unquantized else ""
    )


def _head(inputs: PreflightInputs) -> str:
    device = torch.device(inputs.launch.device)
    if inputs.launch.on_this_machine and (reason := why_no_triton(device, inputs.dtype, False)) is not None:
        raise ValueError(f"head.backend is triton, which cannot run: {reason}. Use auto or torch.")
    return "by triton"


def _memory(inputs: PreflightInputs) -> str:
    lasting = max(rank_memory.lasting for rank_memory in inputs.memory)
    host = max(rank_memory.host for rank_memory in inputs.memory)
    estimate = f"about {format_bytes(max(rank_memory.total for rank_memory in inputs.memory))} per rank"
    estimate += f", and {format_bytes(host)} of host memory for activations" if host else ""
    if not inputs.launch.on_this_machine:
        return estimate
    local_ranks = min(inputs.launch.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", inputs.launch.ranks)))
    room = _room(inputs.launch.device, local_ranks)
    if lasting > room:
        raise ValueError(
            f"a rank needs {format_bytes(lasting)} for weights, gradients and the optimizer's numbers, but has "
            f"{format_bytes(room)} of memory. Raise layout.dp_shard, tp or pp: the layout is {inputs.config.layout}."
        )
    if host > (host_room := _room("cpu", local_ranks)):
        raise ValueError(
            f"a rank's offloaded activations need {format_bytes(host)} of host memory, but each has "
            f"{format_bytes(host_room)}. Choose fewer layers in offload_activations, or lower budget."
        )
    return f"{estimate} of {format_bytes(room)}"


def _room(device: str, neighbours: int) -> int:
    """Returns the memory of one of the ranks of this machine, in bytes."""
    if device == "cuda":
        gpus = torch.cuda.device_count()
        smallest = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus))
        return smallest // -(-neighbours // gpus)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // neighbours


def _disk(inputs: PreflightInputs) -> str:
    path = inputs.config.run.expanduser().absolute()
    folder = nearest_existing(path)
    free, needed = shutil.disk_usage(folder).free, inputs.size * SAVED_NUMBERS * 4
    if needed > free:
        raise OSError(
            f"a checkpoint takes about {format_bytes(needed)}, but {folder} has {format_bytes(free)} left. Make "
            "room, or give --run a directory on another disk."
        )
    return f"{format_bytes(free)} left, about {format_bytes(needed)} a checkpoint"


def _objective(inputs: PreflightInputs, trial: Batch) -> str:
    objective = inputs.config.objective
    built = build_objective(objective)
    name = objective.file if isinstance(objective, ObjectiveFile) else type(built).__name__
    options: Any = {"devices": _trial_devices(inputs.launch), "value_head": inputs.config.has_value_head}
    try_objective(built, name, trial, inputs.model[1], inputs.dtype, **options)
    return f"{name}, which returns a loss"


def _mtp_processor(inputs: PreflightInputs, mtp: MTPSettings, trial: Batch) -> str:
    try_mtp_processor(mtp, trial, inputs.model[1], inputs.dtype, _trial_devices(inputs.launch))
    return f"{mtp.processor}, which returns a loss for each token"


def _trial_devices(start: LaunchInfo) -> list[str]:
    return ["cpu", "cuda"] if start.device == "cuda" and start.on_this_machine else ["cpu"]


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
