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

from postlude.checks import MISTAKES, check_place, nearest, sentence
from postlude.data import Batch
from postlude.data.chat import Encoder
from postlude.hf.family import Family
from postlude.hf.load import check_weights, load_tokenizer
from postlude.hf.reading import read_model, with_depths
from postlude.hf.source import Source
from postlude.hf.tokenizer import first_difference
from postlude.model import ModelConfig
from postlude.ops.backend import obstacle
from postlude.pipeline.order import check_overlap
from postlude.plan.memory import Memory, estimate
from postlude.plan.sizes import parameters_in
from postlude.recipes.ahead import source_of, told
from postlude.recipes.config.schema import plain
from postlude.recipes.config.settings import (
    Answers,
    EnvironmentSettings,
    Evaluation,
    ObjectiveFile,
    Prompts,
    Tools,
    Training,
    Turns,
    built,
)
from postlude.recipes.encodings import CACHE, Encodings
from postlude.recipes.examples import Examples, Pairs, hold_out_rows
from postlude.recipes.numbers import in_bytes
from postlude.recipes.rollouts import encode_prompt, encoder_of, environment_of
from postlude.recipes.run.changes import MAY_CHANGE
from postlude.recipes.run.directory import check_run
from postlude.recipes.run.lock import LOCK, RunLock
from postlude.recipes.run.sinks import check_sinks
from postlude.recipes.trial import try_objective
from postlude.rollout.environments import Environment, is_chat
from postlude.rollout.generator import check_draft
from postlude.rollout.rewards import check_signature
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
            except MISTAKES as error:
                mistakes.append(sentence(error))
    if mistakes:
        raise PreflightError("\n".join(dict.fromkeys(mistakes)))
    return found


@dataclass(frozen=True)
class Start:
    """How a recipe is to be started: on which kind of device, on how many ranks."""

    device: str = "cpu"
    ranks: int = 1
    here: bool = True
    """Whether on this machine, so that its devices and its memory are those of the ranks."""
    ray: bool = False
    """Whether Ray gives out GPUs, and shares of them."""


@dataclass
class Subject:
    """A config about to be run, and what its checks share."""

    config: Any
    start: Start
    others: list[str] = field(default_factory=list)
    """Models that are held beside the trained one: a reference, a teacher."""
    keep: list[Callable[[], None]] = field(default_factory=list)
    """What was found and is worth keeping in the run's directory, once nothing is amiss and it may be touched."""
    longest_prompt: int = 0
    """Tokens of the longest prompt that was looked at."""
    grows: bool = False
    """Whether what is asked grows over several turns, up to the budget."""

    def most(self, answers: Answers) -> tuple[int, str, str]:
        """The most tokens, prompt and answer, that a run asks for; a clause that says why, and what to lower."""
        budget, answer = self.config.budget, answers.max_new_tokens
        if self.grows:
            return budget, f"a conversation of several turns may have budget={budget} tokens", "budget"
        together = self.longest_prompt + answer
        why = f"a prompt of {self.longest_prompt} tokens and an answer of up to {answer} make {together}"
        return together, why, "answers.max_new_tokens"

    @cached_property
    def source(self) -> Source:
        """What the model is loaded from."""
        config = self.config
        if isinstance(config, Training):
            return source_of(config.model, config.mtp)
        return with_depths(config.model) if config.answers.draft else str(config.model)

    @cached_property
    def model(self) -> tuple[Family | None, ModelConfig]:
        """The model's family, if it has one, and its config."""
        return read_model(self.source)

    @cached_property
    def size(self) -> int:
        """The number of the model's parameters."""
        return parameters_in(self.model[1])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.config.model)

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        default = "bfloat16" if self.start.device == "cuda" else "float32"
        found: torch.dtype = getattr(torch, self.config.dtype or default)
        return found

    @cached_property
    def memory(self) -> list[Memory]:
        """What a rank of each pipeline stage will need."""
        config: Training = self.config
        return estimate(
            self.model[1],
            config.layout,
            budget=config.budget,
            compute_bytes=self.dtype.itemsize,
            moments=config.optimizer.numbers(config.weights),
            weights=config.weights,
            recompute=config.recompute,
            frozen=sum(parameters_in(read_model(name)[1]) for name in self.others),
            device=self.start.device,
            mtp=config.mtp is not None,
            overlap=config.overlap,
            gather_once=config.gather_once,
        )


