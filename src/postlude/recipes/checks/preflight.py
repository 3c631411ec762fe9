"""Preflight: what can be known before a rank is started or a run's directory is touched is looked at here.

A recipe composes its `checks` of those in this file. Each looks at one thing and says in a line what it found, or in a
sentence what is wrong. All are looked at, so that one start tells of every mistake; a check that rests on another is
left out where that one failed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from postlude.checks import USER_ERRORS, check_writable, error_message, nearest_existing
from postlude.data import Batch
from postlude.data.chat import Encoder
from postlude.generate.generator import check_draft
from postlude.hf.family import Family
from postlude.hf.load import check_weights, load_tokenizer
from postlude.hf.model_source import Source
from postlude.hf.read_model import read_model, with_mtp
from postlude.hf.tokenizer import first_difference
from postlude.model import ModelConfig
from postlude.ops.kernels.capabilities import why_no_triton
from postlude.options import check_overlap
from postlude.plan.memory import MemoryEstimate, estimate_memory
from postlude.plan.parameter_count import total_parameters
from postlude.recipes.checks.objective_trial import try_objective
from postlude.recipes.config.schema import plain
from postlude.recipes.config.settings import (
    EnvironmentSettings,
    EvaluationSettings,
    ObjectiveFile,
    PromptSettings,
    SamplingSettings,
    ToolSettings,
    TrainingConfig,
    TurnSettings,
    build_objective,
)
from postlude.recipes.data.encoded_rows import CACHE, EncodedRows
from postlude.recipes.data.rows import Examples, Pairs, hold_out_rows
from postlude.recipes.mtp import describe_mtp, model_source
from postlude.recipes.prompts import build_environment, encode_prompt, prompt_encoder
from postlude.recipes.report.formatting import format_bytes
from postlude.recipes.run.config_changes import MAY_CHANGE
from postlude.recipes.run.directory import check_run
from postlude.recipes.run.lock import LOCK, RunLock
from postlude.recipes.run.loggers import check_loggers
from postlude.rollout.environments import Environment, is_chat
from postlude.rollout.rewards import check_reward_signature
from postlude.rollout.tasks import PAGE, Task, Tasks, hold_out

SAVED = 3  # numbers a parameter has in a checkpoint: itself and, at most, two of the optimizer's


class PreflightError(ValueError):
    """A run that cannot be: every reason that was found, a line each."""


@dataclass(frozen=True)
class Check:
    """One thing to look at. `look` says what it found, or raises a sentence. It rests on the checks in `after`."""

    name: str
    look: Callable[[], str]
    after: tuple[str, ...] = ()


def preflight(checks: Sequence[Check]) -> dict[str, str]:
    """Look at everything. Returns a line for each check, or raises every mistake there is."""
    found: dict[str, str] = {}
    mistakes: list[str] = []
    for check in checks:
        if all(name in found for name in check.after):
            try:
                found[check.name] = check.look()
            except USER_ERRORS as error:
                mistakes.append(error_message(error))
    if mistakes:
        raise PreflightError("\n".join(dict.fromkeys(mistakes)))
    return found


@dataclass(frozen=True)
class LaunchInfo:
    """How a recipe is to be started: on which kind of device, on how many ranks."""

    device: str = "cpu"
    ranks: int = 1
    here: bool = True
    """Whether on this machine, so that its devices and its memory are those of the ranks."""
    ray: bool = False
    """Whether Ray gives out GPUs, and shares of them."""


@dataclass
class PreflightInputs:
    """A config about to be run, and what its checks share."""

    config: Any
    launch: LaunchInfo
    others: list[str] = field(default_factory=list)
    """Models that are held beside the trained one: a reference, a teacher."""
    keep: list[Callable[[], None]] = field(default_factory=list)
    """What was found and is worth keeping in the run's directory, once nothing is amiss and it may be touched."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that was looked at."""
    grows: bool = False
    """Whether what is asked grows over several turns, up to the budget."""

    def most(self, answers: SamplingSettings) -> tuple[int, str, str]:
        """The most tokens, prompt and answer, that a run asks for; a clause that says why, and what to lower."""
        budget, answer = self.config.budget, answers.max_new_tokens
        if self.grows:
            return budget, f"a conversation of several turns may have budget={budget} tokens", "budget"
        together = self.longest_prompt + answer
        why = f"a prompt of {self.longest_prompt} tokens and an answer of up to {answer} make {together}"
        return together, why, "sampling.max_new_tokens"

    @cached_property
    def source(self) -> Source:
        """What the model is loaded from."""
        config = self.config
        if isinstance(config, TrainingConfig):
            return model_source(config.model, config.mtp)
        return with_mtp(config.model) if config.sampling.draft else str(config.model)

    @cached_property
    def model(self) -> tuple[Family | None, ModelConfig]:
        """The model's family, if it has one, and its config."""
        return read_model(self.source)

    @cached_property
    def size(self) -> int:
        """The number of the model's parameters."""
        return total_parameters(self.model[1])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.config.model)

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        default = "bfloat16" if self.launch.device == "cuda" else "float32"
        found: torch.dtype = getattr(torch, self.config.dtype or default)
        return found

    @cached_property
    def memory(self) -> list[MemoryEstimate]:
        """What a rank of each pipeline stage will need."""
        config: TrainingConfig = self.config
        return estimate_memory(
            self.model[1],
            config.layout,
            budget=config.budget,
            compute_bytes=self.dtype.itemsize,
            moments=config.optimizer.fp32_per_parameter(config.weights),
            weights=config.weights,
            recompute=config.recompute,
            frozen=sum(total_parameters(read_model(name)[1]) for name in self.others),
            device=self.launch.device,
            mtp=config.mtp is not None,
            overlap=config.overlap,
            gather_once=config.gather_once,
        )


