"""Tasks and rewards of other libraries, as functions that worker processes run.

The libraries are imported when a function is prepared, so that workers import nothing else.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import logging
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postlude.data import thoughts

BOX = "\\boxed{"


def extract(completion: str, tag: str | None) -> str | None:
    """Returns the text in the last <tag>...</tag>, or None if there is none; without a tag, the whole completion."""
    if tag is None:
        return completion.strip()
    texts: list[str] = re.findall(f"<{tag}>(.*?)</{tag}>", completion, flags=re.DOTALL)
    return texts[-1].strip() if texts else None


@dataclass(frozen=True)
class ExactReward:
    """1 if the completion without thoughts is the text of the example's column, spaces around left out, else 0."""

    column: str = "answer"

    def __call__(
        self, prompt: Any, completion: str, example: Mapping[str, Any], answer_text: str | None = None
    ) -> float:
        return float(_answer(completion, answer_text).strip() == _column(example, self.column).strip())


@dataclass
class MathReward:
    """1 if the answer equals the example's column as mathematics, by math-verify, else 0.

    The answer is searched in the completion without its thoughts: in the last <`tag`> if one is named, else in the last
    \\boxed{}, in LaTeX, then as a plain expression. The column holds an expression, in LaTeX or plain, or a solution
    that ends in one after "####". A column without an expression is a failure.
    """

    column: str = "answer"
    tag: str | None = None
    _library: Any = field(default=None, repr=False, compare=False)

    def prepare(self) -> None:
        self._library = _import("math_verify", "math-verify", "scoring mathematical answers")
        for module in ("parser", "grader"):  # they warn that they have no time limit, but the worker has one
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def __call__(
        self, prompt: Any, completion: str, example: Mapping[str, Any], answer_text: str | None = None
    ) -> dict[str, float]:
        """Returns the reward and its components: "parsed", whether the completion has an answer, and "correct"."""
        if self._library is None:
            self.prepare()
        expected = self._parse(f"\\boxed{{{_final(_column(example, self.column))}}}")
        if not expected:
            raise ValueError(f"{example[self.column]!r} holds no mathematical answer")
        answer = extract(_answer(completion, answer_text), self.tag)
        if answer and self.tag is not None:
            answer = f"\\boxed{{{_bare(answer)}}}"
        parsed = self._parse(_last_box(answer) or answer) if answer else []
        correct = bool(parsed) and self._library.verify(expected, parsed, timeout_seconds=None)
        return {"reward": float(correct), "correct": float(correct), "parsed": float(bool(parsed))}

    def _parse(self, text: str) -> list[Any]:
        parsed: list[Any] = self._library.parse(text, parsing_timeout=None)
        return parsed

    def __getstate__(self) -> dict[str, Any]:
        return {"column": self.column, "tag": self.tag, "_library": None}


@dataclass
class GymReward:
    """The score of reasoning-gym, 0 to 1, of a completion without thoughts: of its last <`tag`>, or of all of it."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tag: str | None = "answer"
    _dataset: Any = field(default=None, repr=False, compare=False)

    def prepare(self) -> None:
        """Builds the task's dataset, which has the scoring function."""
        self._dataset = gym_dataset(self.name, {**self.config, "seed": 0, "size": 1})

    def __call__(
        self, prompt: Any, completion: str, example: Mapping[str, Any], answer_text: str | None = None
    ) -> dict[str, float]:
        """Returns the reward and its part "answered", whether there was an answer to score."""
        if self._dataset is None:
            self.prepare()
        answer = extract(_answer(completion, answer_text), self.tag)
        if answer is None:
            return {"reward": 0.0, "answered": 0.0}
        return {"reward": float(self._dataset.score_answer(answer=answer, entry=dict(example))), "answered": 1.0}

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "config": dict(self.config), "tag": self.tag, "_dataset": None}


@dataclass
class GymEntries:
    """Entries of a reasoning-gym dataset: entries(start, stop) returns them pickled, in base64.

    A worker generates them, because some tasks iterate over sets and so depend on the hash seed of the process. Ranks
    and resumed runs would get different tasks; workers all have the same hash seed.
    """

    name: str
    config: Mapping[str, Any]
    seed: int
    size: int
    _dataset: Any = field(default=None, repr=False, compare=False)

    def prepare(self) -> None:
        self._dataset = gym_dataset(self.name, {**self.config, "seed": self.seed, "size": self.size})

    def __call__(self, start: int, stop: int) -> str:
        """Returns the entries from `start` to before `stop`, for `decode_entries`."""
        entries = [self._dataset[index] for index in range(start, stop)]
        return base64.b64encode(
            pickle.dumps(entries)
        ).decode()  # JSON would turn tuples into lists, which scoring does not accept


def decode_entries(page: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = pickle.loads(base64.b64decode(page))
    return entries


def gym_dataset(name: str, settings: Mapping[str, Any]) -> Any:
    """Builds a reasoning-gym dataset. The error about an unknown name or setting names the nearest known one."""
    library = _import("reasoning_gym", "reasoning-gym", f'the task "{name}"')
    known: dict[str, tuple[Any, Any]] = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known))}."
        raise ValueError(f'reasoning-gym has no task "{name}"; {hint}')
    accepted = list(known[name][1].__dataclass_fields__)
    for setting in settings:
        if setting not in accepted:
            near = difflib.get_close_matches(setting, accepted, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"it has: {', '.join(accepted)}."
            raise ValueError(f'reasoning-gym\'s task "{name}" has no setting "{setting}"; {hint}')
    try:
        return library.create_dataset(name, **settings)
    except AssertionError as error:  # how the library refuses a setting
        raise ValueError(f'reasoning-gym refuses these settings of "{name}": {error}') from error


def _answer(completion: str, text: str | None) -> str:
    """Returns the completion without its thoughts, which the caller may know already."""
    return thoughts.answer_text(completion) if text is None else text


def _last_box(text: str) -> str | None:
    """Returns the last complete \\boxed{...} of a text."""
    start = text.rfind(BOX)
    while start >= 0:
        depth = 0
        for place in range(start + len(BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[start : place + 1]
        start = text.rfind(BOX, 0, start)
    return None


def _column(example: Mapping[str, Any], name: str) -> str:
    if name not in example:
        raise ValueError(
            f'the example has no "{name}"; it has: {", ".join(example)}. Name the column as environment.answer'
        )
    return str(example[name])


def _import(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs the package {package}: pip install {package}.") from error


def _final(solution: str) -> str:
    """Returns the answer of a solution, after its last "####", without delimiters of mathematics."""
    return _bare(solution.rpartition("####")[2])


def _bare(expression: str) -> str:
    text = expression.strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            return text[len(left) : -len(right)].strip()
    return text