def of_model(subject: Subject) -> Iterator[Check]:
    """What every recipe needs: a device, a place to write to, a model that can be read."""
    yield Check("device", lambda: _device(subject.start))
    yield Check("run", lambda: _run(subject))
    yield Check("sinks", lambda: check_sinks(subject.config.sinks))
    yield Check("model", lambda: _model(subject))
    yield Check("weights", lambda: _weights(subject.source), after=("model",))
    yield Check("tokenizer", lambda: _tokenizer(subject), after=("model",))


def of_training(subject: Subject, trial: Batch) -> Iterator[Check]:
    """What every recipe that trains needs besides: a layout that divides the model, room in memory and on disk.

    The objective is called once, on `trial`: a small batch with the columns that the recipe gives it.
    """
    yield from of_model(subject)
    if (ahead := subject.config.mtp) is not None:
        yield Check("mtp", lambda: told(subject.config.model, ahead), after=("model",))
    yield Check("layout", lambda: _layout(subject), after=("model",))
    if subject.config.head.backend == "triton":
        yield Check("head", lambda: _head(subject), after=("device",))
    yield Check("memory", lambda: _memory(subject), after=("device", "layout"))
    yield Check("disk", lambda: _disk(subject), after=("model", "run"))
    yield Check("objective", lambda: _objective(subject, trial), after=("model",))


def of_environment(
    subject: Subject,
    settings: EnvironmentSettings,
    answers: Answers,
    *,
    example: Callable[[Task, Mapping[str, Any]], Any] | None = None,
    held_out: Evaluation | None = None,
) -> Iterator[Check]:
    """Tasks that can be asked and a judge that can be called. `example` makes of a task one to learn by heart."""

    def look() -> str:
        check_signature(getattr(settings, "reward", None))
        # One judge, in a process of its own whatever the config says: there it can be timed out.
        config, judged = subject.config, settings.model_copy(update={"workers": 1})
        with closing(environment_of(judged, config.seed, subject.tokenizer, answers, config.budget)) as environment:
            if held_out is not None:
                hold_out(environment.tasks, held_out.tasks, held_out.split_by)
            made = not isinstance(settings, Prompts)  # tasks that are made: the first of them speak for all
            encoder = encoder_of(environment, subject.tokenizer, answers, config.budget)
            subject.grows = isinstance(settings, Turns) and settings.max_turns > 1
            _tasks(subject, environment.tasks, PAGE if made else len(environment.tasks), encoder, answers, example)
            first = environment.tasks[0]
            if isinstance(settings, Turns) and is_chat(first.prompt):
                _turns(environment, subject.tokenizer, settings)
            said = first.example.get("answer")
            environment.attempt(first, said if isinstance(said, str) else "")
            return f"{len(environment.tasks)} tasks, and a judge that answers"

    yield Check("tasks", look, after=("tokenizer",))
    if answers.draft is not None:
        yield Check("draft", lambda: _draft(subject), after=("model",))
    if answers.stop_tokens:
        yield Check("stop tokens", lambda: _stop_tokens(subject, answers), after=("tokenizer",))


def of_rows(subject: Subject, data: Examples | Pairs) -> Iterator[Check]:
    """Rows that can all be read and encoded, and are within the budget."""

    def look() -> str:
        rows: Encodings[Any] = data.read(subject.tokenizer, subject.config.budget, subject.config.run / CACHE)
        within_vocabulary(rows.largest, subject)
        subject.keep.append(rows.store)
        if subject.config.held_out.rows:
            hold_out_rows(rows, subject.config.held_out.rows)
        return str(rows)

    yield Check("data", look, after=("tokenizer",))


