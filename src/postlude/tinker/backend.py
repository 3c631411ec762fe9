"""TinkerBackend: what the Tinker server needs from the half that trains and samples. Plain Python and numpy, no torch.

`engine_backend.py` has the real one: `EngineBackend(models, layout=…, dtype=…, device=…, ray=…)`. The HTTP half owns
sessions, request order, deduplication, fairness, the state directory and its names. The backend owns weights,
gradients, optimizer states and sampling. It is called from one asyncio event loop.

What the HTTP half guarantees:

- Calls of one model run one at a time, in the order of their sequence numbers. Of all models of one base, at most one
  training call runs at a time (all methods with a `model_id` are training calls). Models of one base take turns.
- `sample` calls run at the same time as each other and as training calls. The backend batches them.
- Model ids and sampler ids are opaque, unique text. A directory given to a `save_…` call exists and is empty; the HTTP
  half renames it once the call has returned, so a save that fails half-way leaves nothing behind.

What a backend guarantees:

- A ValueError or TypeError is the client's mistake: one sentence, and the model is as it was before the call.
- `ModelLost` means that weights of the model that were not saved are gone, e.g. since a rank died. Other calls go on.
- Any other exception is the server's fault. The model is as before the call, or `ModelLost` is raised from then on.
- Cancelling the task of a `sample` call ends its generation. Training calls are never cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postlude.generate.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]
LossInput = NDArray[np.float32] | NDArray[np.int64]
StopReason = Literal["stop", "length"]


class ModelLost(RuntimeError):
    """The weights of a model that were not saved are gone. The text is a sentence for the client."""


@dataclass(frozen=True)
class BaseModelInfo:
    """One base model that the backend serves."""

    name: str
    """As clients name it."""
    tokenizer: str
    """A Hugging Face name, or a directory with the tokenizer's files, which the client loads."""
    vocab_size: int
    max_context_length: int
    """The most tokens of a sequence, prompt and completion together."""
    losses: tuple[str, ...]
    """The names that `forward_backward` takes as `loss_fn`."""


@dataclass(frozen=True)
class LoRAConfig:
    """The adapters of a model, as a client asks for them. Bounds are checked where a request is read."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A model to create: a base with adapters, or (`lora=None`) with all weights trained."""

    base_model: str
    lora: LoRAConfig | None


@dataclass(frozen=True)
class Datum:
    """One sequence. The client has shifted: position i of `tokens` predicts `target_tokens[i]`."""

    tokens: Int32Array
    """[N] input tokens."""
    loss_fn_inputs: Mapping[str, LossInput]
    """Arrays [N] or [N, K] by name, such as target_tokens (int64), weights, logprobs, advantages (float32)."""


@dataclass(frozen=True, eq=False)
class PassRequest:
    """A forward_backward request, read."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool

    @property
    def size(self) -> int:
        """Bytes of its arrays."""
        return sum(
            datum.tokens.nbytes + sum(values.nbytes for values in datum.loss_fn_inputs.values()) for datum in self.data
        )


@dataclass(frozen=True)
class ForwardBackwardResult:
    """What a pass returns: one entry per datum, in the order of the call."""

    loss_fn_outputs: Sequence[Mapping[str, FloatArray]]
    """By name; `logprobs` has the shape of `target_tokens`."""
    metrics: Mapping[str, float]
    """Names end with a reduction, `name:reduction` (mean, sum, min, max, slack, hash2, unique); `loss:sum` is there."""


@dataclass(frozen=True)
class AdamParams:
    """The optimizer's settings for one step; a `grad_clip_norm` of 0 or less does not clip."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SampleRequest:
    """A prompt, how many completions to sample, and what to return about the prompt's tokens."""

    prompt: Int32Array
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    """Log-probs (and top-k) of the last n tokens of the prompt only; entries before them are NaN (or empty cells)."""
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: NDArray[np.int64] | None = None
    """[len(prompt) - 1, K]: row i has the tokens whose log-prob is wanted at position i + 1; -1 asks for nothing."""
    client: tuple[str, ...] = ()
    """Who asks: the key and the session. Requests that wait are begun with keys in turns, and sessions of a key."""


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens at each of n positions; an empty cell is token 0 with log-prob -99999."""

    tokens: Int32Array
    """[n, k]"""
    logprobs: FloatArray
    """[n, k]"""


@dataclass(frozen=True)
class SampledSequence:
    """One completion; the token that ended it is among its tokens."""

    stop_reason: StopReason
    tokens: Int32Array
    logprobs: FloatArray
    topk: TopK | None = None
    text: str | None = None
    """The tokens decoded without special ones, up to the stop string if one ended it; for OpenAI's routes."""


