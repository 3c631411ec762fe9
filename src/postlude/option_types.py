"""Types of options of the command line: argparse reports a mistake with the option's name, before torch is imported."""

from __future__ import annotations

import argparse
import contextlib

from postlude.layout import Layout
from postlude.lora import LoRA


def above_zero(text: str) -> float:
    """Returns a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def count(text: str) -> int:
    """Returns a whole number of at least 1."""
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_from_zero(text: str) -> int:
    """Returns a whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def from_zero(text: str) -> float:
    """Returns a number of at least 0."""
    with contextlib.suppress(ValueError):
        if (number := float(text)) >= 0:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


def port(text: str) -> int:
    """Returns a port, or 0 for one that is free."""
    if not (text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 65535, or 0 for one that is free")
    return int(text)


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