def model_checks(inputs: PreflightInputs) -> Iterator[Check]:
    """What every recipe needs: a device, a place to write to, a model that can be read."""
    yield Check("device", lambda: _device(inputs.launch))
    yield Check("run", lambda: _run(inputs))
    yield Check("loggers", lambda: check_loggers(inputs.config.loggers))
    yield Check("model", lambda: _model(inputs))
    yield Check("weights", lambda: _weights(inputs.source), after=("model",))
    yield Check("tokenizer", lambda: _tokenizer(inputs), after=("model",))


def training_checks(inputs: PreflightInputs, trial: Batch) -> Iterator[Check]:
    """What every recipe that trains needs besides: a layout that divides the model, room in memory and on disk.

    The objective is called once, on `trial`: a small batch with the columns that the recipe gives it.
    """
    yield from model_checks(inputs)
    if (ahead := inputs.config.mtp) is not None:
        yield Check("mtp", lambda: describe_mtp(inputs.config.model, ahead), after=("model",))
    yield Check("layout", lambda: _layout(inputs), after=("model",))
    if inputs.config.head.backend == "triton":
        yield Check("head", lambda: _head(inputs), after=("device",))
    yield Check("memory", lambda: _memory(inputs), after=("device", "layout"))
    yield Check("disk", lambda: _disk(inputs), after=("model", "run"))
    yield Check("objective", lambda: _objective(inputs, trial), after=("model",))


def environment_checks(
    inputs: PreflightInputs,
    settings: EnvironmentSettings,
    answers: SamplingSettings,
    *,
    example: Callable[[Task, Mapping[str, Any]], Any] | None = None,
    held_out: EvaluationSettings | None = None,
) -> Iterator[Check]:
    """Tasks that can be asked and a judge that can be called. `example` makes of a task one to learn by heart."""

    def look() -> str:
        check_reward_signature(getattr(settings, "reward", None))
        # One judge, in a process of its own whatever the config says: there it can be timed out.
        config, judged = inputs.config, settings.model_copy(update={"workers": 1})
        with closing(build_environment(judged, config.seed, inputs.tokenizer, answers, config.budget)) as environment:
            if held_out is not None:
                hold_out(environment.tasks, held_out.tasks, held_out.split_by)
            made = not isinstance(settings, PromptSettings)  # tasks that are made: the first of them speak for all
            encoder = prompt_encoder(environment, inputs.tokenizer, answers, config.budget)
            inputs.grows = isinstance(settings, TurnSettings) and settings.max_turns > 1
            _tasks(inputs, environment.tasks, PAGE if made else len(environment.tasks), encoder, answers, example)
            first = environment.tasks[0]
            if isinstance(settings, TurnSettings) and is_chat(first.prompt):
                _turns(environment, inputs.tokenizer, settings)
            said = first.example.get("answer")
            environment.trial_call(first, said if isinstance(said, str) else "")
            return f"{len(environment.tasks)} tasks, and a judge that answers"

    yield Check("tasks", look, after=("tokenizer",))
    if answers.draft is not None:
        yield Check("draft", lambda: _draft(inputs), after=("model",))
    if answers.stop_tokens:
        yield Check("stop tokens", lambda: _stop_tokens(inputs, answers), after=("tokenizer",))


def dataset_checks(inputs: PreflightInputs, data: Examples | Pairs) -> Iterator[Check]:
    """Rows that can all be read and encoded, and are within the budget."""

    def look() -> str:
        rows: EncodedRows[Any] = data.read(inputs.tokenizer, inputs.config.budget, inputs.config.run / CACHE)
        check_vocabulary(rows.largest, inputs)
        inputs.keep.append(rows.store)
        if inputs.config.held_out.rows:
            hold_out_rows(rows, inputs.config.held_out.rows)
        return str(rows)

    yield Check("data", look, after=("tokenizer",))


