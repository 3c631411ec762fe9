"""`postlude plan`: estimate time and memory of a step in a layout, or search the best layout."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from postlude.hf.families import FAMILIES
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.read_model import read_model
from postlude.layout import Layout, Stage
from postlude.lora import NO_ADAPTERS, AdapterConfig, LoRA
from postlude.model import ModelConfig, Pattern
from postlude.plan.cost import CostModel
from postlude.plan.forecast import StepForecast, forecast
from postlude.plan.hardware import Hardware, load_hardware
from postlude.plan.parameter_count import count_parameters, total_parameters
from postlude.plan.search import USABLE_MEMORY, SearchResult, explain_time, search
from postlude.recipes.config.packaged import find_packaged
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.formatting import format_bytes, format_duration
from postlude.training_options import TrainingOptions
from postlude.verify.cases import resolve_source

USUAL_MICROBATCHES = 4  # for each pipeline rank, where no batch is named
PLANNED = ("sft", "dpo", "kto", "rm", "grpo", "ppo", "distill")  # recipes with a layout
MAX_WIDTH = 1000  # characters of a table that must not be wrapped
MAX_SHOWN_RANKS = 8  # of a pipeline that a table shows; of more, some


def run(options: argparse.Namespace) -> int:
    """Prints the estimate of a layout, or the best layouts. Returns 1 if nothing fits in memory."""
    console, hardware = Console(), load_hardware(options.gpu)
    if options.mtp < 0:
        raise ValueError(f"--mtp is {options.mtp}; give the number of depths, or 0 for none.")
    recipe = None if options.recipe is None else _read_recipe(options)
    if recipe is None:
        config = _config(options.model, options.mtp)
        model = _model(options, config, hardware)
    else:
        config = _config(options.model, recipe.mtp.depths if recipe.mtp else 0)
        model = recipe_cost_model(recipe, config, hardware, seq=options.seq, batch_tokens=options.batch_tokens)
    header = f"{options.model}  {_count(total_parameters(config))} parameters, {config.pattern}"
    if model.adapters:
        trained = count_parameters(config, adapters=model.adapters).trained(Stage()).used
        header += f", of which LoRA trains {_count(trained)} in adapters"
    console.print(header, markup=False, highlight=False, soft_wrap=True)
    if options.search:
        tokens = options.batch_tokens or USUAL_MICROBATCHES * options.gpus * model.options.budget
        result = search(model, options.gpus, tokens, overlap=options.overlap)
        return _print_search(console, result, options, hardware)
    _print_forecast(console, estimate := forecast(model), options.gpu)
    return int(estimate.peak > hardware.memory)


def _config(model: str, mtp: int) -> ModelConfig:
    config = read_model(resolve_source(str(find_packaged(Path(model))))[0])[1]
    if mtp and not config.pattern.mtp:
        depths = f"/[{config.pattern.layers[-1]}]" * mtp
        config = replace(config, pattern=Pattern.parse(f"{config.pattern}{depths}", symbols=config.pattern.symbols))
    return config


def _model(options: argparse.Namespace, config: ModelConfig, hardware: Hardware) -> CostModel:
    budget = options.budget or options.seq
    if budget < options.seq:
        raise ValueError(f"--budget is {budget}, but a sequence has {options.seq} tokens. Raise it, or lower --seq.")
    names = ("recompute", "offload_activations", "fp8")
    computed = {name: getattr(options, name) for name in names}
    if options.search:
        if options.gpus is None or options.layout is not None:
            raise ValueError("--search needs --gpus, and finds the layout itself: leave out --layout.")
        training = TrainingOptions(budget=budget, lora=options.lora, **computed)
    else:
        training = TrainingOptions(
            layout=_layout(options, config),
            budget=budget,
            overlap=options.overlap,
            lora=options.lora,
            **computed,
        )
    layout = training.layout
    tokens = options.batch_tokens or USUAL_MICROBATCHES * layout.pp * layout.dp * budget
    return CostModel(
        config=config,
        options=training,
        hardware=hardware,
        length=options.seq,
        microbatches=-(-tokens // (layout.dp * budget)),
        mtp=bool(options.mtp),
        adapters=_adapters(options.lora, config),
    )


def _read_recipe(options: argparse.Namespace) -> Any:
    """Returns the config of --recipe, or raises if it cannot be planned or another option contradicts it."""
    for name in (
        "layout",
        "gpus",
        "budget",
        "recompute",
        "offload_activations",
        "fp8",
        "overlap",
        "mtp",
        "search",
        "lora",
    ):
        if getattr(options, name) != options.parser.get_default(name):
            raise ValueError(
                f"--{name.replace('_', '-')} is in the config of --recipe or follows from it: leave one of the two out."
            )
    command, file = options.recipe
    if command not in PLANNED:
        raise ValueError(f"--recipe is {command!r}; give one of {', '.join(PLANNED)}, and its config.")
    return RECIPES[command].read(Path(file))


def recipe_cost_model(
    recipe: Any, config: ModelConfig, hardware: Hardware, *, seq: int, batch_tokens: int | None = None
) -> CostModel:
    """Returns the cost model of a recipe's config, for sequences of `seq` tokens on average.

    A step has the recipe's number of sequences, or `batch_tokens`. `config` is the config of its model.
    """
    layout, budget = recipe.layout, recipe.budget
    if budget < seq:
        raise ValueError(f"--seq is {seq}, but budget is {budget} in the recipe. Lower --seq.")
    _check_layout(layout, config, recipe.model)
    others = (config if name == recipe.model else read_model(name)[1] for name in recipe.other_models)
    return CostModel(
        config=config,
        options=TrainingOptions.of(recipe),
        hardware=hardware,
        length=seq,
        microbatches=-(-(batch_tokens or recipe.sequences_per_step * seq) // (layout.dp * budget)),
        mtp=recipe.mtp is not None,
        frozen=sum(map(total_parameters, others)),
        adapters=_adapters(recipe.lora, config),
    )


def _adapters(lora: LoRA | None, config: ModelConfig) -> Mapping[str, AdapterConfig]:
    """Returns the adapters of a model, or raises for targets that it does not have."""
    family = None if config.family is None else FAMILIES[config.family]
    return NO_ADAPTERS if lora is None else adapter_configs(lora, config, family)


def _layout(options: argparse.Namespace, config: ModelConfig) -> Layout:
    """Returns the layout, with data-parallel ranks up to --gpus if it names none."""
    text = options.layout or ""
    without_experts = ",".join(part for part in text.split(",") if part.partition("=")[0].strip() != "ep")
    ranks = Layout.parse(without_experts)
    if options.gpus not in (None, ranks.world_size):
        if ranks.dp > 1 or options.gpus % ranks.world_size:
            raise ValueError(
                f"{ranks} runs on {ranks.world_size} GPU(s), but --gpus is {options.gpus}. Choose degrees whose "
                "product pp·dp_replicate·dp_shard·cp·tp it is; or, where it is a multiple, leave out dp_shard."
            )
        text += f",dp_shard={options.gpus // ranks.world_size}"
    layout = Layout.parse(text)
    _check_layout(layout, config, options.model)
    return layout


def _check_layout(layout: Layout, config: ModelConfig, name: str) -> None:
    config.check_layout(layout)
    if layout.ep > 1 and not any(block.has_experts for block in config.blocks.values()):
        raise ValueError(f"ep is {layout.ep}, but {name} has no experts to spread. Use ep=1.")


def _print_forecast(console: Console, plan: StepForecast, gpu: str) -> None:
    """Prints the step's time and memory, and a table of the pipeline ranks."""
    model, step, layout, speed = plan.model, plan.step, plan.model.layout, plan.tokens_per_second
    table = Table(show_header=False, box=None)
    usable = model.hardware.memory
    for name, value in (
        ("layout", f"{_short(layout)} on {layout.world_size} {gpu}"),
        ("batch", f"{plan.tokens:,} tokens, {_microbatches(model)} for each dp rank"),
        ("step", f"{format_duration(step.seconds)}, {speed:,.0f} tokens/s per GPU, MFU {plan.mfu:.1%}"),
        ("bubble", f"{step.bubble:.1%} of the schedule"),
        ("exchange", f"{format_duration(step.exchange)} with experts, {format_duration(step.exposed)} of it exposed"),
        ("waited", f"{format_duration(step.waited)} for tokens, weights and gradients"),
        (
            "memory",
            f"{format_bytes(plan.peak)} of {format_bytes(usable)}" + ("" if plan.peak <= usable else ": does not fit"),
        ),
    ):  # fmt: skip
        table.add_row(name, value)
    console.print(table)
    _print_ranks(console, plan)


