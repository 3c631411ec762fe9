"""Generator: the native inference engine. It samples completions from a LanguageModel, with continuous batching.

Completions join as others finish. A prompt is prefilled once for all its completions, and then each step samples a
token of every running completion. `scheduler.py` decides which ones run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import get_args

import torch

from postlude.checks import check_choice
from postlude.data.chat_tokenizer import AnyTokenizer
from postlude.generate.adapters import MatrixPairs, NamedAdapters
from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.counter_rng import rng_key
from postlude.generate.cuda_graphs import why_no_cuda_graph
from postlude.generate.eager_scheduler import EagerScheduler
from postlude.generate.grammar import Grammars
from postlude.generate.graph_scheduler import DecodeCapacity, GraphBuffers, GraphScheduler, is_small
from postlude.generate.model_step import check_routing_record
from postlude.generate.pages import ROW_PAGE_SIZE, SavedPage
from postlude.generate.prefix_cache import PrefixCache
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.scheduler import Scheduler
from postlude.generate.text_stream import StopStrings, completion_text
from postlude.hf.read_model import context_length as model_context_length
from postlude.hf.read_model import end_tokens
from postlude.lora import AdapterConfig
from postlude.model import LanguageModel, ModelConfig
from postlude.model.batch_invariant import check_batch_invariant
from postlude.model.fp8 import FP8Weights, check_quantization
from postlude.model.parallel import is_dtensor
from postlude.ops.batch_invariant import batch_invariant
from postlude.ops.kernels.capabilities import gpu_of, why_not
from postlude.ops.linear import blas_fp32_matmul
from postlude.ops.paged_attention import PAGE_SIZE
from postlude.options import Draft, KVCacheDtype, Quantization

log = logging.getLogger(__name__)
CapacityOf = Callable[[Sequence[CompletionState], int, int], DecodeCapacity]


class Generator:
    """Samples from `model` with its current weights, so that log-probs of sampling and training agree to rounding.

    `context_length` is the maximum number of tokens of a prompt and its completion, by default what the model's config
    states. `max_batch_tokens` is the size of the KV cache in tokens; without CUDA graphs each running completion takes
    as many as the longest. `max_sequences` limits the running completions, `max_prefill_tokens` the prompt tokens
    prefilled in one forward (a longer prompt is prefilled alone). `eos_tokens` end a completion. They default to the
    tokenizer's and its chat template's; `hf.read_model.end_tokens` returns those of a model's files too.

    draft: "mtp" is speculative decoding with the model's first multi-token-prediction depth. It does not change the
        completions.
    record_routing: completions also have the experts that their tokens were routed to.
    kv_cache_dtype: "fp8" stores keys and values in FP8, so that the same memory holds more tokens (`cache_tokens`), see
        `check_kv_cache_dtype`. Where steps are not captured as CUDA graphs they are only rounded, and no memory is
        saved.
    quantization: "fp8" multiplies by copies of the weights in FP8: see `model.fp8.FP8Weights`. `weights_changed` makes
        them again after the model's weights have changed.
    prefix_cache: keys and values of a sequence are kept, while there is room, for prompts that begin with the same
        tokens, such as the next turn of a conversation, which prefill only the rest. `generate` begins without any,
        since weights may change between its calls; a `Session` keeps them until `weights_changed`. Models with
        recurrent blocks keep none, since only their newest states exist.

    On a GPU, decode steps are captured as CUDA graphs and replayed, with drafts too, if all blocks are `cuda_graphable`
    and the rank has the whole model. The cache and the graphs are kept for the next call; see `release`.

    `load_adapter` adds LoRA adapters by name. A call names one of them, or none for the model itself. They are applied
    unmerged: the model's weights do not change.

    Under tensor parallelism every rank makes the same call and gets the same completions. Under data parallelism each
    rank has its own prompts and all weights: a `SyncedGenerator` copies them from an engine in any layout.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: AnyTokenizer | None = None,
        *,
        context_length: int | None = None,
        max_batch_tokens: int = 65_536,
        max_sequences: int = 256,
        max_prefill_tokens: int = 8_192,
        eos_tokens: Sequence[int] | None = None,
        draft: Draft | None = None,
        record_routing: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
        quantization: Quantization | None = None,
        prefix_cache: bool = True,
    ) -> None:
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("context_length", 1 if context_length is None else context_length),
            ("max_sequences", max_sequences),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: the minimum is 1.")
        if model.stage.count > 1:
            raise ValueError(
                f"the model is stage {model.stage.index} of {model.stage.count}, but a generator needs all of it on "
                "every rank. Use a layout with pp=1."
            )
        layout = model.layout
        if layout.dp_shard > 1 or layout.ep > layout.tp * layout.cp:
            raise ValueError(
                f"data-parallel ranks share the model's weights (dp_shard={layout.dp_shard}, ep={layout.ep}), but each "
                "generates by itself. Use a layout with dp_shard=1 and ep of at most tp, or a SyncedGenerator, which "
                "copies the weights to every rank."
            )
        for block in model.blocks:
            if not block.supports_decoding:
                raise ValueError(
                    f"{block.name} ({type(block).__name__}) does not support decoding, so its completions would be "
                    "wrong. Set supports_decoding=True on a block whose output depends on the token alone, or that "
                    "keeps earlier tokens in context.decode_state."
                )
        if draft is not None:
            check_draft(draft, model.config)
        if record_routing:
            check_routing_record(model.config)
        check_kv_cache_dtype(kv_cache_dtype, model.config, model.embedding.weight.device)
        if model.batch_invariant:
            options = {
                "kv_cache_dtype": kv_cache_dtype if kv_cache_dtype != "auto" else "",
                "quantization": quantization,
            }
            check_batch_invariant(model.config, model.layout, options, model.block_types)
        check_quantization(quantization, model.config, model.embedding.weight.device)
        if quantization is not None and any(is_dtensor(parameter) for parameter in model.parameters()):
            raise ValueError(f"quantization={quantization!r} needs the whole model on each rank, but ranks share it.")
        self.model = model
        self.tokenizer = tokenizer
        self.fp8_kv = kv_cache_dtype == "fp8"
        self.drafting = draft is not None
        self.record_routing = record_routing
        self.max_batch_tokens = max_batch_tokens
        self.context_length = model_context_length(model.config) if context_length is None else context_length
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        self.eos_tokens = frozenset(end_tokens({}, tokenizer) if eos_tokens is None else eos_tokens)
        self.adapters = NamedAdapters(model)
        self.fp8_weights = FP8Weights(model) if quantization is not None else None
        self._has_fp8_weights = False
        self._fp8_disabled = False
        if self.fp8_kv and model.embedding.weight.is_cuda and (reason := self.why_no_cuda_graph()) is not None:
            log.warning('kv_cache_dtype="fp8" rounds keys and values here but saves no memory: %s.', reason)
        self._buffers: GraphBuffers | None = None
        self.prefix_cache = prefix_cache
        # On a GPU each copy is a kernel that the host launches, so there are fewer of them.
        page_size = PAGE_SIZE if model.embedding.weight.is_cuda else ROW_PAGE_SIZE
        self._saved_prefixes: PrefixCache[SavedPage] = PrefixCache(page_size, lookahead=int(draft is not None))

    def load_adapter(self, name: str, configs: Mapping[str, AdapterConfig], pairs: MatrixPairs) -> None:
        """Loads a LoRA adapter, or replaces the one of this name: see `NamedAdapters.load`.

        `hf.read_peft.from_peft` returns `configs` and `pairs` of peft's files.
        """
        if self.model.batch_invariant:
            raise ValueError(f"adapter {name!r} cannot be loaded: a batch_invariant model has no LoRA.")
        self.adapters.load(name, configs, pairs)
        self.forget_prefixes(name)

    def weights_changed(self) -> None:
        """Forgets cached prefixes, and makes FP8 copies if `quantization` is set. Call it when weights have changed."""
        self.forget_prefixes()
        if self.fp8_weights is not None:
            self.fp8_weights.write()
            self._has_fp8_weights = True

    def forget_prefixes(self, *adapters: str | None) -> None:
        """Forgets what is cached for later prompts with these adapters; without any, everything."""
        self._saved_prefixes.forget(*adapters)
        if self._buffers is not None:
            self._buffers.pool.forget_prefixes(*adapters)

    def set_drafting(self, drafting: bool) -> None:
        """Turns drafting of a generator with `draft` off, or on again, between calls."""
        if drafting != self.drafting:
            self.drafting = drafting
            self.forget_prefixes()  # the keys and values of a draft depth are cached only while it drafts

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter. Its name is free then."""
        self.adapters.remove(name)
        self.forget_prefixes(name)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first_index: int = 0,
        adapter: str | None = None,
    ) -> list[list[Completion]]:
        """Returns `n` completions of each prompt of token ids, in the caller's order. A prompt is prefilled once.

        `sampling` is one for all prompts, or one per prompt. The completions of a prompt have the indices from
        `first_index` on, which their seeds depend on. `adapter` is the name of a loaded adapter. If a completion fails,
        the others are finished, and then its error is raised.
        """
        if n < 1:
            raise ValueError(f"n={n}: give at least 1 completion per prompt.")
        samplings = sampling_per_prompt(sampling, len(prompts))
        one_seed = isinstance(sampling, SamplingParams)  # then the seed of a prompt also depends on its index
        groups = [
            self.new_completions(
                f"prompt {index}",
                tokens,
                params,
                n,
                index=index if one_seed else 0,
                first_index=first_index,
                adapter=adapter,
            )
            for index, (tokens, params) in enumerate(zip(prompts, samplings, strict=True))
        ]
        completions = [completion for group in groups for completion in group]
        self.forget_prefixes()
        try:
            with self.generation_mode(adapter):
                self._scheduler(completions, DecodeCapacity.of).finish()
        finally:
            self.adapters.activate(None)
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        return [[self.to_completion(completion) for completion in group] for group in groups]

    def session_scheduler(self, completions: Sequence[CompletionState], rows: int | None = None) -> Scheduler:
        """Returns a scheduler of these completions, to which others can be added. It works on one rank.

        It runs as many as `max_sequences` at a time, or on a GPU `rows` with less memory.
        """

        def capacity(_: Sequence[CompletionState], cache_tokens: int, max_sequences: int) -> DecodeCapacity:
            most = max_sequences if rows is None else min(rows, max_sequences)
            return DecodeCapacity.for_session(completions, cache_tokens, most, self.max_length)

        return self._scheduler(completions, capacity)

    @contextlib.contextmanager
    def generation_mode(self, adapter: str | None) -> Iterator[None]:
        """Enters evaluation mode without gradients and selects this adapter, which stays active afterwards.

        The model's GEMMs use its FP8 weights, if it has any, inside only.
        """
        self.adapters.activate(adapter)
        dtype, invariant = self.model.embedding.weight.dtype, batch_invariant(self.model.batch_invariant)
        if self.fp8_weights is not None and not self._has_fp8_weights:
            self.weights_changed()
        attached = contextlib.nullcontext() if self.fp8_weights is None else self.fp8_weights.attached()
        with torch.no_grad(), _eval_mode(self.model), blas_fp32_matmul(dtype), invariant, attached:
            yield

    @property
    def uses_fp8(self) -> bool:
        """Whether weights, or keys and values, are in FP8."""
        return self.fp8_kv or self.fp8_weights is not None

    @contextlib.contextmanager
    def without_fp8(self) -> Iterator[None]:
        """Generates without FP8 inside, if it uses any, and without CUDA graphs then."""
        before = self.fp8_kv, self.fp8_weights, self._fp8_disabled
        self._fp8_disabled, self.fp8_kv, self.fp8_weights = self.uses_fp8, False, None
        try:
            yield
        finally:
            self.fp8_kv, self.fp8_weights, self._fp8_disabled = before

    def why_no_cuda_graph(self) -> str | None:
        """Returns why decode steps cannot be captured as CUDA graphs; None if they can.

        The host then launches every kernel, which is slower and gives the same completions.
        """
        return why_no_cuda_graph(self.model)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a prompt and its completion."""
        return min(self.max_batch_tokens, self.context_length or self.max_batch_tokens)

    @property
    def cache_tokens(self) -> int:
        """The size of a paged cache in tokens: `max_batch_tokens`; with FP8 as many as fit in the same memory."""
        return self.max_batch_tokens * (self.model.embedding.weight.element_size() if self.fp8_kv else 1)

    def release(self, *, only_if_large: bool = False) -> None:
        """Frees what is kept for the next call: cached prefixes, and on a GPU the KV cache and the CUDA graphs.

        With `only_if_large`, only what takes more than an eighth of the device's memory is freed.
        """
        if self._buffers is not None and not (only_if_large and self._buffers.is_small):
            self._buffers = None
        if not (only_if_large and self._saved_are_small):
            self._saved_prefixes.forget()

    @property
    def _saved_are_small(self) -> bool:
        return is_small(sum(page.size_in_bytes for page in self._saved_prefixes), self.model.embedding.weight.device)

    def _scheduler(self, completions: Sequence[CompletionState], capacity_of: CapacityOf) -> Scheduler:
        if not completions or self._fp8_disabled or self.why_no_cuda_graph() is not None:
            return EagerScheduler(
                self.model,
                completions,
                max_batch_tokens=self.max_batch_tokens,
                max_sequences=self.max_sequences,
                max_prefill_tokens=self.max_prefill_tokens,
                draft=self.drafting,
                record_routing=self.record_routing,
                fp8_kv=self.fp8_kv,
                prefixes=self._saved_prefixes if self.prefix_cache and not self._fp8_disabled else None,
            )
        capacity = capacity_of(completions, self.cache_tokens, self.max_sequences)
        if self._buffers is None or not self._buffers.fit(
            capacity, draft=self.drafting, record_routing=self.record_routing
        ):
            self.release()
            self._buffers = GraphBuffers.of(
                self.model,
                self.adapters,
                capacity,
                self.model.embedding.weight.device,
                draft=self.drafting,
                record_routing=self.record_routing,
                fp8_kv=self.fp8_kv,
                keep_prefixes=self.prefix_cache,
            )
        return GraphScheduler(
            self._buffers,
            completions,
            max_sequences=self.max_sequences,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    def new_completions(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        n: int,
        *,
        index: int = 0,
        first_index: int = 0,
        adapter: str | None = None,
    ) -> list[CompletionState]:
        """Returns `n` new completions of a prompt, from `first_index` on. A ValueError calls the prompt `name`."""
        self.adapters.check(adapter)
        tokens = [int(token) for token in tokens]
        size = self.model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name} is empty; give at least one token, such as the BOS token.")
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        if not 0 <= worst < size:
            raise ValueError(f"{name} has token {worst}, but the vocabulary goes from 0 to {size - 1}.")
        if len(tokens) + sampling.max_new_tokens > self.max_length:
            limit = "max_batch_tokens" if self.max_length == self.max_batch_tokens else "context_length"
            raise ValueError(
                f"{name} has {len(tokens)} tokens and may get {sampling.max_new_tokens} more, but {limit} is "
                f"{self.max_length}. Shorten either, or raise {limit}."
            )
        for token in sampling.stop_tokens:
            if not 0 <= token < size:
                raise ValueError(f"stop token {token} of {name} is not in the vocabulary, 0 to {size - 1}.")
        for token, _ in sampling.logit_bias:
            if not 0 <= token < size:
                raise ValueError(f"logit_bias of {name} has token {token}; the vocabulary goes from 0 to {size - 1}.")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} is searched in text; give the Generator a tokenizer.")
        stop_tokens = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.eos_tokens)
        prompt = PromptState(tokens, sampling, unstarted=n, adapter=adapter)
        first = self._grammars.of(sampling, stop_tokens) if sampling.constrained else None
        completions = []
        for completion_index in range(first_index, first_index + n):
            stops = StopStrings(self.tokenizer, sampling.stop) if sampling.stop and self.tokenizer is not None else None
            grammar = None if first is None else first.copy()
            key = rng_key(sampling.seed, index, completion_index)
            completions.append(CompletionState(prompt, key, stop_tokens, stops, grammar))
        return completions

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.model.config.vocab_size)

    def to_completion(self, completion: CompletionState) -> Completion:
        """Returns the result of a finished completion."""
        assert completion.finish_reason is not None
        text = None
        if self.tokenizer is not None:
            text = completion_text(self.tokenizer, completion.tokens, completion.stopped_by)
        return Completion(
            completion.tokens,
            completion.logprobs,
            completion.sampled_logprobs,
            completion.finish_reason,
            text,
            reused_prompt_tokens=completion.reused_prompt_tokens,
            drafted=completion.drafted,
            accepted=completion.accepted,
            routing=completion.wait_routing(),
            top_logprobs=tuple(completion.top_logprobs),
            sampling_mask=completion.sampling_mask if completion.prompt.sampling.masked else None,
            versions=tuple(completion.versions),
            queue_seconds=None if completion.began is None else completion.began - completion.added,
            first_token_seconds=None if completion.first_token is None else completion.first_token - completion.added,
        )


