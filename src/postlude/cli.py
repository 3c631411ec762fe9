"""The `postlude` command. A user's mistake gets one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from postlude.data import pack
from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.hf.export import export_hf
from postlude.hf.load import adapt, load_model, load_tokenizer, read_config
from postlude.last_words import RankError
from postlude.launcher import on_ranks
from postlude.layout import Layout
from postlude.model import LanguageModel, OutputInputs
from postlude.model.recompute import Recompute
from postlude.model.stack import LogicalLayer
from postlude.recipes.commands import RECIPES
from postlude.recipes.config import describe, load, to_yaml
from postlude.recipes.preflight import Start, Subject, preflight, print_findings
from postlude.recipes.report import write_report
from postlude.recipes.settings import Training
from postlude.verify import OBJECTIVES, TOLERANCES, Case, Report, compare_all, fitting, source_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_HELP = f"a Hugging Face model directory, a .gguf file, or a built-in model: {', '.join([*BUILTIN, *PACKAGED])}"
ROWS_AT_ONCE = 512  # rows of logits held at a time when ranks are counted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parse(arguments)
    try:
        code: int | None = options.run(options, Console())
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, RankError) as error:
        print(f"postlude {options.command}: {error}", file=sys.stderr)
        return 2
    return code or 0


def info(options: argparse.Namespace, console: Console) -> None:
    """Pattern, parameters by block and memory by dtype. Reads the config alone."""
    _, config = adapt(read_config(options.model))
    with torch.device("meta"):
        model = LanguageModel(config)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        counts[parts[2] if parts[0] == "layers" else parts[0]] += parameter.numel()
    blocks = Counter(name for layer in model.layers.values() for name in cast(LogicalLayer, layer).block_names)
    total = sum(counts.values())

    tied = "tied to the embedding" if config.tied_head else "its own"
    for line in (
        f"{options.model}  {config.family}, {total:,} parameters",
        f"pattern  {config.pattern}",
        f"layers   {len(config.pattern)}, hidden {config.hidden_size}, vocabulary {config.vocab_size}, head {tied}",
    ):
        console.print(line, markup=False, highlight=False)  # a pattern's brackets are not markup
    table = Table("part", "count", "parameters each", "parameters", "share", title="Parameters")
    for name, size in counts.items():
        number = blocks.get(name, 1)
        table.add_row(name, str(number), f"{size // number:,}", f"{size:,}", f"{size / total:.1%}")
    console.print(table)
    memory = Table("dtype", "weights", "with gradients", "with AdamW states", title="Memory")
    for label, dtype in DTYPES.items():
        each = dtype.itemsize
        # AdamW keeps two moments and, beside half-precision weights, a master copy; all three in fp32.
        states = 8 + (4 if each < 4 else 0)
        memory.add_row(label, *(_bytes(total * size) for size in (each, 2 * each, 2 * each + states)))
    console.print(memory)


def convert(options: argparse.Namespace, console: Console) -> None:
    """Read any source and write a Hugging Face directory, tokenizer included."""
    try:
        tokenizer = load_tokenizer(options.source)
    except FileNotFoundError as error:
        read_config(options.source)  # a source that is not there is no reason to go on
        tokenizer = None
        print(f"postlude convert: {error}; the weights are written without one.", file=sys.stderr)
    model = load_model(options.source, dtype=_dtype(options.dtype))
    target = export_hf(model, options.target, tokenizer=tokenizer)
    generation = Path(options.source) / "generation_config.json"
    if generation.is_file() and not (target / generation.name).exists():
        shutil.copy(generation, target)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"wrote {count:,} parameters to {target}", markup=False, highlight=False, soft_wrap=True)


def logprobs(options: argparse.Namespace, console: Console) -> None:
    """A table of every token's log-prob, the entropy where it was predicted, and its rank among all tokens."""
    text = sys.stdin.read() if options.text == "-" else options.text
    tokenizer = load_tokenizer(options.model)
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) < 2:
        raise ValueError(
            f"the text has {len(tokens)} token(s), but a log-prob needs one before it; give a longer --text."
        )
    model = load_model(options.model, dtype=_dtype(options.dtype), device=options.device).eval()
    if max(tokens) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(tokens)}, but the vocabulary ends at {model.config.vocab_size - 1}; "
            "the two do not belong together."
        )
    (microbatch,) = pack([tokens], budget=len(tokens))
    with torch.no_grad():
        stats = model(microbatch.to(options.device), output_processor=_score)
    logprob, entropy, rank = (column.tolist() for column in stats)
    table = Table("#", "token", "log-prob", "entropy", "rank")
    names = [escape(repr(tokenizer.decode([token]))) for token in tokens]
    table.add_row("0", names[0], "", "", "")
    for i, name in enumerate(names[1:]):
        table.add_row(str(i + 1), name, f"{logprob[i]:.4f}", f"{entropy[i]:.4f}", str(rank[i]))
    console.print(table)
    mean = sum(logprob[:-1]) / (len(tokens) - 1)
    console.print(f"mean log-prob {mean:.4f}, perplexity {torch.tensor(-mean).exp().item():.3f}")


