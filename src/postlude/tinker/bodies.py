"""The JSON bodies of requests. Unknown fields are ignored, since newer clients have more of them."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from postlude.generate.sampling_params import SamplingParams
from postlude.serving.request_body import Tokens
from postlude.tinker.backend import AdamParams, LoRAConfig
from postlude.tinker.limits import dense_from_csr

INT32 = 2**31 - 1
SEED_BITS = 48


class TinkerBody(BaseModel):
    """Strict types and finite numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


METADATA_BYTES = 16 * 1024


def _check_metadata(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > METADATA_BYTES:
        raise ValueError(f"metadata of {size} bytes; the limit is {METADATA_BYTES}.")
    return value


Label = Annotated[str, Field(max_length=256)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]
TextMetadata = Annotated[dict[str, str], AfterValidator(_check_metadata)]
Sequential = Annotated[int, Field(ge=0, le=INT32)]
Seconds = Annotated[int, Field(ge=1, le=100 * 366 * 24 * 3600)]  # up to 100 years, which a date can be
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class ClientConfigBody(TinkerBody):
    sdk_version: Label = ""


class CreateSessionBody(TinkerBody):
    tags: Annotated[tuple[Label, ...], Field(max_length=64)] = ()
    user_metadata: TextMetadata | None = None
    sdk_version: Label = ""
    project_id: Label | None = None
    display_name: Label | None = None


class SessionBody(TinkerBody):
    session_id: str


class FinishReasonBody(TinkerBody):
    type: str = "success"


class FinishBody(TinkerBody):
    reason: FinishReasonBody = FinishReasonBody()


class OptimizerConfigBody(TinkerBody):
    type: str = "adamw"


def check_optimizer(config: OptimizerConfigBody | None) -> None:
    """Refuses an optimizer that is not supported."""
    if config is not None and config.type != "adamw":
        raise ValueError(f"the optimizer {config.type!r} is not supported; there is 'adamw'.")


class CreateModelBody(TinkerBody):
    session_id: str
    model_seq_id: Sequential
    base_model: str
    lora_config: LoRAConfig | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfigBody | None = None


class ModelBody(TinkerBody):
    model_id: str


class TrainingBody(TinkerBody):
    """What all training requests of a model have."""

    model_id: str
    seq_id: Sequential


class OptimStepBody(TrainingBody):
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfigBody | None = None


class SaveBody(TrainingBody):
    """POST save_weights, save_weights_for_sampler and save_weights_external."""

    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: TextMetadata | None = None
    sampling_session_seq_id: Sequential | None = None
    age_encryption_recipients: tuple[str, ...] | None = None


class LoadBody(TinkerBody):
    """POST load_weights: into a model, or (with `session_id`) as a new model."""

    model_id: str | None = None
    seq_id: Sequential | None = None
    session_id: str | None = None
    model_seq_id: Sequential | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfigBody | None = None


class PathBody(TinkerBody):
    tinker_path: str


class TTLBody(TinkerBody):
    ttl_seconds: Seconds | None = None


class SamplingSessionBody(TinkerBody):
    session_id: str
    sampling_session_seq_id: Sequential
    base_model: str | None = None
    model_path: str | None = None


class JoinBody(TinkerBody):
    sampling_session_id: str


class RequestBody(TinkerBody):
    request_id: str


class ChunkBody(TinkerBody):
    type: str = "encoded_text"
    tokens: Tokens | None = None


class PromptBody(TinkerBody):
    chunks: tuple[ChunkBody, ...]

    def tokens(self) -> NDArray[np.int32]:
        """Returns the tokens. Refuses parts that are not text."""
        values: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text" or chunk.tokens is None:
                raise ValueError(
                    f"prompt.chunks.{index} is of type {chunk.type[:40]!r}, but only encoded_text is supported."
                )
            values.extend(chunk.tokens)
        if values and not -INT32 <= min(values) <= max(values) <= INT32:
            raise ValueError("the prompt has a token beyond 32 bits.")
        return np.array(values, np.int32)


class SamplingParamsBody(TinkerBody):
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    seed: Int64 | None = None
    stop: Annotated[
        str | tuple[str, ...] | tuple[int, ...] | None, Field(description="text, a list of texts, or a list of tokens")
    ] = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def sampling(self, room: int) -> SamplingParams:
        """Returns the sampling parameters of a completion that has room for so many tokens.

        Without a seed, each request gets a random one. A list of stops, an empty one too, replaces the end-of-sequence
        token.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return SamplingParams(
            max_new_tokens=self.max_tokens or room,
            seed=secrets.randbits(SEED_BITS) if self.seed is None else self.seed,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_tokens=tuple(stop for stop in stops if isinstance(stop, int)),
            ignore_eos=self.stop is not None,
        )


class TensorBody(TinkerBody):
    data: tuple[Int64, ...]
    shape: tuple[Int64, ...] | None = None
    sparse_crow_indices: tuple[Int64, ...] | None = None
    sparse_col_indices: tuple[Int64, ...] | None = None

    def targets(self, rows: int) -> NDArray[np.int64]:
        """Returns token ids [rows, K], with -1 where a sparse tensor has no entry."""
        shape = self.shape or ()
        if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= 1024:
            raise ValueError(f"target_prompt_logprobs has the shape {list(shape)}: give [{rows}, K] with K up to 1024.")
        values = np.array(self.data, np.int64)
        if self.sparse_crow_indices is None:
            if len(values) != rows * shape[1]:
                raise ValueError(f"target_prompt_logprobs has {len(values)} values for the shape {list(shape)}.")
            return values.reshape(shape)
        starts = np.array(self.sparse_crow_indices, np.int64)
        columns = np.array(self.sparse_col_indices or (), np.int64)
        return dense_from_csr(values, starts, columns, shape, "target_prompt_logprobs", empty=-1)


class SampleBody(TinkerBody):
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0, le=2**62)]
    prompt: PromptBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