def _print_ranks(console: Console, plan: StepForecast) -> None:
    """Prints microbatches in flight, busy time and memory of the pipeline ranks, of some if there are many."""
    step, pp = plan.step, plan.model.layout.pp
    stride = 1 if pp <= MAX_SHOWN_RANKS else -(-pp // (MAX_SHOWN_RANKS - 1))
    ranks = sorted({*range(0, pp, stride), pp - 1})
    table = Table("pipeline rank", *map(str, ranks))
    rows = {
        "in flight": [str(step.timeline.peak_in_flight[rank]) for rank in ranks],
        "busy": [f"{step.timeline.busy[rank] / step.timeline.makespan:.0%}" for rank in ranks],
    }
    fields = {
        "weights": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "reference": "frozen",
        "gathered": "gathered",
        "activations": "activations",
        "a layer's backward": "working",
        "head": "head",
        "peak": "total",
    }
    if not plan.model.frozen:
        del fields["reference"]
    if plan.model.options.offload_activations:
        fields["in host memory"] = "host"
    for name, field in fields.items():
        rows[name] = [format_bytes(getattr(plan.memory[rank], field)) for rank in ranks]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def _print_search(console: Console, result: SearchResult, options: argparse.Namespace, hardware: Hardware) -> int:
    usable = format_bytes(USABLE_MEMORY * hardware.memory)
    if not result.best:
        needs = (
            f"the least needs about {format_bytes(result.min_bytes)} per rank"
            if result.fitting
            else "none divides the model"
        )
        fix = "Use more GPUs, --recompute full, or a smaller --budget." if result.fitting else "Raise --batch-tokens."
        console.print(f"No layout of {options.gpus} {options.gpu} fits in {usable}: {needs}. {fix}", highlight=False)
        return 1
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("layout", "step", "tok/s", "MFU", "memory", "bubble", "exchange", "waiting"):
        table.add_column(name, no_wrap=True, justify="left" if name == "layout" else "right")
    for plan in result.best:
        step, makespan = plan.step, plan.step.timeline.makespan
        shares = (step.bubble, step.exposed / makespan, step.waited / makespan)
        cells = (
            format_duration(step.seconds),
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.1%}",
            format_bytes(plan.peak),
        )
        table.add_row(_short(plan.model.layout), *cells, *(f"{share:.1%}" for share in shares))
    width = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).maximum
    Console(width=max(width, console.width)).print(table)  # each layout in one line, also in a narrow terminal
    best, tokens = result.best[0], result.best[0].tokens
    console.print(f"{_short(best.model.layout)}: {explain_time(best)}.", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Steps of {tokens:,} tokens; tok/s are those of one GPU.", highlight=False)
    console.print(f"The best of {result.fitting:,} layouts that divide the model, in {usable} a GPU.", highlight=False)
    return 0


def _microbatches(model: CostModel) -> str:
    return f"{model.microbatches} microbatch{'es' * (model.microbatches != 1)} of {model.options.budget:,}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f}B" if parameters >= 1e8 else f"{parameters:,}"


def _short(layout: Layout) -> str:
    return str(layout)[7:-1].replace(" ", "") or "one rank"