def verify(options: argparse.Namespace, console: Console) -> int:
    """Compare layouts with one rank, print how far apart they are, and return 1 where one is too far."""
    source, width = source_of(options.model)
    _, config = adapt(read_config(source))
    layouts = fitting(config) if options.grid else [Layout.parse(text) for text in options.layout or [""]]
    objectives = options.objective or (["grpo", "dpo"] if options.grid else ["grpo"])
    cases = [
        Case(
            source,
            layout,
            objective,
            options.recompute,
            compute_dtype=DTYPES[options.dtype],
            initializer_range=width,
            seed=options.seed,
        )
        for layout in layouts
        for objective in objectives
    ]
    tolerance = TOLERANCES[DTYPES[options.dtype]] if options.tolerance is None else options.tolerance
    by_size: dict[int, list[Case]] = {}
    for case in cases:
        by_size.setdefault(case.layout.world_size, []).append(case)
    start = functools.partial(on_ranks, compare_all, timeout=options.timeout, device=options.device)
    reports: list[Report] = [
        report for size, group in sorted(by_size.items()) for report in start(group, options.device, nproc=size)
    ]
    if not reports:
        return 0  # a rank other than the first, whose reports these are
    table = Table("layout", "ranks", "objective", "loss", "log-probs", "entropy", "gradients", "", title=options.model)
    for report in reports:
        passes = report.passes(tolerance)
        row = (str(report.case.layout)[7:-1] or "one rank", str(report.case.layout.world_size), report.case.objective)
        offs = (report.loss, report.logprob, report.entropy, report.worst[1])
        table.add_row(*row, *(f"{off:.1e}" for off in offs), "equal" if passes else "[red]not equal[/red]")
    console.print(table)
    different = [report for report in reports if not report.passes(tolerance)]
    for report in different:
        name, off = report.worst
        line = f"{report.case.layout} with {report.case.objective}: the gradient furthest off is {name}, by {off:.1e}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    count = len(reports)
    verdict = f"{len(different)} of {count} differ by more than" if different else f"all {count} equal within"
    console.print(f"{verdict} {tolerance:g} of the largest value", highlight=False)
    return int(bool(different))


def recipe(options: argparse.Namespace, console: Console) -> None:
    """Run a recipe, or continue it where it stopped."""
    chosen = RECIPES[options.command]
    config: Any = load(chosen.config, options.config, [part for part in options.overrides if part != "--"])
    needed = config.layout.world_size if isinstance(config, Training) else 1
    size = needed if options.nproc is None else options.nproc
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a machine speaks for its neighbours
        subject = Subject(config, Start(options.device, int(os.environ.get("WORLD_SIZE", size))))
        found = preflight(chosen.checks(subject))
        if options.dry_run:
            console.print(to_yaml(config), markup=False, highlight=False, soft_wrap=True)
            print_findings(subject, found, console)
    if options.dry_run:
        return
    on_ranks(chosen.run, config, options.device, nproc=size, timeout=options.timeout, device=options.device)


def report(options: argparse.Namespace, console: Console) -> None:
    """Write the report of a run, or of several to compare."""
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{run} has no metrics.jsonl, so it is not the directory of a run.")
    target = options.to or options.runs[0] / "report.html"
    written = write_report(options.runs, target)
    console.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)


