"""Pattern: parsing and printing are inverse, errors name a column, and stages are balanced optimally."""

import copy
import pickle
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.model.pattern import MAXIMUM_BLOCKS, SYMBOLS, TERMINAL, Pattern, PatternError, block_names

many = settings(max_examples=80)

MIXERS = "".join(symbol for symbol in SYMBOLS if symbol not in TERMINAL)

# Structure: layers, segments and depths as data.
layers = st.builds(
    lambda mixers, last: (mixers + last) or "*",
    st.text(MIXERS, max_size=6) | st.builds(lambda unit, n: unit * n, st.text(MIXERS, max_size=3), st.integers(1, 9)),
    st.sampled_from(["", *sorted(TERMINAL)]),
)
runs = st.lists(
    st.builds(lambda unit, n: unit * n, st.lists(layers, min_size=1, max_size=3), st.integers(1, 8)), max_size=3
).map(lambda units: tuple(chain.from_iterable(units)))


def patterns_of(segments):
    mtp = st.builds(lambda depth, depths: (depth,) * depths if depth else (), runs, st.integers(0, 3))
    return st.builds(Pattern, segments.map(tuple), mtp)


patterns = patterns_of(st.lists(runs, min_size=1, max_size=4).filter(any))


# Grammar: text made together with the layers that it must mean, so that reading is checked against something else.
def sequences(units):
    def repeat(unit, n, spelling):
        text, meaning = unit
        return spelling.format(text, n), meaning * (n if "{1}" in spelling else 1)

    spellings = st.sampled_from(["{0}", "{0} ", "{0}{{{1}}}", "{0}\n{{ 0{1}\t}}"])
    parts = st.lists(st.builds(repeat, units, st.integers(1, 4), spellings), min_size=1, max_size=3)
    return parts.map(lambda parts: ("".join(text for text, _ in parts), tuple(chain(*(m for _, m in parts)))))


def grouped(units):
    return units | st.recursive(
        sequences(units), lambda inner: sequences(inner.map(lambda part: (f"({part[0]})", part[1]))), max_leaves=3
    ).map(lambda part: (f"({part[0]})", part[1]))


bare = st.sampled_from(sorted(SYMBOLS)).map(lambda symbol: (symbol, (symbol,)))
mixers = st.sampled_from(MIXERS).map(lambda symbol: (symbol, (symbol,)))
bracketed = st.builds(
    lambda part, last: (f"[{part[0]}{last}]", ("".join(part[1]) + last,)),
    sequences(grouped(mixers)),
    st.sampled_from(["", *sorted(TERMINAL)]),
)
texts = sequences(grouped(bare | bracketed)).filter(lambda part: len("".join(part[1])) <= 500)

BROKEN = [
    # text, the character at fault, its column
    ("Q", "Q", 1),
    ("[*-]{2} m", "m", 9),
    ("[*\N{CJK UNIFIED IDEOGRAPH-4E00}]", "\N{CJK UNIFIED IDEOGRAPH-4E00}", 3),
    ("*\0", "\0", 2),
    ("[*-", "[", 1),
    ("*(*[*-", "[", 4),
    ("((*)", "(", 1),
    ("*]", "]", 2),
    ("* )", ")", 3),
    ("[(*]", "]", 4),
    ("*{2", "{", 2),
    ("*{2[*-]{3}", "{", 2),
    ("*}", "}", 2),
    ("[[*]]", "[", 2),
    ("[M (* [-])]", "[", 7),
    ("[]", "[", 1),
    ("*( )", "(", 2),
    ("[()]", "(", 2),
    ("[*|*]", "|", 3),
    ("(*|*)", "|", 3),
    ("*/|*", "|", 3),
    ("(*/*)", "/", 3),
    ("[ * E * ]", "E", 5),
    ("[(ME){2}]", "E", 4),
    ("[E{2}]", "E", 2),
    ("[-{3}EE]", "E", 6),
    ("   ", " ", 1),
    ("||", "|", 1),
    ("/*", "/", 1),
    ("|/*", "/", 2),
    ("*-/", "/", 3),
    ("*//*", "/", 2),
    ("*/*/", "/", 4),
    ("*/[*-]/[*E]", "/", 7),
    ("*/*/*/**", "/", 6),
    ("*{}", "}", 3),
    ("*{x}", "x", 3),
    ("*{ 0 }", "0", 4),
    ("*{-1}", "-", 3),
    ("*{1.5}", "1", 3),
    ("*{1 2}", "1", 3),
    ("*{1_0}", "1", 3),
    ("*{²}", "²", 3),
    ("*{\N{ARABIC-INDIC DIGIT THREE}}", "\N{ARABIC-INDIC DIGIT THREE}", 3),
    ("{2}", "{", 1),
    ("*[{2}*]", "{", 3),
    ("*/{2}", "{", 3),
    ("M{2} {3}", "{", 6),
    ("*{10001}", "1", 3),
    ("*{1000000000}", "1", 3),
    ("*{" + "9" * 5000 + "}", "9", 3),
    ("*{9999}**", "*", 9),
    ("((((*{99}){99}){99}){99})", "9", 17),
    ("*{6000}/*{6000}", "6", 11),
    ("[*{6000}]|[*{6000}]", "6", 14),
    ("(" * 5000 + "*" + ")" * 5001, ")", 10_002),
    ("(" * 5000 + "*" + ")" * 4999, "(", 1),
]


