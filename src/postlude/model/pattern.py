"""A model's shape as text: `[*-]{32}` is Llama, `([G-]{3}[*-]){12}` is Qwen3-Next.

    M G * S + - E   a block (see SYMBOLS)          {n}   repeats the block or group before it
    [...]           one logical layer of blocks    |     a pipeline cut
    (...)           plain grouping                 /     starts a multi-token-prediction (MTP) depth

A block outside brackets is its own layer, and spaces are ignored. Layers are counted logically (`layers.17`) and blocks
physically, both over the whole model and before any cut, so that names do not depend on cuts.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, chain, pairwise
from typing import Any, Final, NamedTuple

SYMBOLS: Final[Mapping[str, str]] = {
    "M": "mamba",
    "G": "gated_delta",
    "*": "attention",
    "S": "attention",  # a sliding window changes no parameter, so the name stays
    "+": "latent_attention",
    "-": "mlp",
    "E": "moe",
}
TERMINAL: Final = frozenset("E")
"""Symbols that end their group: nothing in a logical layer comes after its MoE. Any other block may stand anywhere."""

MAXIMUM_BLOCKS: Final = 10_000
_PUNCTUATION: Final = frozenset("[](){}|/")
_CLOSERS: Final = {"[": "]", "(": ")"}
_TOKEN: Final = re.compile(r"\{([^\[\](){}|/]*)\}|\S")  # a whole {n}, or any other single character
_LONGEST_PERIOD: Final = 64  # printing looks for repetitions of up to this many layers, which keeps it linear


class PatternError(ValueError):
    """A pattern that cannot be parsed or staged: `text`, and the 1-based `column` of the faulty character if any."""

    def __init__(self, text: str, problem: str, fix: str, column: int | None = None) -> None:
        super().__init__(text, problem, fix, column)  # all of them, so that the error survives pickling
        self.text, self.problem, self.fix, self.column = text, problem, fix, column

    def __str__(self) -> str:
        printable = "".join(character if character.isprintable() else " " for character in self.text)
        if self.column is None:
            return f'pattern "{printable}": {self.problem}. {self.fix}'
        caret = " " * (self.column - 1) + "^"
        return f'pattern "{printable}": {self.problem} (column {self.column}). {self.fix}\n{printable}\n{caret}'


@dataclass(frozen=True)
class Layer:
    """One logical layer: its index, its block symbols, and a name for each block."""

    index: int
    blocks: str
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Pattern:
    """The logical layers of each segment between cuts, and of each MTP depth; a layer is a string of block symbols.

    `str(pattern)` is the canonical text, and `Pattern.parse(str(pattern), symbols=pattern.symbols) == pattern`.
    """

    segments: tuple[tuple[str, ...], ...]
    mtp: tuple[tuple[str, ...], ...] = ()
    symbols: Mapping[str, str] = field(default_factory=lambda: SYMBOLS, compare=False)

    def __post_init__(self) -> None:
        for part in (self.segments, self.mtp):
            if not (isinstance(part, tuple) and all(_is_tuple_of_text(layers) for layers in part)):
                raise TypeError(f'Pattern needs tuples of tuples of layers such as (("*-", "*-"),), not {part!r}.')
        # The parser has the only grammar: a pattern must equal its own text, parsed.
        text = str(self)
        if _Parser(text, self.symbols).parse() != (self.segments, self.mtp):
            problem = "its layers are not plain block symbols"
            raise PatternError(text, problem, f"Use only {' '.join(self.symbols)} in a layer.")

    @classmethod
    def parse(cls, text: str, *, symbols: Mapping[str, str] = SYMBOLS) -> "Pattern":
        """Parses a pattern; raises PatternError with a caret. `symbols` maps each block symbol to its block's name."""
        if not isinstance(text, str):
            raise TypeError(f'Pattern.parse needs text such as "[*-]{{32}}", not {type(text).__name__}.')
        segments, mtp = _Parser(text, symbols).parse()
        return cls(segments, mtp, symbols)

    def __str__(self) -> str:
        return "/".join(["|".join(map(_compact_text, self.segments)), *map(_compact_text, self.mtp)])

    def __repr__(self) -> str:
        return f"Pattern.parse({str(self)!r})"

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def layers(self) -> tuple[str, ...]:
        """Every logical layer, across the cuts, without MTP."""
        return tuple(chain.from_iterable(self.segments))

    @property
    def blocks(self) -> str:
        """Every block's symbol in physical order, without MTP."""
        return "".join(self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct symbols, MTP included."""
        return tuple(dict.fromkeys(chain(self.blocks, *chain.from_iterable(self.mtp))))

    def layer(self, index: int) -> Layer:
        """Returns the logical layer `index`, counted over the whole model."""
        layers = self.layers
        if not 0 <= index < len(layers):
            raise IndexError(f'pattern "{self}" has layers 0 to {len(layers) - 1}, not {index}.')
        blocks = layers[index]
        return Layer(index, blocks, block_names(blocks, self.symbols))

    def depth_layers(self, depth: int) -> tuple[Layer, ...]:
        """Returns the logical layers of one MTP depth, counted from 0."""
        layers = enumerate(self.mtp[depth])
        return tuple(Layer(index, blocks, block_names(blocks, self.symbols)) for index, blocks in layers)

    def stages(
        self, count: int, *, cost: Callable[[str], float] | None = None, head_cost: float = 0.0
    ) -> tuple[range, ...]:
        """Returns the logical layers of each of `count` (pp·vpp) pipeline stages, in order.

        A cut pattern gives each stage the same number of consecutive segments. One without cuts is balanced: the most
        expensive stage is minimised, then the others are evened. `cost` is of one block symbol (1 by default).
        """
        if count < 1:
            raise ValueError(f"A pipeline has 1 stage or more, not {count}. Use pp·vpp.")
        if len(self.segments) > 1:
            return self._cut_stages(count)
        if len(self) < count:
            problem = f"its {len(self)} layers cannot fill pp·vpp = {count} stages"
            raise PatternError(str(self), problem, f"Use {len(self)} stages or fewer, or cut it with '|' yourself.")
        block_costs = {block: _exact(f"block '{block}'", cost(block) if cost else 1) for block in set(self.blocks)}
        costs = [sum((block_costs[block] for block in layer), Fraction()) for layer in self.layers]
        costs[-1] += _exact("the head", head_cost)
        return _balance(costs, count)

    def _cut_stages(self, count: int) -> tuple[range, ...]:
        segments = len(self.segments)
        if segments % count:
            text = str(self)
            problem = f"its {segments} segments do not divide into pp·vpp = {count} stages"
            divisors = ", ".join(str(divisor) for divisor in range(1, segments + 1) if segments % divisor == 0)
            fix = f"Use a number of stages out of {divisors}, or move the cuts."
            raise PatternError(text, problem, fix, text.index("|") + 1)
        bounds = list(accumulate(map(len, self.segments), initial=0))[:: segments // count]
        return tuple(range(start, stop) for start, stop in pairwise(bounds))


def block_names(blocks: str, symbols: Mapping[str, str] = SYMBOLS) -> tuple[str, ...]:
    """Returns a distinct name for each block of a layer: "MM-" has mamba, mamba_2 and mlp."""
    counts: Counter[str] = Counter()
    names = []
    for block in blocks:
        name = symbols[block]
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return tuple(names)


class _Mark(NamedTuple):
    layers: int
    blocks: int


class _Group(NamedTuple):
    opener: str
    at: int
    mark: _Mark


class _Parser:
    """Parses in one pass. Open groups are a list, not calls, so that nesting cannot exhaust Python's stack."""

    def __init__(self, text: str, symbols: Mapping[str, str]) -> None:
        _check_symbols(symbols)
        self.text, self.symbols = text, symbols
        self.segments: list[tuple[str, ...]] = []
        self.mtp: list[tuple[str, ...]] = []
        self.slash: int | None = None  # where the MTP part being read began
        self.layers: list[tuple[int, ...]] = []  # of this segment or MTP part; a block is its position in the text
        self.blocks = 0
        self.groups: list[_Group] = []
        self.unit: _Mark | None = None  # start of what a following {n} repeats

    def parse(self) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        for token in _TOKEN.finditer(self.text):
            at = token.start()
            match self.text[at]:
                case "[" | "(" as bracket:
                    self._open(bracket, at)
                case "]" | ")" as bracket:
                    self._close(bracket, at)
                case "{":
                    self._repeat(token[1], at)
                case "}":
                    raise self._error(at, "'}' closes nothing", "Write a repeat as {n}.")
                case "|" | "/" as end:
                    self._end_section(end, at)
                case symbol:
                    self._block(symbol, at)
        if self.groups:
            opener, at, _ = self.groups[-1]
            raise self._error(at, f"'{opener}' is never closed", f"Write '{_CLOSERS[opener]}' where the group ends.")
        self._end_section("", 0)
        return tuple(self.segments), tuple(self.mtp)

    def _error(self, at: int, problem: str, fix: str) -> PatternError:
        return PatternError(self.text, problem, fix, at + 1)

    def _block(self, symbol: str, at: int) -> None:
        if symbol not in self.symbols:
            raise self._error(at, f"{symbol!r} is not a block symbol", f"Use one of {' '.join(self.symbols)}.")
        self.unit = _Mark(len(self.layers), self.blocks)
        self.layers.append((at,))
        self._grow(1, at)

    def _grow(self, blocks: int, at: int) -> None:
        self.blocks += blocks
        if self.blocks > MAXIMUM_BLOCKS:
            raise self._error(at, f"it passes {MAXIMUM_BLOCKS:,} blocks here, the most there may be", "Repeat less.")

    def _open(self, opener: str, at: int) -> None:
        if opener == "[" and (outer := next((group for group in self.groups if group.opener == "["), None)):
            problem = f"'[' stands inside the '[' of column {outer.at + 1}, and a layer holds no layers"
            raise self._error(at, problem, "Group blocks within a layer with (...).")
        self.groups.append(_Group(opener, at, _Mark(len(self.layers), self.blocks)))
        self.unit = None

    def _close(self, closer: str, at: int) -> None:
        if not self.groups:
            raise self._error(at, f"'{closer}' closes nothing", "Remove it, or open its group.")
        opener, opened_at, mark = self.groups.pop()
        if closer != _CLOSERS[opener]:
            problem = f"'{closer}' cannot close the '{opener}' of column {opened_at + 1}"
            raise self._error(at, problem, f"Write '{_CLOSERS[opener]}' first.")
        if mark.layers == len(self.layers):
            raise self._error(opened_at, f"'{opener}{closer}' is empty", "Put a block in it, or remove it.")
        if opener == "[":
            self._join(mark.layers)
        self.unit = mark

    def _join(self, start: int) -> None:
        layer = tuple(chain.from_iterable(self.layers[start:]))
        self.layers[start:] = [layer]
        for at in layer[:-1]:
            if (symbol := self.text[at]) in TERMINAL:
                parts = _split_after_terminals(self._written(layer))
                fix = f"Write {_compact_text(parts)} or {_compact_text(parts[:1])}."
                raise self._error(at, f"'{symbol}' must be last in its group", fix)

    def _repeat(self, number: str | None, at: int) -> None:
        if number is None:
            raise self._error(at, "'{' is never closed", "Write a repeat as {n}.")
        if self.unit is None:
            fix = "Write one {n} right after a block, ']' or ')'."
            raise self._error(at, "this repeat does not follow a block or a group", fix)
        number_at = at + 1 + len(number) - len(number.lstrip())
        digits = number.strip().lstrip("0")
        if not (digits.isascii() and digits.isdigit()):
            problem = f"the repeat {number.strip()!r} is not a whole number of at least 1"
            raise self._error(number_at, problem, "Write a repeat as {n}.")
        count = int(digits[:9])  # nine digits exceed the limit already, and int() refuses thousands
        self._grow((self.blocks - self.unit.blocks) * (count - 1), number_at)
        self.layers += self.layers[self.unit.layers :] * (count - 1)
        self.unit = None

    def _end_section(self, end: str, at: int) -> None:
        """Ends the segment or MTP part before `end`: a '|', a '/' or, if empty, the end of the text."""
        if self.groups:
            opener, opened_at, _ = self.groups[-1]
            problem = f"'{end}' stands inside the '{opener}' of column {opened_at + 1}"
            raise self._error(at, problem, "Close the group before it.")
        if end == "|" and self.slash is not None:
            raise self._error(at, "'|' stands in an MTP part", "Put every cut before the first '/'.")
        section = tuple(map(self._written, self.layers))
        if self.slash is not None:
            self._end_depth(self.slash, section)
        else:
            self.segments.append(section)
            if end != "|" and not any(self.segments):
                raise self._error(at, "it has no layers", "Write at least one, such as [*-].")
        if end == "/":
            self.slash = at
        self.layers = []
        self.unit = None

    def _end_depth(self, slash: int, depth: tuple[str, ...]) -> None:
        if not depth:
            raise self._error(slash, "the MTP part after this '/' is empty", "Give it a layer, or remove the '/'.")
        if self.mtp and depth != self.mtp[0]:
            first, this = _compact_text(self.mtp[0]), _compact_text(depth)
            problem = f"MTP depth {len(self.mtp) + 1} is {this}, but depth 1 is {first}"
            raise self._error(slash, problem, f"Write {first} at every depth.")
        self.mtp.append(depth)

    def _written(self, layer: tuple[int, ...]) -> str:
        return "".join(self.text[at] for at in layer)


def _check_symbols(symbols: Mapping[str, str]) -> None:
    for symbol, name in symbols.items():
        if len(symbol) != 1 or not symbol.isprintable() or symbol.isspace() or symbol in _PUNCTUATION:
            raise ValueError(f"{symbol!r} cannot be a block symbol. Use one visible character, but not [](){{}}|/.")
        if not name.isidentifier() or re.search(r"_\d+$", name):
            fix = "Use an identifier that does not end in _<number>, which tells equal blocks of a layer apart."
            raise ValueError(f"{name!r} cannot be the name of block {symbol!r}. {fix}")


def _is_tuple_of_text(layers: Any) -> bool:
    return isinstance(layers, tuple) and all(isinstance(layer, str) for layer in layers)


def _split_after_terminals(blocks: str) -> list[str]:
    parts = [""]
    for block in blocks:
        parts[-1] += block
        if block in TERMINAL:
            parts.append("")
    return [part for part in parts if part]


def _compact_text(layers: Sequence[str]) -> str:
    """Returns a short text for some layers: brackets where needed, repetitions as {n}."""
    return _compress([layer if len(layer) == 1 else f"[{_compress(layer)}]" for layer in layers])


def _compress(items: Sequence[str]) -> str:
    text, start = "", 0
    while start < len(items):
        period, times = _repetition(items, start)
        unit = items[start] if period == 1 else f"({_compress(items[start : start + period])})"
        text += unit if times == 1 else f"{unit}{{{times}}}"
        start += period * times
    return text


def _repetition(items: Sequence[str], start: int) -> tuple[int, int]:
    """Returns the period and times of the repetition at `start` that saves most characters; (1, 1) if none does."""
    best, most_saved = (1, 1), -1
    for period in range(1, min(_LONGEST_PERIOD, (len(items) - start) // 2) + 1):
        unit = items[start : start + period]
        times = 1
        while items[start + times * period : start + (times + 1) * period] == unit:
            times += 1
        saved = (times - 1) * sum(map(len, unit)) - len(f"{{{times}}}" if period == 1 else f"(){{{times}}}")
        if saved > most_saved:
            best, most_saved = (period, times), saved
    return best


def _exact(name: str, cost: float) -> Fraction:
    if not (math.isfinite(cost) and cost >= 0):
        raise ValueError(f"The cost of {name} is {cost}. Give a finite number that is not negative.")
    return Fraction(cost)


def _balance(fractions: Sequence[Fraction], count: int) -> tuple[range, ...]:
    """Cuts layers into `count` stages: least maximum, then least sum of squares, then longer early stages."""
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    costs = [int(fraction * scale) for fraction in fractions]  # exact, so that equal stages compare equal
    total = list(accumulate(costs, initial=0))
    limit = _least_maximum(costs, count)
    squares = {0: 0}  # layers placed so far: the least sum of squares that places them
    starts: list[dict[int, int]] = []  # for each stage, where it stops: where it then best starts
    for stage in range(count):
        placed: dict[int, int] = {}
        starts.append({})
        for stop in range(stage + 1, len(costs) - count + stage + 2):
            for start in range(stop - 1, stage - 1, -1):
                if (load := total[stop] - total[start]) > limit:
                    break
                if start in squares and (stop not in placed or squares[start] + load**2 < placed[stop]):
                    placed[stop] = squares[start] + load**2
                    starts[stage][stop] = start
        squares = placed
    bounds = [len(costs)]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return tuple(range(start, stop) for start, stop in pairwise(reversed(bounds)))


def _least_maximum(costs: Sequence[int], count: int) -> int:
    """Returns the least limit under which `count` stages hold all layers, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        stages, load = 1, 0
        for cost in costs:
            if load + cost > middle:
                stages, load = stages + 1, 0
            load += cost
        low, high = (low, middle) if stages <= count else (middle + 1, high)
    return low