def of_teacher(subject: Subject, teacher: str, top_k: int) -> Iterator[Check]:
    """A teacher that can be read and knows the student's tokens."""

    def look() -> str:
        _, theirs = read_model(teacher)
        check_teacher(subject.config.model, subject.model[1], teacher, theirs, top_k)
        theirs.fits(subject.config.layout)
        told = check_teacher_tokens(subject.config.model, subject.tokenizer, teacher)
        return f"{teacher}, {parameters_in(theirs):,} parameters, {told}"

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


def within_vocabulary(tokens: int, subject: Subject) -> None:
    """Refuse a tokenizer that gives a token, the largest of which is `tokens`, that the model has no place for."""
    size = subject.model[1].vocab_size
    if tokens >= size:
        raise ValueError(
            f"the tokenizer of {subject.config.model} gives token {tokens}, but the model's vocabulary ends at "
            f"{size - 1}. The two do not belong together: put the model's own tokenizer beside it."
        )


def print_findings(subject: Subject, found: Mapping[str, str], console: Console) -> None:
    """A line for each check, and a table of the memory that a rank of each pipeline stage needs."""
    for name, line in found.items():
        console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)
    if "memory" not in found:
        return
    table = Table("memory a rank", *(f"stage {rank}" for rank in range(len(subject.memory))))
    for part in fields(Memory):
        table.add_row(part.name, *(in_bytes(getattr(each, part.name)) for each in subject.memory))
    table.add_row("all", *(in_bytes(each.total) for each in subject.memory))
    console.print(table)


def _device(start: Start) -> str:
    device = start.device
    if not start.here:
        return f"{device}, of the cluster"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is cuda, but torch {torch.__version__} sees no GPU on this machine. Use --device cpu, or "
            "install a torch with CUDA and look at nvidia-smi."
        )
    return f"{torch.cuda.device_count()} GPU(s)" if device == "cuda" else device


def _run(subject: Subject) -> str:
    path = check_place("run", subject.config.run, "--run")
    check_run(path, plain(subject.config), may_change=MAY_CHANGE)
    if (path / LOCK).exists():
        RunLock(path).release()  # what another process holds is refused
    return str(path)


def _model(subject: Subject) -> str:
    config = subject.model[1]
    if (rate := getattr(subject.config, "selection_bias_rate", None)) is not None:
        config.with_selection_bias_rate(rate)  # or a sentence
    return f"{subject.config.model}, {config.pattern}, {subject.size:,} parameters"


def _weights(source: Source) -> str:
    count = check_weights(source)
    return "fresh" if count is None else f"{count} tensors"


def _draft(subject: Subject) -> str:
    check_draft("mtp", subject.model[1])
    return "by the first multi-token-prediction depth"


def _stop_tokens(subject: Subject, answers: Answers) -> str:
    ids, size = answers.stop_ids(subject.tokenizer), subject.model[1].vocab_size
    for token in ids:
        if token >= size:
            raise ValueError(
                f"answers.stop_tokens has {token}, but the vocabulary of {subject.config.model} goes from 0 to "
                f"{size - 1}. Give a token that it has."
            )
    return ", ".join(map(str, ids))


def _tokenizer(subject: Subject) -> str:
    tokenizer = subject.tokenizer
    if tokenizer.eos_token_id is not None:
        within_vocabulary(tokenizer.eos_token_id, subject)
    return f"{len(tokenizer)} tokens"


def _layout(subject: Subject) -> str:
    config, layout = subject.model[1], subject.config.layout
    if layout.world_size != subject.start.ranks:
        raise ValueError(
            f"{layout} runs on {_ranks(layout.world_size)}, but {subject.start.ranks} are to be started. Start "
            f"{layout.world_size}, or choose degrees whose product pp·dp_replicate·dp_shard·cp·tp is "
            f"{subject.start.ranks}."
        )
    config.fits(layout)
    check_overlap(subject.config.overlap, pp=layout.pp, vpp=layout.vpp)
    if layout.ep > 1 and not any(block.has_experts for block in config.blocks.values()):
        raise ValueError(f"ep is {layout.ep}, but {subject.config.model} has no experts to spread. Use ep=1.")
    return f"{layout} on {_ranks(layout.world_size)}"