def assert_raises_at(text, symbols=SYMBOLS):
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text, symbols=symbols)
    return caught.value


@pytest.mark.parametrize(("text", "character", "column"), BROKEN, ids=[repr(text)[:24] for text, *_ in BROKEN])
def test_broken_text_is_refused_at_its_column(text, character, column):
    error = assert_raises_at(text)
    assert (error.text, error.column, text[column - 1]) == (text, column, character)
    sentence, pattern_line, caret = str(error).split("\n")
    assert pattern_line[caret.index("^")] == (character if character.isprintable() else " ")
    assert len(pattern_line) == len(text)
    assert caret == " " * (column - 1) + "^"
    assert f"(column {column}). " in sentence


def parsed(text):
    try:
        return Pattern.parse(text), None
    except PatternError as error:
        return None, error


def test_error_messages():
    assert assert_raises_at("").column == 1
    assert str(assert_raises_at("[*E-]")) == (
        "pattern \"[*E-]\": 'E' must be last in its group (column 3). Write [*E]- or [*E].\n[*E-]\n  ^"
    )


@many
@given(st.text(MIXERS, max_size=5), st.text("E", min_size=1, max_size=4), st.text(sorted(SYMBOLS), min_size=1))
def test_suggested_pattern_has_the_same_blocks(mixers, terminals, remaining):
    blocks = mixers + terminals + remaining
    error = assert_raises_at(f"[{blocks}]")
    full_fix, first = error.fix.removeprefix("Write ").removesuffix(".").split(" or ")
    assert Pattern.parse(full_fix).blocks == blocks
    assert Pattern.parse(first).layers == (blocks[: error.column - 1],)


def test_error_survives_pickling():
    error = assert_raises_at("[*E-]")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.text, copy.column) == (str(error), error.text, error.column)


@pytest.mark.parametrize("text", [None, 3, b"[*-]", ["*"]])
def test_a_pattern_that_is_not_text_is_a_type_error(text):
    with pytest.raises(TypeError, match=r"Pattern\.parse needs text"):
        Pattern.parse(text)


ALPHABET = "MG*S+-E[](){}|/ 0123"


@st.composite
def almost_valid_patterns(draw):
    """Returns a valid text with one character replaced, inserted or removed."""
    text, _ = draw(texts)
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.text(ALPHABET, max_size=1)) + text[at + draw(st.integers(0, 1)) :]


@settings(max_examples=200)
@given(
    almost_valid_patterns()
    | st.text(ALPHABET, max_size=30)
    | st.text(st.characters() | st.sampled_from("*[]{}"), max_size=12)
)
@pytest.mark.slow
def test_any_text_parses_or_its_error_column_is_within_it(text):
    pattern, error = parsed(text)
    if error is None:
        assert Pattern.parse(str(pattern)) == pattern
    else:
        assert 1 <= error.column <= max(1, len(text))
        assert len(str(error).split("\n")) == 3


@many
@given(patterns)
def test_printed_pattern_reads_back(pattern):
    text = str(pattern)
    assert Pattern.parse(text) == pattern
    assert hash(Pattern.parse(text)) == hash(pattern)
    spelled_out = "|".join("".join(f"[{layer}]" for layer in segment) for segment in pattern.segments)
    assert len(text.partition("/")[0]) <= len(spelled_out)


