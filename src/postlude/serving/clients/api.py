"""ServerAPI: the HTTP API of one kind of server: generation and weight updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.serving.errors import InvalidResponse, ServerBusy
from postlude.serving.weights.delta import WeightPieces

ABORTED = frozenset({"abort", "cancelled"})
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class SendRequest(Protocol):
    async def __call__(self, method: str, path: str, body: Any = None) -> Any:
        """Returns the JSON of the reply, or raises one of `serving.errors`."""


@dataclass(frozen=True)
class TensorSpecs:
    """The tensors of one broadcast, concatenated as bytes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """torch's names without "torch."."""
    shapes: Sequence[Sequence[int]]
    handles: Mapping[str, str] = field(default_factory=dict)
    """The handle of the trainer's shared buffer, by device (`serving.vllm.shared_buffers`); empty if bytes are sent."""


class DraftCounts(NamedTuple):
    """What a server that drafts has counted since its start."""

    steps: int
    """Steps of completions in which tokens were drafted."""
    drafted: int
    accepted: int
    """Tokens."""


class ServerAPI(ABC):
    """The API of one server. An instance belongs to one server and may store its detected features."""

    name: str
    can_reload_weights: bool = False
    """Whether it can read new weights from a directory while it runs."""
    reports_checksum: bool = False
    """Whether it reports the checksum of the weights that it read."""
    has_logit_rules: bool = False
    """Whether it samples with penalties, a JSON schema and the likeliest tokens, with log-probs before these."""
    has_sampling_mask: bool = False
    """Whether it can return the tokens that each token was sampled from."""
    takes_pieces: bool = False
    """Whether it can be sent weights in pieces, all or those that changed."""
    reports_hashes: bool = False
    """Whether it reports a hash of each parameter in its memory."""
    can_receive_weights: bool = False
    """Whether it can receive new weights over the network while it runs."""
    asleep: bool = False
    """Whether it has neither weights nor KV cache in memory."""
    omits_stop_tokens: bool = False
    """Whether a token that ended a completion may be missing, so that a completion may be empty."""

    async def detect_features(self, send: SendRequest) -> None:
        await send("GET", "/v1/models")

    async def model_names(self, send: SendRequest) -> list[str]:
        """Returns the names of the models that it serves, without adapters, which have a parent."""
        models = await send("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in models["data"] if not model.get("parent")]
        except (AttributeError, KeyError, TypeError) as error:
            raise InvalidResponse("gives no list of models at /v1/models") from error

    async def max_length(self, send: SendRequest, model: str) -> int | None:
        """Returns the maximum number of tokens of prompt and completion together; None if it is not reported."""
        models = await send("GET", "/v1/models")
        try:
            length = next(entry for entry in models["data"] if entry["id"] == model).get("max_model_len")
        except (AttributeError, KeyError, StopIteration, TypeError):
            return None
        return length if isinstance(length, int) and length > 0 else None

    @abstractmethod
    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        """Returns one completion, with token ids and the log-prob of each."""

    async def weights_version(self, send: SendRequest) -> str | None:
        """Returns the server's name for its weights; None if it reports none."""
        return None

    async def is_paused(self, send: SendRequest) -> bool:
        return False

    async def draft_counts(self, send: SendRequest) -> DraftCounts | None:
        """Returns its counts of drafts; None if it does not draft, or does not say."""
        return None

    async def weights_checksum(self, send: SendRequest) -> str | None:
        """Returns the checksum of its weights, as `hf.tensor_sources.checksum` computes it; None if it reports none."""
        return None

    async def parameter_hashes(self, send: SendRequest) -> Mapping[str, str] | None:
        """Returns a hash of each parameter, by the server's own names; None if it reports none."""
        return None

    async def update_problem(self, send: SendRequest, *, tied_head: bool, over_network: bool) -> str:
        """Returns why weight updates would not work, as text that follows its URL; "" if they work.

        `tied_head` says that the model's output head is its embedding.
        """
        return ""

    async def reload(self, send: SendRequest, directory: str, version: str) -> None:
        """Reads weights from a directory and calls them `version`. Running completions continue with them."""
        raise NotImplementedError(f"{self.name} takes no new weights")

    async def send_piece(self, send: SendRequest, piece: bytes) -> None:
        """Sends a piece of new weights (`weights.delta`). With the last one it uses them, as after a `reload`."""
        raise NotImplementedError(f"{self.name} takes no weights in pieces")

    async def read_pieces(self, send: SendRequest, weights: WeightPieces) -> None:
        """Makes it read the pieces itself, as if they were sent. It refuses with status 404 if it does not see them."""
        raise NotImplementedError(f"{self.name} takes no weights in pieces")

    async def adapter_problem(self, send: SendRequest) -> str:
        """Returns why it cannot load LoRA adapters while it runs, as text that follows its URL; "" if it can."""
        return f"is {self.name}, which is not given adapters"

    async def load_adapter(self, send: SendRequest, name: str, directory: str, version: str) -> None:
        """Reads peft's files into the adapter `name`, new or not, and calls all weights of the server `version`.

        A request with the model `name` uses it. Running completions continue with it.
        """
        raise NotImplementedError(f"{self.name} takes no adapters")

    async def sleep(self, send: SendRequest) -> None:
        """Frees the memory of weights and KV cache, so that a trainer on the same device can use it."""
        raise NotImplementedError(f"{self.name} keeps its memory")

    async def wake(self, send: SendRequest) -> None:
        """Takes requests again, with the weights that were sent since `sleep`."""
        raise NotImplementedError(f"{self.name} keeps its memory")

    async def worker_count(self, send: SendRequest) -> int:
        """Returns how many processes hold its model. Each joins the channel, a process group for weights."""
        raise NotImplementedError(f"{self.name} reads weights from disk only")

    async def join_channel(self, send: SendRequest, info: Mapping[str, Any], workers: int) -> None:
        """Makes all workers join the trainer's channel at the address in `info`."""
        raise NotImplementedError(f"{self.name} reads weights from disk only")

    async def begin_update(self, send: SendRequest) -> None:
        """Pauses running completions and prepares for new weights."""
        raise NotImplementedError(f"{self.name} reads weights from disk only")

    async def receive_tensors(self, send: SendRequest, specs: TensorSpecs) -> None:
        """Receives one broadcast from the channel. The trainer sends it during this request."""
        raise NotImplementedError(f"{self.name} reads weights from disk only")

    async def finish_update(self, send: SendRequest, version: str) -> None:
        """Uses the new weights under the name `version`, and resumes running completions."""
        raise NotImplementedError(f"{self.name} reads weights from disk only")


def make_completion(
    tokens: Any, logprobs: Any, reason: Any, text: Any = None, reasons: Mapping[str, FinishReason] = FINISH_REASONS
) -> Completion:
    """Returns a completion from the fields of a reply. Raises `InvalidResponse` if they are invalid."""
    if reason in ABORTED:  # by a pause or a shutdown: a partial completion cannot be used, so the request is retried
        raise ServerBusy(f"ended a completion for the reason {reason!r}")
    if reason not in reasons:
        raise InvalidResponse(f"ended a completion for the reason {reason!r}, not stop or length")
    try:
        ids, values = [int(token) for token in tokens], [float(value) for value in logprobs]
        if ids != tokens:  # text or fractions
            raise ValueError(str(tokens)[:80])
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidResponse(f"gave token ids or log-probs that are not numbers: {error}") from error
    if not all(map(math.isfinite, values)):
        raise InvalidResponse("gave log-probs that are not finite")
    if len(ids) != len(values):
        raise InvalidResponse(f"gave {len(ids)} tokens but {len(values)} log-probs")
    return Completion(ids, values, list(values), reasons[reason], text if isinstance(text, str) else None)
