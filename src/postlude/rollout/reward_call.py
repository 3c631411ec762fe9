"""RewardCall: calls a reward function with the arguments that it names.

A function of one completion names `completion`, and gets single values; one of several names `completions`, as TRL's
do, and gets lists. Any other argument is a column of the row. It needs the standard library alone, since every worker
process imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from postlude.user_code import load_callable

LISTS = {
    "prompts": "prompt",
    "completions": "conversation",
    "raw_completions": "raw_completion",
    "answer_texts": "answer_text",
    "transcripts": "transcript",
    "completion_ids": "completion_ids",
    "lengths": "length",
    "truncated": "truncated",
    "examples": "example",
}
"""Arguments of a function of several completions, and the entries of a sample that they hold."""
PLURAL = frozenset(LISTS) - frozenset(LISTS.values())

SampleFields = Mapping[str, Any]
"""One completion: what `LISTS` names, "completion", and the `TrainerState`. "example" is its row."""


@dataclass(frozen=True)
class TrainerState:
    """How far a run is. It has the fields of transformers' class that TRL's reward functions read."""

    global_step: int = 0
    """Finished steps."""
    epoch: float = 0.0
    """Epochs of the tasks that were started."""
    max_steps: int = 0
    """Steps of the run; 0 if it trains nothing."""


NOT_TRAINING = TrainerState()


@dataclass
class RewardCall:
    """A reward function, or path/to/file.py:name of one, called with a list of samples.

    Returns a list with the value of each sample: of one if the function takes one. Called with None, it returns
    {"takes_list": ..., "is_async": ...} about the function.
    """

    source: str | Callable[..., Any]
    group: bool = False
    """Whether the samples of a call are all completions of one prompt."""
    _function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def prepare(self) -> None:
        """Loads the function and reads its signature."""
        function = load_callable(self.source) if isinstance(self.source, str) else self.source
        getattr(function, "prepare", lambda: None)()
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # of a builtin
            self._parameters = [inspect.Parameter("_", inspect.Parameter.VAR_POSITIONAL)]
        self._name = getattr(function, "__name__", type(function).__name__)
        names = {parameter.name for parameter in self._parameters}
        self.takes_list = bool(PLURAL & names)
        if self.group and not self.takes_list:
            raise ValueError(
                f"{self._described()} takes one completion, but group is true, which gives it all completions of a "
                f"prompt: write it as def {self._name}(completions, ...) -> list of rewards, or set group to false."
            )
        method = function if inspect.isroutine(function) else vars(type(function)).get("__call__")
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)
        self._function = function

    def __call__(self, samples: Sequence[SampleFields] | None) -> Any:
        """Returns the value of each sample, as the function returned them."""
        function = self.function
        if samples is None:
            return {"takes_list": self.takes_list, "is_async": self.is_async}
        return self._values(self._apply(function, samples))

    async def call_async(self, samples: Sequence[SampleFields]) -> Any:
        """Does the same with a coroutine function."""
        return self._values(await self._apply(self.function, samples))

    @property
    def function(self) -> Callable[..., Any]:
        if self._function is None:
            self.prepare()
        assert self._function is not None
        return self._function

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "group": self.group, "_function": None}

    def _apply(self, function: Callable[..., Any], samples: Sequence[SampleFields]) -> Any:
        if not self.takes_list and any(
            parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in self._parameters
        ):
            (sample,) = samples
            return function(sample["prompt"], sample["completion"], sample["example"])
        return function(**self._arguments(samples))

    def _values(self, result: Any) -> Any:
        if not self.takes_list:
            return [result]
        return result.tolist() if hasattr(result, "tolist") else result  # a tensor or an array

    def _arguments(self, samples: Sequence[SampleFields]) -> dict[str, Any]:
        """Returns the arguments that the function names. With **keywords it gets all fields and columns."""
        known = self._known(samples)
        arguments: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= known
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise TypeError(f'{self._described()} takes "{parameter.name}" by position only; leave out the "/"')
            elif parameter.name in known:
                arguments[parameter.name] = known[parameter.name]
            elif parameter.default is inspect.Parameter.empty:
                raise TypeError(
                    f'{self._described()} asks for "{parameter.name}", which is no column of the row and none of what '
                    f"a reward function may ask for: {', '.join(known)}"
                )
        return arguments

    def _known(self, samples: Sequence[SampleFields]) -> dict[str, Any]:
        rows = [sample["example"] for sample in samples]
        if not self.takes_list:
            return {**rows[0], **{name: value for name, value in samples[0].items() if name != "conversation"}}
        columns = dict.fromkeys(column for row in rows for column in row)
        lists = {name: [sample[entry] for sample in samples] for name, entry in LISTS.items()}
        by_column = {column: [row.get(column) for row in rows] for column in columns}
        return {**by_column, **lists, "trainer_state": samples[0]["trainer_state"]}

    def _described(self) -> str:
        return f"{self._name}({', '.join(str(parameter).split(':')[0] for parameter in self._parameters)})"
