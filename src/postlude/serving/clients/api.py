"""ServerAPI: how one kind of server is asked for answers, and how it is given new weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.serving.errors import InvalidResponse, ServerBusy

ABORTED = frozenset({"abort", "cancelled"})
FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class Ask(Protocol):
    """One request to the server. Gives the JSON it answers with, or raises one of `errors`."""

    async def __call__(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of its answer."""
        ...


@dataclass(frozen=True)
class TensorSpecs:
    """What one send carries: tensors one behind the other, each of so many bytes as its dtype and shape say."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """As torch calls them, without "torch."."""
    shapes: Sequence[Sequence[int]]


class ServerAPI(ABC):
    """What is known of one server, and its words. An instance belongs to one server."""

    name: str
    reloads: bool = False
    """Whether it can be given new weights while it runs."""
    sums: bool = False
    """Whether it tells the checksum of weights that it has read."""
    hashes: bool = False
    """Whether it tells what its weights hash to as it holds them."""
    receives: bool = False
    """Whether they can be sent straight into its memory, with no disk between."""
    leaves_out_stops: bool = False
    """Whether the tokens that ended an answer are not among its tokens, so that one may have none."""

    async def meet(self, ask: Ask) -> None:
        """Learn what must be known of a server that has just come up. Any answer shows that it is there."""
        await ask("GET", "/v1/models")

    async def models(self, ask: Ask) -> list[str]:
        """What it calls the models that it serves."""
        found = await ask("GET", "/v1/models")
        try:
            return [str(each["id"]) for each in found["data"]]
        except (KeyError, TypeError) as error:
            raise InvalidResponse("gives no list of models at /v1/models") from error

    async def longest(self, ask: Ask, model: str) -> int | None:
        """The most tokens, prompt and answer together, that it takes; None where it does not say."""
        found = await ask("GET", "/v1/models")
        try:
            stated = next(each for each in found["data"] if each["id"] == model).get("max_model_len")
        except (AttributeError, KeyError, StopIteration, TypeError):
            return None
        return stated if isinstance(stated, int) and stated > 0 else None

    @abstractmethod
    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer, with token ids and the log-prob of each."""

    async def version(self, ask: Ask) -> str | None:
        """What it calls the weights it has; None where it does not say."""
        return None

    async def paused(self, ask: Ask) -> bool:
        """Whether it would not answer until it is told to go on."""
        return False

    async def checksum(self, ask: Ask) -> str | None:
        """Of the weights it has, as `hf.checksum` counts; None where it does not say."""
        return None

    async def digests(self, ask: Ask) -> Mapping[str, str] | None:
        """What its weights hash to, by names of its own, to be compared with those of its like; None if it is mute."""
        return None

    async def drawback(self, ask: Ask, *, tied_head: bool, sent: bool) -> str:
        """Why new weights of such a model, read or `sent`, would not all be used, as a clause; empty if they would."""
        return ""

    async def reload(self, ask: Ask, directory: str, version: str) -> None:
        """Take the weights in a directory that it can read, and call them `version`. Answers in flight go on."""
        raise NotImplementedError(f"{self.name} takes no new weights")

    async def workers(self, ask: Ask) -> int:
        """How many processes hold its model: each has to join a channel."""
        raise NotImplementedError(f"{self.name} reads weights from disk alone")

    async def join(self, ask: Ask, info: Mapping[str, Any], workers: int) -> None:
        """Have all workers join a channel, at the place that `info` names."""
        raise NotImplementedError(f"{self.name} reads weights from disk alone")

    async def begin(self, ask: Ask) -> None:
        """Keep answers in flight as they are, and be ready for new weights."""
        raise NotImplementedError(f"{self.name} reads weights from disk alone")

    async def take(self, ask: Ask, tensors: TensorSpecs) -> None:
        """Take one send from the channel. It comes while this is asked."""
        raise NotImplementedError(f"{self.name} reads weights from disk alone")

    async def finish(self, ask: Ask, version: str) -> None:
        """Use the new weights from now on, under the name `version`. Answers in flight go on."""
        raise NotImplementedError(f"{self.name} reads weights from disk alone")


def text_or_none(value: Any) -> str | None:
    """A text that a server may leave out."""
    return value if isinstance(value, str) else None


def completion(
    tokens: Any, logprobs: Any, reason: Any, text: Any = None, finish: Mapping[str, FinishReason] = FINISH
) -> Completion:
    """One answer of what a server said of it, or `InvalidResponse`."""
    if reason in ABORTED:  # by its pause, or its end: what there is of the answer is no sample
        raise ServerBusy(f"ended an answer for the reason {reason!r}")
    if reason not in finish:
        raise InvalidResponse(f"ended an answer for the reason {reason!r}, not stop or length")
    try:
        ids, values = [int(token) for token in tokens], [float(value) for value in logprobs]
        if ids != tokens:  # texts, or fractions
            raise ValueError(str(tokens)[:80])
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidResponse(f"gave token ids or log-probs that are no numbers: {error}") from error
    if not all(map(math.isfinite, values)):
        raise InvalidResponse("gave log-probs that are not finite")
    if len(ids) != len(values):
        raise InvalidResponse(f"gave {len(ids)} tokens but {len(values)} log-probs")
    return Completion(ids, values, list(values), finish[reason], text_or_none(text))