@many
@given(st.lists(texts, min_size=1, max_size=2), st.none() | texts, st.integers(1, 3))
@pytest.mark.slow
def test_repeated_pattern_equals_its_expansion(segments, depth, depths):
    text = "|".join(text for text, _ in segments)
    meaning = Pattern(tuple(meaning for _, meaning in segments), (depth[1],) * depths if depth else ())
    if depth:
        text += f" / {depth[0]}" * depths
    pattern = Pattern.parse(text)
    assert pattern == meaning
    assert Pattern.parse(str(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "canonical", "count"),
    [
        ("[*-]{32}", "[*-]{32}", 32),
        ("[*E]" * 48, "[*E]{48}", 48),
        ("M-M*-", "M-M*-", 5),
        ("[M][-](M)", "M-M", 3),
        ("([G-][G-][G-][*-]){12}", "([G-]{3}[*-]){12}", 48),
        ("[*-]{16}|[*-]{16}/[*-]", "[*-]{16}|[*-]{16}/[*-]", 32),
        ("|*||", "|*||", 1),
        ("[MMMMMM-]", "[M{6}-]", 1),
        ("[M-*][ - * ]", "[M-*][-*]", 2),
        ("[*-M-]|[(*-){2}E]", "[*-M-]|[*-*-E]", 2),
        ("M{1}", "M", 1),
        ("(" * 5000 + "*" + ")" * 5000, "*", 1),
        ("((*{100}){10}){10}", "*{10000}", MAXIMUM_BLOCKS),
        ("*{0000000000000000012}", "*{12}", 12),
    ],
)
def test_canonical_text(text, canonical, count):
    pattern = Pattern.parse(text)
    assert (str(pattern), len(pattern)) == (canonical, count)


def test_mtp_and_empty_segments_are_kept():
    pattern = Pattern.parse("|*-||/[*E]/([*E])")
    assert pattern.segments == ((), ("*", "-"), (), ())
    assert pattern.mtp == (("*E",), ("*E",))
    assert pattern.layers == ("*", "-")


@pytest.mark.parametrize(
    ("segments", "mtp", "problem"),
    [
        ((("*Q",),), (), "'Q' is not a block symbol"),
        ((("*E-",),), (), "'E' must be last"),
        ((("*", ""),), (), "is empty"),
        ((), (), "no layers"),
        (((), ()), (), "no layers"),
        ((("*",),), (("*",), ("-",)), "MTP depth 2 is -"),
        ((("*",),), ((),), "is empty"),
        ((("*",) * (MAXIMUM_BLOCKS + 1),), (), "10,000"),
        ((("*{2}",),), (), "plain block symbols"),
        ((("* *",),), (), "plain block symbols"),
        ((("*", "|", "*"),), (), "plain block symbols"),
        ((("*", "/", "*"),), (), "plain block symbols"),
        ((("*", "("),), (), "never closed"),
    ],
)
def test_data_without_a_textual_form_is_refused(segments, mtp, problem):
    with pytest.raises(PatternError, match=problem):
        Pattern(segments, mtp)


@pytest.mark.parametrize("segments", ["*-", ("*-",), [("*-",)], (["*-"],), ((1,),), None])
def test_data_of_another_shape_is_a_type_error(segments):
    with pytest.raises(TypeError, match="tuples of tuples"):
        Pattern(segments)


@many
@given(patterns)
def test_layers_and_blocks_are_numbered_without_gaps_for_any_cuts(pattern):
    uncut = Pattern((pattern.layers,), pattern.mtp)
    first_block = 0
    for index in range(len(pattern)):
        layer = pattern.layer(index)
        assert layer == uncut.layer(index)
        assert (layer.index, layer.blocks) == (index, pattern.layers[index])
        assert pattern.blocks[first_block : first_block + len(layer.blocks)] == layer.blocks
        assert len(set(layer.names)) == len(layer.names) == len(layer.blocks)
        assert all(n.startswith(SYMBOLS[b]) for n, b in zip(layer.names, layer.blocks, strict=True))
        first_block += len(layer.blocks)
    assert first_block == len(pattern.blocks)


@pytest.mark.parametrize("index", [-1, 2])
def test_layer_out_of_range_is_refused(index):
    with pytest.raises(IndexError, match="has layers 0 to 1"):
        Pattern.parse("[*-]{2}").layer(index)


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ("*-", ("attention", "mlp")),
        ("MM-", ("mamba", "mamba_2", "mlp")),
        ("S*-", ("attention", "attention_2", "mlp")),
        ("GMGE", ("gated_delta", "mamba", "gated_delta_2", "moe")),
        ("*-M-", ("attention", "mlp", "mamba", "mlp_2")),
    ],
)
def test_block_names(blocks, names):
    assert block_names(blocks) == names