def _head(subject: Subject) -> str:
    why = obstacle(torch.device(subject.start.device), subject.dtype, False) if subject.start.here else None
    if why is not None:
        raise ValueError(f"head.backend is triton, which cannot run: {why}. Use auto or torch.")
    return "by triton"


def _memory(subject: Subject) -> str:
    most = max(subject.memory, key=lambda each: each.lasting)
    if not subject.start.here:
        return f"about {in_bytes(max(each.total for each in subject.memory))} a rank"
    neighbours = min(subject.start.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", subject.start.ranks)))
    room = _room(subject.start.device, neighbours)
    if most.lasting > room:
        raise ValueError(
            f"a rank needs {in_bytes(most.lasting)} for weights, gradients and the optimizer's numbers, but has "
            f"{in_bytes(room)} of memory. Raise layout.dp_shard, tp or pp: {subject.config.layout} is asked for."
        )
    return f"about {in_bytes(max(each.total for each in subject.memory))} a rank of {in_bytes(room)}"


def _room(device: str, neighbours: int) -> int:
    """Bytes that one of the ranks of this machine has."""
    if device == "cuda":
        gpus = torch.cuda.device_count()
        least = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus))
        return least // -(-neighbours // gpus)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // neighbours


def _disk(subject: Subject) -> str:
    path = subject.config.run.expanduser().absolute()
    there = nearest(path)
    free, needed = shutil.disk_usage(there).free, subject.size * SAVED * 4
    if needed > free:
        raise OSError(
            f"a checkpoint takes about {in_bytes(needed)}, but {there} has {in_bytes(free)} left. Make room, or give "
            "--run a directory on another disk."
        )
    return f"{in_bytes(free)} left, about {in_bytes(needed)} a checkpoint"


def _objective(subject: Subject, trial: Batch) -> str:
    objective, start = subject.config.objective, subject.start
    made = built(objective)
    name = objective.file if isinstance(objective, ObjectiveFile) else type(made).__name__
    devices = ["cpu", "cuda"] if start.device == "cuda" and start.here else ["cpu"]
    try_objective(made, name, trial, subject.model[1], subject.dtype, devices)
    return f"{name}, which returns a loss"


def _turns(environment: Environment, tokenizer: PreTrainedTokenizerBase, settings: Turns) -> None:
    """Ask the chat template whether a conversation can go on by it, and whether it writes the tools."""
    options = dict(environment.template_options)
    encoder = Encoder(tokenizer=tokenizer, options=options)
    heard: Any = [{"role": "tool", "content": "?"}] if isinstance(settings, Tools) else "?"
    encoder.observation(heard, [], chat=True, keep_reasoning=settings.keep_reasoning)
    asked = environment.tasks[0].prompt
    told = encoder.prompt(asked) != Encoder(tokenizer=tokenizer).prompt(asked)
    if isinstance(settings, Tools) and settings.system is None and not told:
        raise ValueError(
            f"the chat template does not write which tools there are ({', '.join(settings.tools)}). Describe them in "
            "environment.system, and that a call is written <tool_call>{...}</tool_call>; or use a template that knows "
            "tools."
        )


def _tasks(
    subject: Subject,
    tasks: Tasks,
    count: int,
    encoder: Encoder,
    answers: Answers,
    example: Callable[[Task, Mapping[str, Any]], Any] | None,
) -> None:
    """Encode the prompts of the first `count` tasks, and their examples."""
    budget = subject.config.budget
    largest = 0
    for index in range(min(len(tasks), count)):
        task = tasks[index]
        prompt = encode_prompt(encoder, task, budget, answers)
        subject.longest_prompt = max(subject.longest_prompt, len(prompt))
        largest = max(largest, *prompt)
        if example is not None:
            example(task, encoder.options)
    within_vocabulary(largest, subject)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