def teacher_checks(inputs: PreflightInputs, teacher: str, top_k: int) -> Iterator[Check]:
    """A teacher that can be read and knows the student's tokens."""

    def look() -> str:
        _, theirs = read_model(teacher)
        check_teacher(inputs.config.model, inputs.model[1], teacher, theirs, top_k)
        theirs.check_layout(inputs.config.layout)
        told = check_teacher_tokens(inputs.config.model, inputs.tokenizer, teacher)
        return f"{teacher}, {total_parameters(theirs):,} parameters, {told}"

    yield Check("teacher", look, after=("model", "layout", "tokenizer"))
    yield Check("teacher's weights", lambda: _weights(teacher), after=("teacher",))


def check_teacher(model: str, ours: ModelConfig, teacher: str, theirs: ModelConfig, top_k: int) -> None:
    """Refuse a teacher of other tokens, or fewer than are to be compared."""
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"the student {model} has {ours.vocab_size} tokens and the teacher {teacher} {theirs.vocab_size}. Distil "
            "between models of one tokenizer."
        )
    if top_k > theirs.vocab_size:
        raise ValueError(f"top_k is {top_k}, but the teacher {teacher} has {theirs.vocab_size} tokens. Lower top_k.")


def check_teacher_tokens(model: str, ours: PreTrainedTokenizerBase, teacher: str) -> str:
    """Refuse a teacher to whom an id is another token. Returns a clause about its tokenizer.

    Which token begins and which ends a text may differ, as they do between a base model and its chat model.
    """
    try:
        theirs = load_tokenizer(teacher)
    except FileNotFoundError:
        return "whose tokenizer is not there to be compared"
    difference = first_difference(ours, theirs)
    if difference is not None:
        number, own, other = difference
        raise ValueError(
            f"token {number} is {own} to the student {model} and {other} to the teacher {teacher}. Distil between "
            "models of one tokenizer."
        )
    for name in ("bos_token", "eos_token"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"the student's tokens, with {name} {getattr(theirs, name)} where it has {getattr(ours, name)}"
    return "the student's tokens"


def check_vocabulary(tokens: int, inputs: PreflightInputs) -> None:
    """Refuse a tokenizer that gives a token, the largest of which is `tokens`, that the model has no place for."""
    size = inputs.model[1].vocab_size
    if tokens >= size:
        raise ValueError(
            f"the tokenizer of {inputs.config.model} gives token {tokens}, but the model's vocabulary ends at "
            f"{size - 1}. The two do not belong together: put the model's own tokenizer beside it."
        )


def print_findings(inputs: PreflightInputs, found: Mapping[str, str], console: Console) -> None:
    """A line for each check, and a table of the memory that a rank of each pipeline stage needs."""
    for name, line in found.items():
        console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)
    if "memory" not in found:
        return
    table = Table("memory a rank", *(f"stage {rank}" for rank in range(len(inputs.memory))))
    for part in fields(MemoryEstimate):
        table.add_row(part.name, *(format_bytes(getattr(each, part.name)) for each in inputs.memory))
    table.add_row("all", *(format_bytes(each.total) for each in inputs.memory))
    console.print(table)


def _device(start: LaunchInfo) -> str:
    device = start.device
    if not start.here:
        return f"{device}, of the cluster"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is cuda, but torch {torch.__version__} sees no GPU on this machine. Use --device cpu, or "
            "install a torch with CUDA and look at nvidia-smi."
        )
    return f"{torch.cuda.device_count()} GPU(s)" if device == "cuda" else device


def _run(inputs: PreflightInputs) -> str:
    path = check_writable("run", inputs.config.run, "--run")
    check_run(path, plain(inputs.config), may_change=MAY_CHANGE)
    if (path / LOCK).exists():
        RunLock(path).release()  # what another process holds is refused
    return str(path)


def _model(inputs: PreflightInputs) -> str:
    config = inputs.model[1]
    if (rate := getattr(inputs.config, "selection_bias_rate", None)) is not None:
        config.with_selection_bias_rate(rate)  # or a sentence
    return f"{inputs.config.model}, {config.pattern}, {inputs.size:,} parameters"


def _weights(source: Source) -> str:
    count = check_weights(source)
    return "fresh" if count is None else f"{count} tensors"


def _draft(inputs: PreflightInputs) -> str:
    check_draft("mtp", inputs.model[1])
    return "by the first multi-token-prediction depth"