def _score(inputs: OutputInputs, context: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and rank (1 is the likeliest) of the next token at every position, each [T]."""
    targets = inputs.microbatch.targets
    stats = inputs.head.logprobs(inputs.hidden, targets, entropy=True)
    assert stats.entropy is not None
    ranks = []
    for hidden, target in zip(inputs.hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        logits = inputs.head.logits(hidden)
        ranks.append((logits > logits.gather(-1, target.clamp_min(0)[:, None])).sum(-1) + 1)
    return stats.logprob, stats.entropy, torch.cat(ranks)


class _Parser(argparse.ArgumentParser):
    """Answers a wrong word with one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    file = words.pop(1) if words[:1] and words[0] in RECIPES and words[1:] and not words[1].startswith("-") else None
    options, unknown = _parser().parse_known_args(words)
    options.overrides, options.config = unknown, file and Path(file)
    if unknown and options.command not in RECIPES:
        known = [f"--{name}" for name in vars(options)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        options.parser.error(f"{unknown[0]!r} is not an option" + (f"; did you mean {near[0]}?" if near else ""))
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="postlude", description="A PyTorch-native post-training core.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    command = commands.add_parser("info", help="pattern, parameters by block, memory by dtype", allow_abbrev=False)
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.set_defaults(run=info, parser=command)

    command = commands.add_parser("convert", help="write any source as a Hugging Face directory", allow_abbrev=False)
    command.add_argument("source", metavar="SRC", help=MODEL_HELP)
    command.add_argument("target", metavar="DST", help="directory to write")
    command.add_argument("--dtype", choices=DTYPES, help="dtype of the written weights (default: the source's)")
    command.set_defaults(run=convert, parser=command)

    command = commands.add_parser("logprobs", help="score a text token by token", allow_abbrev=False)
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--text", required=True, help="the text to score; - reads standard input")
    command.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: the source's)")
    command.add_argument("--device", type=_device, default="cpu", help="device to compute on (default: cpu)")
    command.set_defaults(run=logprobs, parser=command)

    command = commands.add_parser(
        "verify", help="prove that a parallel layout computes what one rank computes", allow_abbrev=False
    )
    command.add_argument("model", metavar="MODEL", help=f"{MODEL_HELP}; or a config.json, for fresh weights")
    chosen = command.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--layout", action="append", metavar="pp=2,cp=2", help="a layout to compare; may be repeated")
    chosen.add_argument("--grid", action="store_true", help="compare the standard set of layouts, up to 8 ranks")
    command.add_argument(
        "--objective", action="append", choices=OBJECTIVES, help="what to minimise; may be repeated (default: grpo)"
    )
    command.add_argument("--recompute", choices=get_args(Recompute), default="none", help="recompute activations")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype to compute in (default: float32)")
    limits = ", ".join(f"{limit:g} in {name}" for name, limit in zip(DTYPES, TOLERANCES.values(), strict=True))
    command.add_argument("--tolerance", type=float, help=f"relative to the largest value (default: {limits})")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    command.add_argument("--seed", type=int, default=0, help="of the batch and of fresh weights")
    command.add_argument("--timeout", type=float, default=600.0, help="seconds after which a silent rank is given up")
    command.set_defaults(run=verify, parser=command)

    for name, each in RECIPES.items():
        command = commands.add_parser(
            name,
            help=each.help,
            usage=f"postlude {name} [CONFIG.yaml] [--field value ...] [options]",
            description="Fields are set in CONFIG.yaml and by --field value, which beats it:\n\n"
            + describe(each.config),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--dry-run",
            action="store_true",
            help="check everything, print it and stop",
        )
        command.add_argument("--nproc", type=int, help="ranks to start on this machine (default: as the layout needs)")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
        command.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a silent rank")
        command.set_defaults(run=recipe, parser=command)

    command = commands.add_parser("report", help="write a run's report, or compare several", allow_abbrev=False)
    command.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories")
    command.add_argument("--to", metavar="FILE", type=Path, help="where to (default: report.html in the first one)")
    command.set_defaults(run=report, parser=command)
    return parser


def _dtype(name: str | None) -> torch.dtype | None:
    return DTYPES[name] if name else None


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no device here ({str(error).splitlines()[0]})") from error
    return device


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


if __name__ == "__main__":
    sys.exit(main())
