"""Types of options of the command line: argparse reports a mistake with the option's name, before torch is imported."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.options import check_layer_choice

Number = TypeVar("Number", int, float)
LARGEST_SEED = 2**63 - 1  # of torch's generators, with room for seeds that are derived from it


def _number(kind: Callable[[str], Number], accepts: Callable[[Number], bool], what: str) -> Callable[[str], Number]:
    """Returns a type of option: a number that is accepted, called `what` in messages."""

    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if accepts(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ValueError
    return int(text)


above_zero = _number(float, lambda number: 0 < number < math.inf, "a number above 0")
from_zero = _number(float, lambda number: number >= 0, "a number of at least 0")
count = _number(_whole, lambda number: number > 0, "a whole number of at least 1")
count_from_zero = _number(_whole, lambda number: True, "a whole number of at least 0")
seed = _number(_whole, lambda number: number <= LARGEST_SEED, f"a whole number from 0 to {LARGEST_SEED}")
port = _number(_whole, lambda number: number <= 65535, "from 1 to 65535, or 0 for one that is free")


def layout(text: str) -> str:
    """Returns the text of a layout that can be parsed."""
    try:
        Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from error
    return text


def lora(text: str) -> LoRA:
    """Returns the settings of LoRA."""
    try:
        return LoRA.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from error


def layer_choice(text: str) -> str:
    """Returns text that names layers."""
    try:
        check_layer_choice("the choice", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from error
    return text