def test_custom_symbols_round_trip():
    symbols = {"*": "attention", "R": "recurrence", "1": "mlp"}
    pattern = Pattern.parse("[R1]{4}[*1]/[RR1]", symbols=symbols)
    assert pattern.layer(0).names == ("recurrence", "mlp")
    assert Pattern.parse(str(pattern), symbols=symbols) == pattern
    for copied in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert copied == pattern
        assert copied.layer(4).names == ("attention", "mlp")
    assert assert_raises_at("[R1]").column == 2
    assert assert_raises_at("[*-]", symbols).column == 3


@pytest.mark.parametrize(
    "symbols", [{"[": "x"}, {" ": "x"}, {"ab": "x"}, {"": "x"}, {"\0": "x"}, {"*": "a.b"}, {"*": ""}, {"*": "mlp_2"}]
)
def test_invalid_symbols_are_refused(symbols):
    with pytest.raises(ValueError, match="cannot be"):
        Pattern.parse("*", symbols=symbols | {"*": symbols.get("*", "attention")})


uncut_patterns = patterns_of(st.lists(layers, min_size=1, max_size=9).map(lambda run: (tuple(run),)))
block_costs = st.fixed_dictionaries(dict.fromkeys(SYMBOLS, st.sampled_from([0, 0.1, 0.3, 1, 2, 5.5]) | st.floats(0, 9)))
end_costs = st.sampled_from([0, 0.7, 4, 25])


@many
@given(uncut_patterns, st.integers(1, 9), block_costs, end_costs)
def test_stage_split_is_optimal(pattern, count, cost, head_cost):
    count = min(count, len(pattern))
    arguments = {"cost": cost.__getitem__, "head_cost": head_cost}
    stages = pattern.stages(count, **arguments)

    # Scaled to whole numbers with Python's own exact ratio, so that sums do not depend on their order.
    scale = 2**1074
    exact = {symbol: exactly(value, scale) for symbol, value in cost.items()}
    costs = [sum(exact[block] for block in layer) for layer in pattern.layers]
    costs[-1] += exactly(head_cost, scale)

    def quality(ranges):
        loads = [sum(costs[index] for index in stage) for stage in ranges]
        return max(loads), sum(load**2 for load in loads)

    def ways():
        for cuts in combinations(range(1, len(pattern)), count - 1):
            bounds = (0, *cuts, len(pattern))
            yield [range(bounds[index], bounds[index + 1]) for index in range(count)]

    assert quality(stages) == min(map(quality, ways()))
    assert list(stages) in list(ways())


def exactly(value, scale):
    numerator, denominator = value.as_integer_ratio()
    return numerator * scale // denominator


@many
@given(patterns, st.integers(1, 8))
def test_stages_of_a_cut_pattern_are_its_segments_joined(pattern, count):
    segments = len(pattern.segments)
    if segments == 1:
        pattern, segments = Pattern((*pattern.segments, ()), pattern.mtp), 2
    if segments % count:
        with pytest.raises(PatternError, match=f"its {segments} segments do not divide into pp·vpp = {count} stages"):
            pattern.stages(count)
        return
    stages = pattern.stages(count)
    per_stage = segments // count
    joined = [tuple(chain(*pattern.segments[index * per_stage : (index + 1) * per_stage])) for index in range(count)]
    assert [tuple(pattern.layers[index] for index in stage) for stage in stages] == joined
    assert list(chain(*stages)) == list(range(len(pattern)))
    assert pattern.stages(1) == (range(len(pattern)),)


def test_segment_error_points_at_the_first_cut():
    with pytest.raises(PatternError, match="out of 1, 3, or move the cuts") as caught:
        Pattern.parse("[*-]{2} | * | *").stages(2)
    assert (caught.value.text, caught.value.column) == ("[*-]{2}|*|*", 8)


def test_ties_go_to_the_early_stages_and_the_head_counts_as_cost_of_the_last():
    assert Pattern.parse("*{7}").stages(3) == (range(3), range(3, 5), range(5, 7))
    assert [len(stage) for stage in Pattern.parse("[*-]{10}").stages(3, head_cost=8)] == [5, 4, 1]


def test_too_many_stages_are_refused_with_both_numbers():
    with pytest.raises(PatternError, match="its 4 layers cannot fill pp·vpp = 8 stages"):
        Pattern.parse("[*-]{4}").stages(8)


@pytest.mark.parametrize("count", [0, -1])
def test_no_stages_are_refused(count):
    with pytest.raises(ValueError, match="1 stage or more"):
        Pattern.parse("*").stages(count)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("stage", ["cost", "head_cost"])
def test_invalid_costs_are_refused(stage, value):
    argument = (lambda _: value) if stage == "cost" else value
    with pytest.raises(ValueError, match=r"The cost of (block '\*'|the head) is"):
        Pattern.parse("**").stages(2, **{stage: argument})
