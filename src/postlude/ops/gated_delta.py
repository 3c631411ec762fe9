"""The gated delta rule over packed sequences: a decaying state in which a key's old value is replaced by a new one.

    S_t = e^{g_t} S_{t-1} + k_t ⊗ β_t (v_t − (e^{g_t} S_{t-1})ᵀ k_t)        o_t = S_tᵀ q_t

`gated_delta_step` does this token by token. `gated_delta` works in chunks: within one, what the tokens write (δ) solves
a unit triangular system, so all chunks of all sequences are batched matrix products, and only the state passes from
chunk to chunk. The backward computes everything again from the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from postlude.ops import fla
from postlude.ops.kernels.capabilities import (
    GATED_DELTA_KEYS,
    Backend,
    ScanBackend,
    gpu_of,
    use_kernel,
    why_no_triton,
    why_unmeasured,
)
from postlude.ops.packing import Packing, to_device
from postlude.ops.recurrent_step import overwrite, use_step_kernel

CHUNK = 64
NORM_EPS = 1e-6  # under the root, added to the sum of squares
TRITON_CHUNKS = (16, 32, 64)
MEASURED_WIDTHS = range(65, 129)  # dk and dv


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    packing: Packing,
    *,
    scale: float | None = None,
    normalise: bool = False,
    chunk: int = CHUNK,
    last_states: bool = False,
    backend: ScanBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs [T, heads, dv] in value's dtype and, with `last_states`, the states [n, heads, dk, dv].

    `query` and `key` [T, key_heads, dk], `value` [T, heads, dv], `log_decay` (g, at most 0) and `beta` [T, heads];
    head h uses key head h // (heads / key_heads). Queries are scaled by dk^-½ or `scale`; with `normalise`, queries and
    keys are first normalised to length one. The state of every sequence starts from zero.

    It computes in fp32, or float64 where an input is; so are the states. `chunk` changes only speed and rounding.

    `backend`: "torch" anywhere; "triton" on CUDA, whose matrix products take operands of value's dtype and add up in
    fp32: in bf16 that rounds what tokens write, and the states where they are read, once each. "auto" takes Triton for
    bf16, chunks of 64 and dk and dv from 65 to 128, on the GPUs and Triton releases of `capabilities.KERNELS`.
    "fla" is flash-linear-attention's chunks of 64 in half precision, where it is installed and right (see
    `postlude.ops.fla`); there "auto" takes it rather than torch.
    """
    inputs = _Inputs(query, key, value, log_decay, beta)
    inputs.check()
    if packing.total != len(value):
        raise ValueError(f"the packing holds {packing.total} tokens, but there are values of {len(value)}.")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: a chunk holds at least 1 token.")
    if packing.count == 0:
        nothing = query.sum() + key.sum() + log_decay.sum() + beta.sum()  # so that all get zero gradients
        empty = value.new_zeros(0, value.shape[1], key.shape[2], value.shape[2], dtype=inputs.compute_dtype)
        return value + nothing.to(value.dtype), empty if last_states else None
    width, slower = key.shape[2], _why_slower(value.device, value.dtype, chunk, (key.shape[2], value.shape[2]))
    if backend == "fla":
        fla.check(query, key, value, width=width)
    if backend == "fla" or (
        backend == "auto" and slower and fla.auto_selects("gated_delta", slower, query, key, value, width=width)
    ):
        return fla.gated_delta(*inputs, packing, scale, normalise, last_states)
    triton = use_kernel(
        "gated_delta",
        backend,
        value.device,
        inputs.compute_dtype,
        unsupported_reason=inputs.unsupported_reason(chunk),
        slower_reason=slower,
    )
    scale, lengths = query.shape[-1] ** -0.5 if scale is None else scale, list(packing.lengths)
    output, states = _operator(*inputs, packing.cu_seqlens, lengths, scale, normalise, chunk, last_states, triton)
    return output, states if last_states else None


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    running: Tensor | None = None,
    *,
    scale: float | None = None,
    normalise: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Processes the next token of each of n sequences from their `states` [n, heads, dk, dv].

    Other arguments are those of `gated_delta` with T = n. Returns the outputs [n, heads, dv]. Overwrites the states, of
    the sequences that are `running` [n] bool alone.
    """
    inputs = _Inputs(query, key, value, log_decay, beta)
    inputs.check()
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if use_step_kernel(backend, states, query, key, value):
        from postlude.ops.kernels import recurrent_step  # needs triton

        eps = NORM_EPS if normalise else None
        return recurrent_step.delta_rule(*inputs, states, running, scale, eps)
    compute_dtype = inputs.compute_dtype
    group = value.shape[1] // key.shape[1]
    query, key = query.to(compute_dtype), key.to(compute_dtype)
    if normalise:
        query, key = _unit(query)[0], _unit(key)[0]
    query = query * scale
    query, key = (tensor.repeat_interleave(group, dim=1)[:, :, None] for tensor in (query, key))  # [n, heads, 1, dk]
    decayed = states.to(compute_dtype) * log_decay.to(compute_dtype).exp()[..., None, None]
    written = beta.to(compute_dtype)[..., None, None] * (
        value.to(compute_dtype)[:, :, None] - key @ decayed
    )  # [n, heads, 1, dv]
    after = decayed + key.mT * written
    overwrite(states, after, running)
    return (query @ after)[:, :, 0].to(value.dtype)


class _Inputs(NamedTuple):
    """The tensors of `gated_delta`."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    @property
    def compute_dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self), torch.float32)

    def check(self) -> None:
        query, key, value, log_decay, beta = self
        same_tokens = log_decay.shape == beta.shape == value.shape[:2] and len(key) == len(value)
        if query.shape != key.shape or not same_tokens or value.shape[1] % key.shape[1]:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self._asdict().items())
            raise ValueError(
                "the gated delta rule takes query and key [T, key_heads, dk], value [T, heads, dv], log_decay and beta "
                f"[T, heads] with heads a multiple of key_heads, but got {shapes}."
            )

    def unsupported_reason(self, chunk: int) -> str | None:
        dtypes = [tensor.dtype for tensor in self[:3]]
        if len(set(dtypes)) > 1:
            text = "{}, {} and {}".format(*dtypes)
            return f"its kernels want query, key and value of one dtype, and these are {text}"
        if chunk not in TRITON_CHUNKS:
            return f"its kernels know chunks of {', '.join(map(str, TRITON_CHUNKS))} tokens, and these have {chunk}"
        if self.key.shape[2] > GATED_DELTA_KEYS:
            return f"its kernels have room for keys {GATED_DELTA_KEYS} wide, and these are {self.key.shape[2]}"
        return None