def _stop_tokens(inputs: PreflightInputs, answers: SamplingSettings) -> str:
    ids, size = answers.stop_ids(inputs.tokenizer), inputs.model[1].vocab_size
    for token in ids:
        if token >= size:
            raise ValueError(
                f"sampling.stop_tokens has {token}, but the vocabulary of {inputs.config.model} goes from 0 to "
                f"{size - 1}. Give a token that it has."
            )
    return ", ".join(map(str, ids))


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
    check_overlap(inputs.config.overlap, pp=layout.pp, vpp=layout.vpp)
    if layout.ep > 1 and not any(block.has_experts for block in config.blocks.values()):
        raise ValueError(f"ep is {layout.ep}, but {inputs.config.model} has no experts to spread. Use ep=1.")
    return f"{layout} on {_ranks(layout.world_size)}"


def _head(inputs: PreflightInputs) -> str:
    why = why_no_triton(torch.device(inputs.launch.device), inputs.dtype, False) if inputs.launch.here else None
    if why is not None:
        raise ValueError(f"head.backend is triton, which cannot run: {why}. Use auto or torch.")
    return "by triton"


def _memory(inputs: PreflightInputs) -> str:
    most = max(inputs.memory, key=lambda each: each.lasting)
    if not inputs.launch.here:
        return f"about {format_bytes(max(each.total for each in inputs.memory))} a rank"
    neighbours = min(inputs.launch.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", inputs.launch.ranks)))
    room = _room(inputs.launch.device, neighbours)
    if most.lasting > room:
        raise ValueError(
            f"a rank needs {format_bytes(most.lasting)} for weights, gradients and the optimizer's numbers, but has "
            f"{format_bytes(room)} of memory. Raise layout.dp_shard, tp or pp: {inputs.config.layout} is asked for."
        )
    return f"about {format_bytes(max(each.total for each in inputs.memory))} a rank of {format_bytes(room)}"


def _room(device: str, neighbours: int) -> int:
    """Bytes that one of the ranks of this machine has."""
    if device == "cuda":
        gpus = torch.cuda.device_count()
        least = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus))
        return least // -(-neighbours // gpus)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // neighbours


def _disk(inputs: PreflightInputs) -> str:
    path = inputs.config.run.expanduser().absolute()
    there = nearest_existing(path)
    free, needed = shutil.disk_usage(there).free, inputs.size * SAVED * 4
    if needed > free:
        raise OSError(
            f"a checkpoint takes about {format_bytes(needed)}, but {there} has {format_bytes(free)} left. Make "
            f"room, or give "
            "--run a directory on another disk."
        )
    return f"{format_bytes(free)} left, about {format_bytes(needed)} a checkpoint"


def _objective(inputs: PreflightInputs, trial: Batch) -> str:
    objective, start = inputs.config.objective, inputs.launch
    made = build_objective(objective)
    name = objective.file if isinstance(objective, ObjectiveFile) else type(made).__name__
    devices = ["cpu", "cuda"] if start.device == "cuda" and start.here else ["cpu"]
    try_objective(made, name, trial, inputs.model[1], inputs.dtype, devices)
    return f"{name}, which returns a loss"


def _turns(environment: Environment, tokenizer: PreTrainedTokenizerBase, settings: TurnSettings) -> None:
    """Ask the chat template whether a conversation can go on by it, and whether it writes the tools."""
    options = dict(environment.template_options)
    encoder = Encoder(tokenizer=tokenizer, options=options)
    heard: Any = [{"role": "tool", "content": "?"}] if isinstance(settings, ToolSettings) else "?"
    encoder.observation(heard, [], chat=True, keep_reasoning=settings.keep_reasoning)
    asked = environment.tasks[0].prompt
    told = encoder.prompt(asked) != Encoder(tokenizer=tokenizer).prompt(asked)
    if isinstance(settings, ToolSettings) and settings.system is None and not told:
        raise ValueError(
            f"the chat template does not write which tools there are ({', '.join(settings.tools)}). Describe them in "
            "environment.system, and that a call is written <tool_call>{...}</tool_call>; or use a template that knows "
            "tools."
        )


def _tasks(
    inputs: PreflightInputs,
    tasks: Tasks,
    count: int,
    encoder: Encoder,
    answers: SamplingSettings,
    example: Callable[[Task, Mapping[str, Any]], Any] | None,
) -> None:
    """Encode the prompts of the first `count` tasks, and their examples."""
    budget = inputs.config.budget
    largest = 0
    for index in range(min(len(tasks), count)):
        task = tasks[index]
        prompt = encode_prompt(encoder, task, budget, answers)
        inputs.longest_prompt = max(inputs.longest_prompt, len(prompt))
        largest = max(largest, *prompt)
        if example is not None:
            example(task, encoder.options)
    check_vocabulary(largest, inputs)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
