"""TinkerBackend: what the Tinker server needs from the half that trains and samples. Plain Python and numpy, no torch.

`engine_backend.py` has the real one: `EngineBackend(models, layout=…, dtype=…, device=…, ray=…)`. The HTTP half owns
sessions, request order, deduplication, fairness, the state directory and its names. The backend owns weights,
gradients, optimizer states and sampling. It is called from one asyncio event loop.

What the HTTP half guarantees:

- Commands of one model run one at a time, in the order of their sequence numbers, and so do those of all models of one
  base, which take turns.
- `sample` calls run at the same time as each other and as commands. The backend batches them.
- Model ids and sampler ids are opaque, unique text. The directory of a save exists and is empty; the HTTP half renames
  it once the command has returned, so a save that fails half-way leaves nothing behind.

What a backend guarantees:

- A ValueError or TypeError is the client's mistake: one sentence, and the model is as it was before the call.
- `ModelLost` means that weights of the model that were not saved are gone, e.g. since a rank died. Other calls go on.
- Any other exception is the server's fault. The model is as before the call, or `ModelLost` is raised from then on.
- Cancelling the task of a `sample` call ends its generation. Commands are never cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postlude.generate.protocol import Completion, Progress, SamplingUsage
from postlude.generate.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
FloatArray = NDArray[np.float32]
LossInput = NDArray[np.float32] | NDArray[np.int64]
Result = TypeVar("Result")


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
    """Who asks: the key and the session. Keys take turns, and within the turns of a key its sessions."""


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens at each of n positions; an empty cell is token 0 with log-prob -99999."""

    tokens: Int32Array
    """[n, k]"""
    logprobs: FloatArray
    """[n, k]"""


@dataclass(frozen=True)
class PromptScores:
    """What a request asks about its prompt; None for what it does not ask."""

    logprobs: FloatArray | None = None
    """[N], NaN at position 0 and where it is not asked for."""
    top: TopK | None = None
    """[N, k]; empty at position 0 and where it is not asked for."""
    targets: FloatArray | None = None
    """[N - 1, K], from position 1 on; NaN where the target is -1."""


@dataclass(frozen=True)
class SampleResult:
    """The completions of one request, and what was asked about its prompt."""

    completions: Sequence[Completion]
    topk_samples: Sequence[TopK] = ()
    """The likeliest tokens of each completion, if they were asked for."""
    prompt: PromptScores = field(default_factory=PromptScores)
    prompt_cache_hit_tokens: int = 0


class TinkerCommand(Generic[Result]):
    """What is asked of the ranks of a base model, and the type of what they return."""


@dataclass(frozen=True)
class TrainingCommand(TinkerCommand[Result]):
    """A command about a model. Such commands, and those that open and close samplers, run one at a time, in order."""

    model_id: str


@dataclass(frozen=True)
class CreateModel(TrainingCommand[None]):
    """Makes a model with fresh adapters (or the base's weights), zero gradients and a fresh optimizer state.

    A ValueError says that there is no memory to train all weights.
    """

    spec: ModelSpec


@dataclass(frozen=True)
class RemoveModel(TrainingCommand[None]):
    """Frees a model. Unknown ids are ignored."""


@dataclass(frozen=True)
class ForwardBackward(TrainingCommand[ForwardBackwardResult]):
    """Runs a pass. Adds its gradients to those of earlier passes, or with `forward_only` leaves them alone."""

    request: PassRequest | int
    """The pass; between the HTTP process and the ranks also the number of one that was staged."""


@dataclass(frozen=True)
class OptimStep(TrainingCommand[Mapping[str, float]]):
    """Updates the weights with the accumulated gradients, then sets those to zero. Returns metrics (free names)."""

    adam: AdamParams


@dataclass(frozen=True)
class DiscardGradients(TrainingCommand[None]):
    """Sets the accumulated gradients to zero, if one pass of a step failed, so that no part of it is applied."""


@dataclass(frozen=True)
class SaveState(TrainingCommand[None]):
    """Writes weights and optimizer state into an empty directory."""

    directory: Path


@dataclass(frozen=True)
class LoadState(TrainingCommand[None]):
    """Reads what `SaveState` wrote for a model with the same spec. Drops gradients.

    Without `optimizer` the optimizer state is fresh.
    """

    directory: Path
    optimizer: bool


@dataclass(frozen=True)
class SaveForSampler(TrainingCommand[None]):
    """Writes the weights into an empty directory: a PEFT adapter, or for full training a Hugging Face model."""

    directory: Path


@dataclass(frozen=True)
class SnapshotSampler(TrainingCommand[None]):
    """Makes `sampler_id` sample the model's weights as they are now, unaffected by later steps. Not on disk."""

    sampler_id: str


@dataclass(frozen=True)
class OpenSampler(TinkerCommand[None]):
    """Makes `sampler_id` sample the weights of a directory that `SaveForSampler` wrote, or of the base model."""

    sampler_id: str
    directory: Path | None


@dataclass(frozen=True)
class CloseSampler(TinkerCommand[None]):
    """Frees a sampler; its running requests end with an error. Unknown ids are ignored."""

    sampler_id: str


@dataclass(frozen=True)
class SampleCommand(TinkerCommand[SampleResult]):
    """Samples, at the same time as others."""

    sampler_id: str
    request: SampleRequest
    streamed: bool


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
        """Makes a model: see `CreateModel`."""

    async def remove_model(self, model_id: str) -> None:
        """Frees a model. Unknown ids are ignored."""

    def stage(self, model_id: str, request: PassRequest) -> None:
        """Begins what can be done for a pass before its turn. Later the same request is run, or given to `unstage`."""

    def unstage(self, request: PassRequest) -> None:
        """Frees what `stage` did for a pass that will not run."""

    async def train(self, command: TrainingCommand[Result], ran: Callable[[], None] | None = None) -> Result:
        """Runs a command about a model that was created.

        May call `ran` once a pass has run, in the event loop, before it returns: the next command may then be made.
        """

    async def open_sampler(self, sampler_id: str, base_model: str, directory: Path | None) -> None:
        """Makes `sampler_id` sample the weights that `SaveForSampler` wrote; without a directory, the base model."""

    async def close_sampler(self, sampler_id: str) -> None:
        """Frees a sampler; its running requests end with an error. Unknown ids are ignored."""

    async def sample(
        self, sampler_id: str, request: SampleRequest, progress: Callable[[Progress], None] | None = None
    ) -> SampleResult:
        """Samples. With `progress`, calls it in the event loop with new tokens as they come."""

    def usage(self) -> SamplingUsage:
        """Returns how busy sampling is, of all base models together."""