def gated_delta_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator's forward. Without `last_states` the second result is empty."""
    inputs, (cu_seqlens, lengths, scale, normalise, chunk, last_states, triton) = _Inputs(*arguments[:5]), arguments[5:]
    if triton:
        from postlude.ops.kernels.gated_delta import GatedDeltaCall  # needs triton

        call = GatedDeltaCall(inputs, cu_seqlens, lengths, scale, normalise, chunk)
        last = call.run(last_states)
        return call.outputs(), last
    chunks = Chunks(lengths, chunk, cu_seqlens)
    scan = _Scan(inputs, chunks, scale, normalise)
    states = scan.last_states() if last_states else scan.value.new_empty(0)
    return chunks.to_tokens(scan.outputs()).to(inputs.value.dtype), states


# One operator, so that selective recompute keeps its result and nothing inside.
_operator = torch.library.custom_op(
    "postlude::gated_delta",
    gated_delta_forward,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor cu_seqlens, "
    "SymInt[] lengths, float scale, bool normalise, SymInt chunk, bool last_states, bool triton) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, lengths, last_states = _Inputs(*arguments[:5]), arguments[6], arguments[10]
    key, value = inputs.key, inputs.value
    shape = (len(lengths), value.shape[1], key.shape[2], value.shape[2]) if last_states else (0,)
    return torch.empty_like(value), value.new_empty(shape, dtype=inputs.compute_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.lengths, ctx.scale, ctx.normalise, ctx.chunk, ctx.last_states, ctx.triton = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, output: Tensor | None, states: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    inputs = _Inputs(*tensors)
    if output is None and states is None:
        return (None,) * 12
    output = torch.zeros_like(inputs.value) if output is None else output
    scan: Any
    if ctx.triton:
        from postlude.ops.kernels.gated_delta import GatedDeltaCall

        scan = GatedDeltaCall(inputs, cu_seqlens, ctx.lengths, ctx.scale, ctx.normalise, ctx.chunk, keep=True)
        scan.run(last_states=False)
    else:
        scan = _Scan(inputs, Chunks(ctx.lengths, ctx.chunk, cu_seqlens), ctx.scale, ctx.normalise)
    gradients = scan.gradients(output, states if ctx.last_states else None)
    return *(gradient.to(like.dtype) for gradient, like in zip(gradients, inputs, strict=True)), *(None,) * 7


_operator.register_autograd(_backward, setup_context=_setup)


class Chunks:
    """Packed sequences cut into chunks of one size, in scan order.

    First come the first chunks of all sequences, the longest sequence first; then the second chunks of those that have
    one, and so on. So the sequences of a round are the first ones of the round before. A sequence's last chunk is
    padded. No chunk is longer than the longest sequence.
    """

    def __init__(self, lengths: Sequence[int], size: int, cu_seqlens: Tensor) -> None:
        self.size = size = min(size, max(lengths))
        needed = [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda sequence: -needed[sequence])
        rank = {sequence: place for place, sequence in enumerate(order)}
        counts = [0] * max(needed)
        for chunk_count in needed:
            counts[chunk_count - 1] += 1
        counts = list(accumulate(reversed(counts)))[::-1]  # sequences with a chunk in each round
        starts = list(accumulate(counts, initial=0))
        self.count = starts[-1]
        self.rounds = [slice(start, stop) for start, stop in pairwise(starts)]
        """The chunks of each round."""
        packing = Packing(tuple(lengths), cu_seqlens)
        device = cu_seqlens.device
        table = to_device(torch.tensor([rank[sequence] for sequence in range(len(lengths))] + starts), device)
        last = [starts[chunk_count - 1] + rank[sequence] for sequence, chunk_count in enumerate(needed)]
        self.last = to_device(torch.tensor(last), device)
        """[n] the last chunk of each sequence."""
        position = packing.positions()
        first = table[packing.sequence_index()] + table[len(lengths) + position // size]
        self._slots = first * size + position % size  # [T]

    def to_chunks(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, size, ...] in `dtype`, zero in padding."""
        padded_tokens = tokens.new_zeros(self.count * self.size, *tokens.shape[1:]).index_copy_(0, self._slots, tokens)
        return _unflatten(padded_tokens, self.size).transpose(1, 2).to(dtype).contiguous()

    def to_tokens(self, chunks: Tensor) -> Tensor:
        """[chunks, heads, size, ...] -> [T, heads, ...]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self._slots)


class _Scan:
    """The computation of the chunks. [chunks · heads, size, ...] is written [B, C, ...]. No autograd inside.

    G is the sum of log decays from the chunk's start to a token, itself included, and D_ij = e^{G_i − G_j} for j ≤ i.
    What the tokens write, δ, solves (1 + A) δ = β (v − e^G k S) with A_ij = β_i D_ij k_i·k_j for j < i, where S is the
    state at the chunk's start; it is u − w S with u = (1 + A)⁻¹ β v and w = (1 + A)⁻¹ β e^G k. The tokens give
    o = e^G q S + P δ, with P_ij = D_ij q_i·k_j, and the chunk leaves the state e^{G_C} S + Σ_j e^{G_C − G_j} k_j ⊗ δ_j.
    """

    def __init__(self, inputs: _Inputs, chunks: Chunks, scale: float, normalise: bool) -> None:
        query, key, value, log_decay, beta = inputs
        compute_dtype = inputs.compute_dtype
        self.chunks, self.scale, self.heads = chunks, scale, value.shape[1]
        self.group = self.heads // key.shape[1]
        self.unit_query, self.query_inverse_length = _unit(chunks.to_chunks(query, compute_dtype), normalise)
        self.unit_key, self.key_inverse_length = _unit(chunks.to_chunks(key, compute_dtype), normalise)
        key = self.key = self._repeat_for_heads(self.unit_key)  # [B, C, dk]
        query = self.query = self._repeat_for_heads(self.unit_query * scale)
        self.value = chunks.to_chunks(value, compute_dtype).flatten(0, 1)  # [B, C, dv]
        self.beta = chunks.to_chunks(beta, compute_dtype).flatten(0, 1)[..., None]  # [B, C, 1]

        total = chunks.to_chunks(log_decay, torch.float64).flatten(0, 1).cumsum(-1)  # [B, C]
        self.decay_from_start = total.exp().to(compute_dtype)[..., None]  # e^G, [B, C, 1]
        self.decay_to_end = (total[:, -1:] - total).exp().to(compute_dtype)[..., None]  # e^{G_C − G}, [B, C, 1]
        self.chunk_decay = self.decay_from_start[:, -1:]  # e^{G_C}, [B, 1, 1]
        # Two numbers for G, since neighbours differ by little even where both are large.
        high = total.to(compute_dtype)
        low = (total - high).to(compute_dtype)
        self.pair_decay = ((high[:, :, None] - high[:, None]) + (low[:, :, None] - low[:, None])).exp_().tril_()  # D

        self.query_key = self._pairs(self.unit_query * scale)  # P, [B, C, C]
        self.key_key = self._pairs(self.unit_key).tril_(-1)  # A / β
        self.inverse = _inverse_of_one_plus(self.beta * self.key_key)  # [B, C, C]
        self.state_reader = self.inverse @ (self.beta * self.decay_from_start * key)  # w, [B, C, dk]
        self.decayed_key = self.decay_to_end * key  # [B, C, dk]
        self.delta = self.inverse @ (self.beta * self.value)  # u, and δ once the states are known, [B, C, dv]
        self.states = self._run()  # S, [B, dk, dv]

    def _run(self) -> Tensor:
        """Returns the state at each chunk's start. Turns u into δ."""
        states = self.value.new_zeros(len(self.value), self.key.shape[-1], self.value.shape[-1])
        rounds = self._rounds()
        for this_round, next_round in zip(rounds, [*rounds[1:], None], strict=True):
            self.delta[this_round].baddbmm_(self.state_reader[this_round], states[this_round], alpha=-1)
            if next_round is not None:
                on = slice(this_round.start, this_round.start + next_round.stop - next_round.start)
                torch.mul(states[on], self.chunk_decay[on], out=states[next_round])
                states[next_round].baddbmm_(self.decayed_key[on].mT, self.delta[on])
        return states

    def outputs(self) -> Tensor:
        """[chunks, heads, C, dv]."""
        output = torch.baddbmm(self.query_key @ self.delta, self.decay_from_start * self.query, self.states)
        return _unflatten(output, self.heads)

    def last_states(self) -> Tensor:
        """[n, heads, dk, dv]."""
        states, chunk_decay, decayed_key, delta = (
            _unflatten(tensor, self.heads).index_select(0, self.chunks.last)
            for tensor in (self.states, self.chunk_decay, self.decayed_key, self.delta)
        )
        return states * chunk_decay + decayed_key.mT @ delta

    def gradients(self, output: Tensor, last_states: Tensor | None) -> tuple[Tensor, ...]:
        key, query, decay_from_start, beta = self.key, self.query, self.decay_from_start, self.beta
        output = self.chunks.to_chunks(output, self.value.dtype).flatten(0, 1)
        delta_grads = self.query_key.mT @ output  # of δ, [B, C, dv]
        state_grads = self._run_back(output, delta_grads, last_states)  # of the state each chunk leaves, [B, dk, dv]
        delta_grads.baddbmm_(self.decayed_key, state_grads)
        solved = self.inverse.mT @ delta_grads  # of β (v − e^G k S)
        right = beta * solved

        query_key_grads = (output @ self.delta.mT).tril_()  # of P
        key_key_grads = (solved @ self.delta.mT).neg_().tril_(-1)  # of A
        query_through_state = self.decay_from_start * (output @ self.states.mT)  # of q, through the state
        key_through_state = (
            self.decay_from_start * (right @ self.states.mT).neg_()
        )  # of k, through the state that it reads
        key_through_update = self.decay_to_end * (self.delta @ state_grads.mT)  # of k, through the state that it leaves
        beta_gradient = (solved * (self.value - decay_from_start * (key @ self.states))).sum(-1)
        beta_gradient += (key_key_grads * self.key_key).sum(-1)

        decay = self._decay_gradient(
            query_key_grads * self.query_key + key_key_grads * (beta * self.key_key),
            (query * query_through_state).sum(-1) + (key * key_through_state).sum(-1),
            (key * key_through_update).sum(-1),
            self.chunk_decay[:, 0, 0] * (self.states * state_grads).sum((-2, -1)),
        )
        query_key_grads = self._gather(query_key_grads.mul_(self.pair_decay))  # of q·k, [chunks · key heads, C, C]
        key_key_grads = self._gather(key_key_grads.mul_(beta).mul_(self.pair_decay))  # of k·k
        unit_query, unit_key = self.unit_query.flatten(0, 1), self.unit_key.flatten(0, 1)
        grad_query = self._gather(query_through_state) + query_key_grads @ unit_key
        grad_key = self._gather(key_through_state + key_through_update) + (key_key_grads + key_key_grads.mT) @ unit_key
        grad_key += query_key_grads.mT @ (unit_query * self.scale)
        gradients = (
            _gradient_before_norm(
                grad_query.view_as(self.unit_query) * self.scale, self.unit_query, self.query_inverse_length
            ),
            _gradient_before_norm(grad_key.view_as(self.unit_key), self.unit_key, self.key_inverse_length),
            *(_unflatten(tensor, self.heads) for tensor in (right, decay, beta_gradient)),
        )
        return tuple(self.chunks.to_tokens(gradient) for gradient in gradients)

    def _run_back(self, output: Tensor, delta_grads: Tensor, last_states: Tensor | None) -> Tensor:
        """Returns the gradient of each chunk's final state, [B, dk, dv]. `delta_grads` are those of δ from outputs."""
        state_grads = torch.zeros_like(self.states)
        if last_states is not None:
            _unflatten(state_grads, self.heads).index_copy_(0, self.chunks.last, last_states.to(state_grads.dtype))
        # The gradient of the state at a chunk's start that does not come from later chunks.
        direct = (self.decay_from_start * self.query).mT @ output
        direct.baddbmm_(self.state_reader.mT, delta_grads, alpha=-1)
        rounds = self._rounds()
        for this_round, before in zip(reversed(rounds), reversed([None, *rounds[:-1]]), strict=True):
            if before is not None:
                on = slice(before.start, before.start + this_round.stop - this_round.start)
                torch.addcmul(
                    direct[this_round], state_grads[this_round], self.chunk_decay[this_round], out=state_grads[on]
                )
                state_grads[on].baddbmm_(
                    self.state_reader[this_round].mT, self.decayed_key[this_round] @ state_grads[this_round], alpha=-1
                )
        return state_grads

    def _decay_gradient(
        self, pairs: Tensor, decay_from_start: Tensor, decay_to_end: Tensor, chunk_decay: Tensor
    ) -> Tensor:
        """Returns g's gradient [B, C] from d/d(G_i − G_j) [B, C, C], d/dG_i [B, C], d/d(G_C − G_i) [B, C], d/dG_C [B].

        Each sum covers only the decays that a token's g is part of, so that nothing large cancels.
        """
        gradient = decay_from_start.flip(-1).cumsum(-1).flip(-1) + chunk_decay[:, None]
        over = pairs.cumsum(-1).tril_(-1).sum(-2)  # over i > l and j ≤ l
        gradient[:, 1:] += over[:, :-1] + decay_to_end.cumsum(-1)[:, :-1]
        return gradient

    def _pairs(self, left: Tensor) -> Tensor:
        """Returns D_ij left_i·k_j, [B, C, C], for `left` [chunks, key heads, C, dk]."""
        products = left.flatten(0, 1) @ self.unit_key.flatten(0, 1).mT
        pair_decay = _unflatten(self.pair_decay, self.group)
        return (products[:, None] * pair_decay).flatten(0, 1)

    def _repeat_for_heads(self, tensor: Tensor) -> Tensor:
        """[chunks, key heads, ...] -> [B, ...]."""
        return tensor.repeat_interleave(self.group, dim=1).flatten(0, 1)

    def _gather(self, tensor: Tensor) -> Tensor:
        """The backward of `_repeat_for_heads`: [B, ...] -> [chunks · key heads, ...]."""
        return _unflatten(tensor, self.group).sum(1) if self.group > 1 else tensor

    def _rounds(self) -> list[slice]:
        return [slice(rows.start * self.heads, rows.stop * self.heads) for rows in self.chunks.rounds]


def _unflatten(tensor: Tensor, inner: int) -> Tensor:
    """[outer · inner, ...] -> [outer, inner, ...]."""
    return tensor.view(-1, inner, *tensor.shape[1:])


def _inverse_of_one_plus(lower: Tensor) -> Tensor:
    """Returns (1 + A)⁻¹ of strictly lower triangles [B, C, C]."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    return inverse


def _unit(vectors: Tensor, normalise: bool = True) -> tuple[Tensor, Tensor | None]:
    """Returns vectors of length one and 1 / their lengths; unchanged without `normalise`."""
    if not normalise:
        return vectors, None
    over = torch.rsqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPS)
    return vectors * over, over


def _gradient_before_norm(gradient: Tensor, unit: Tensor, over: Tensor | None) -> Tensor:
    """The backward of `_unit`."""
    if over is None:
        return gradient
    return over * (gradient - unit * (unit * gradient).sum(-1, keepdim=True))


def _why_slower(device: torch.device, dtype: torch.dtype, chunk: int, widths: tuple[int, int]) -> str | None:
    """Returns why "auto" does not take the Triton kernels where they could run; None if it does."""
    if dtype != torch.bfloat16 or chunk != CHUNK:
        return f"its kernels are meant for bf16 in chunks of {CHUNK}, and this is {dtype} in chunks of {chunk}"
    if any(width not in MEASURED_WIDTHS for width in widths):
        return f"its kernels were measured for widths from 65 to 128, and dk and dv are {widths[0]} and {widths[1]}"
    return why_unmeasured("gated_delta", gpu_of(device)) if why_no_triton(device, dtype, False) is None else None