def check_draft(draft: str, config: ModelConfig) -> None:
    """Raises ValueError for an unknown `draft`, or a model without a multi-token-prediction depth."""
    if draft not in get_args(Draft):
        raise ValueError(f'draft={draft!r}: give "mtp", or None for no speculative decoding.')
    if not config.pattern.mtp:
        raise ValueError(
            f'draft="mtp" needs a multi-token-prediction depth, but pattern {config.pattern} has none. '
            f"Leave draft out, or give it one: {config.pattern}/[*-], or mtp in a recipe."
        )


def check_kv_cache_dtype(kv_cache_dtype: str, config: ModelConfig, device: torch.device) -> None:
    """Raises ValueError for an unknown dtype, a model that caches latents, or a GPU that cannot convert to FP8.

    A CPU computes the same numbers as a GPU.
    """
    check_choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype))
    if kv_cache_dtype == "auto":
        return
    latent = next((name for name, block in config.named_blocks.items() if block.caches_latents), None)
    if latent is not None:
        raise ValueError(
            f'kv_cache_dtype="fp8" scales the keys and values of each head, but {latent} caches latents, which all '
            'heads share. Use "auto".'
        )
    if device.type == "cuda" and (reason := why_not("attend_pages_fp8", gpu_of(device))) is not None:
        raise ValueError(f'kv_cache_dtype="fp8" cannot run: {reason}. Use "auto".')


@contextlib.contextmanager
def _eval_mode(model: LanguageModel) -> Iterator[None]:
    """Sets evaluation mode, and restores the mode afterwards. Both visit all modules, so only if it is another."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