@dataclass(frozen=True)
class SampleResult:
    """The completions of one request, and what was asked about its prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: FloatArray | None = None
    """[prompt], NaN where there is none, as at position 0."""
    topk_prompt: TopK | None = None
    target_prompt_logprobs: FloatArray | None = None
    """[len(prompt) - 1, K]; NaN where the token is -1."""
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True)
class SampleProgress:
    """The tokens of completion `index` (from 0) since the last call, and their log-probs."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]


class TinkerBackend(Protocol):
    """Trains and samples. The docstring of the module has the rules."""

    @property
    def base_models(self) -> Sequence[BaseModelInfo]:
        """The base models that are served."""

    async def start(self) -> None:
        """Loads the base models; returns when the first call can be made."""

    async def stop(self) -> None:
        """Ends all work and frees everything."""

    async def create_model(self, model_id: str, spec: ModelSpec) -> None:
        """Makes a model with fresh adapters (or the base's weights), zero gradients and a fresh optimizer state.

        A ValueError says that there is no memory to train all weights.
        """

    def stage(self, model_id: str, request: PassRequest) -> None:
        """Begins what can be done for a pass before its turn. Later the same request is run, or given to `unstage`."""

    def unstage(self, request: PassRequest) -> None:
        """Frees what `stage` did for a pass that will not run."""

    async def forward_backward(
        self, model_id: str, request: PassRequest, ran: Callable[[], None] | None = None
    ) -> ForwardBackwardResult:
        """Runs a pass. Adds its gradients to those of earlier passes, or with `forward_only` leaves them alone.

        May call `ran` once it has run, in the event loop, before it returns: the next training call may then be made.
        """

    async def optim_step(self, model_id: str, adam: AdamParams) -> Mapping[str, float]:
        """Updates the weights with the accumulated gradients, then sets those to zero. Returns metrics (free names)."""

    async def discard_gradients(self, model_id: str) -> None:
        """Sets the accumulated gradients to zero. Called if one pass of a step failed, so no part of it is applied."""

    async def save_state(self, model_id: str, directory: Path) -> None:
        """Writes weights and optimizer state into an empty directory."""

    async def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Reads what `save_state` wrote for a model with the same spec. Drops gradients.

        Without `optimizer` the optimizer state is fresh.
        """

    async def save_for_sampler(self, model_id: str, directory: Path) -> None:
        """Writes the weights into an empty directory: a PEFT adapter, or for full training a Hugging Face model."""

    async def remove_model(self, model_id: str) -> None:
        """Frees a model. Unknown ids are ignored."""

    async def open_sampler(self, sampler_id: str, base_model: str, directory: Path | None) -> None:
        """Makes `sampler_id` sample the weights that `save_for_sampler` wrote; without a directory, the base model."""

    async def snapshot_sampler(self, model_id: str, sampler_id: str) -> None:
        """Makes `sampler_id` sample the model's weights as they are now, unaffected by later steps. Not on disk."""

    async def close_sampler(self, sampler_id: str) -> None:
        """Frees a sampler; its running requests end with an error. Unknown ids are ignored."""

    async def sample(
        self, sampler_id: str, request: SampleRequest, progress: Callable[[SampleProgress], None] | None = None
    ) -> SampleResult:
        """Samples. With `progress`, calls it in the event loop with new tokens as they come."""
