"""Exported timelines show span durations, lanes and names, and the fraction of exchanges hidden behind compute."""

from xml.etree import ElementTree

import pytest

from postlude.trace.spans import Span, SpanKind, chrome_events, exchange_seconds, starting_at_zero
from postlude.trace.svg import COLOURS, LEFT, WIDTH, Timeline, render_svg


def span(
    kind: SpanKind, start: float, end: float, name: str = "work", rank: int = 0, microbatch: int | None = 1
) -> Span:
    return Span(rank, kind, name, start, end, microbatch)


SPANS = [
    span("forward", 0, 4, "layers.0 attention+moe.route"),
    span("exchange", 3, 7, "layers.0 moe.dispatch"),
    span("wait", 5, 6, "dispatch"),
    span("backward", 4, 5, microbatch=0),
    span("exchange back", 6.5, 9, microbatch=0),
    span("weights", 7, 8, microbatch=0),
    span("forward", 0, 2, "a<b", rank=1),
    span("exchange", 1, 3, rank=1),
    span("wait", 1.5, 2, rank=1),
]


def test_exchange_seconds_counts_total_and_hidden_time() -> None:
    # rank 0: under way 3 to 9, computing 0 to 5 and 7 to 8; rank 1: 1 to 3, computing 0 to 2 less half a second.
    assert exchange_seconds(SPANS) == pytest.approx((6 + 2, (2 + 1) + 0.5))
    assert exchange_seconds([]) == (0, 0)


@pytest.mark.parametrize("kind", ["wait", "fsdp"])
def test_exchange_during_wait_is_not_hidden(kind: SpanKind) -> None:
    assert exchange_seconds([span("forward", 0, 2), span(kind, 0, 2), span("exchange", 0, 2)]) == (2, 0)


def test_span_labels() -> None:
    assert [span.label for span in SPANS[:3]] == [
        "F1 layers.0 attention+moe.route",
        "F1 layers.0 moe.dispatch",
        "wait 1 dispatch",
    ]
    assert [SPANS[index].label for index in (4, 5)] == ["B0 work", "W0 work"]
    assert Span(0, "fsdp", "weights", 0, 1).label == "weights"


def test_shift_to_zero_keeps_durations_and_order() -> None:
    shifted = starting_at_zero([span("forward", 12, 15), span("forward", 10, 11)])
    assert [(span.start, span.end) for span in shifted] == [(0, 1), (2, 5)]


def test_chrome_trace_has_one_process_per_rank_and_one_row_per_lane() -> None:
    events = chrome_events(SPANS, first_process=4, title="plain")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {4: "plain rank 0", 5: "plain rank 1"}
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {0: "compute", 1: "communication", 2: "communication back"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"], event["tid"]) for event in spans[:2]] == [
        ("F1 layers.0 attention+moe.route", 0, 4e6, 0),
        ("F1 layers.0 moe.dispatch", 3e6, 4e6, 1),
    ]
    assert [event["tid"] for event in spans] == [0, 1, 0, 0, 2, 0, 0, 1, 0]


def test_svg_is_to_scale() -> None:
    half = [span("forward", 0, 4.5), span("exchange", 1, 2)]
    text = render_svg([Timeline("one & all", SPANS), Timeline("half", half)])
    root = ElementTree.fromstring(text)
    shapes = [shape for shape in root.iter("{http://www.w3.org/2000/svg}rect") if len(shape)]
    assert len(shapes) == len(SPANS) + len(half)
    drawn = {shape[0].text: shape for shape in shapes}
    dispatch = drawn["F1 layers.0 moe.dispatch, 4000.00 ms"]
    assert float(dispatch.attrib["x"]) == pytest.approx(LEFT + WIDTH * 3 / 9, abs=0.1)
    assert float(dispatch.attrib["width"]) == pytest.approx(WIDTH * 4 / 9, abs=0.1)
    assert dispatch.attrib["fill"] == COLOURS["exchange"]
    assert "F1 a<b, 2000.00 ms" in drawn
    assert float(drawn["F1 work, 4500.00 ms"].attrib["width"]) == pytest.approx(WIDTH / 2, abs=0.1)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "one & all: 9000.0 ms, of which 4000.0 ms with an exchange under way, 44% hidden" in words
    assert "half: 4500.0 ms, of which 1000.0 ms with an exchange under way, 100% hidden" in words
    assert words.count("rank 0") == 2
    assert words.count("rank 1") == 1
    lowest = max(float(shape.attrib["y"]) + float(shape.attrib["height"]) for shape in shapes)
    assert lowest < float(root.attrib["height"])


def test_svg_of_empty_timeline() -> None:
    assert "nothing: 0.0 ms, no exchange" in render_svg([Timeline("nothing", [])])
