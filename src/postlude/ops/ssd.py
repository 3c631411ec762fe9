"""Mamba-2's state-space scan over packed sequences, in chunks: matrix products within, a short scan between.

For each head, with its state S [p, n] zero before the first token of a sequence:

    S_t = exp(dt_t · A) · S_{t-1} + dt_t · x_t ⊗ B_t        y_t = S_t · C_t + D · x_t
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops import fla
from postlude.ops.kernels.capabilities import EMPTY, GPU, Backend, ScanBackend, gpu_of, use_kernel
from postlude.ops.packing import Packing
from postlude.ops.recurrent_step import overwrite, use_step_kernel

WORKSPACE = 1 << 26  # decays between tokens held at once; more heads are processed in turn
BLOCK = 16  # chunks whose states one product carries

# Bytes of shared memory that the Triton kernels' tiles need, for p and n up to these: before Hopper, and from it on.
SHARED = {(64, 128): (66_000, 110_000), (64, 256): (115_000, 176_000), (128, 128): (101_000, 176_000)}


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    packing: Packing,
    *,
    chunk: int = 128,
    last_states: bool = False,
    backend: ScanBackend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Returns the outputs [T, heads, p] and, with `last_states`, the states after each sequence, else None.

    `x` [T, heads, p]; `dt` [T, heads], positive; `A` [heads], negative; `B` and `C` [T, groups, n], each for as many
    adjacent heads; `D` [heads]. States are [sequences, heads, p, n]. It computes in fp32, or float64 where `x` is;
    outputs have x's dtype. Chunks of `chunk` tokens ignore sequence borders; other sequences are masked. The backward
    keeps only the inputs.

    `backend`: "torch" anywhere; "triton" on CUDA, whose matrix products take operands of x's dtype, and which has no
    last states; "auto" takes Triton for half-precision tensors on CUDA where it can. "fla" is flash-linear-attention's
    chunks of 64 in half precision, where it is installed and right (see `postlude.ops.fla`).
    """
    _check(x, dt, A, B, C, chunk)
    if backend == "fla":
        fla.check(x, B, C, width=B.shape[2])
        if packing.total:
            return fla.ssd(x, dt, A, B, C, D, packing, last_states)
        backend = "torch"
    if backend == "auto" and x.dtype not in (torch.bfloat16, torch.float16):
        backend = "torch"  # the kernels' products are faster for half precision alone
    unsupported_reason, needed = _unsupported_reason(x, B, C, last_states)
    if use_kernel("ssd", backend, x.device, x.dtype, unsupported_reason=unsupported_reason, shared_memory=needed):
        output: Tensor = _TritonScan.apply(x, dt, A, B, C, D, packing.sequence_index().int(), chunk)
        return output, None
    chunk = max(1, min(chunk, packing.total))
    max_heads = WORKSPACE // max(1, packing.total * chunk)
    outputs, states = [], []
    for heads, groups in _turns(x.shape[1], B.shape[1], max_heads):
        inputs = x[:, heads], dt[:, heads], A[heads], B[:, groups], C[:, groups]
        output, last = _Scan.apply(*inputs, packing.cu_seqlens, chunk, last_states)
        outputs.append(output)
        states.append(last)
    y = torch.cat(outputs, 1)
    if D is not None:
        y = y + D[:, None] * x
    return y.to(x.dtype), torch.cat(states, 1) if last_states else None


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    states: Tensor,
    running: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Scans one more token of each of T sequences, shaped as in `ssd`, from their `states` [T, heads, p, n].

    Returns the output of `ssd` for that token. Overwrites the states, of those that are `running` [T] bool alone.
    """
    if use_step_kernel(backend, states, x, B, C):
        from postlude.ops.kernels import recurrent_step  # needs triton

        return recurrent_step.mamba(x, dt, A, B, C, D, states, running)
    wide, share = torch.promote_types(x.dtype, torch.float32), x.shape[1] // B.shape[1]
    B, C = (tensor.to(wide).repeat_interleave(share, 1)[:, :, None] for tensor in (B, C))  # [T, heads, 1, n]
    decay = (dt.to(wide) * A.to(wide)).exp()
    after = decay[..., None, None] * states + (dt[..., None].to(wide) * x)[..., None] * B
    overwrite(states, after, running)
    y = (after * C).sum(-1)
    if D is not None:
        y = y + D[:, None] * x
    return y.to(x.dtype)


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int) -> None:
    tokens, heads, _ = x.shape
    if dt.shape != (tokens, heads) or A.shape != (heads,) or B.shape != C.shape or B.shape[0] != tokens:
        inputs_by_name = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs_by_name.items())
        raise ValueError(
            f"a scan of {shapes}: give x [T, heads, p], dt [T, heads], A [heads], and B and C [T, groups, n]."
        )
    if heads % B.shape[1]:
        raise ValueError(f"{B.shape[1]} groups of B and C for {heads} heads: groups divide the heads.")
    if chunk < 1:
        raise ValueError(f"chunks of {chunk} tokens: a chunk has at least 1.")


def shared_memory_for(width: int, state: int, gpu: GPU) -> int:
    """Returns the bytes of shared memory that the kernels need; 0 if they are too narrow for these sizes."""
    needs = (need for (p, n), need in SHARED.items() if width <= p and state <= n)
    return min((hopper if gpu.tma else before for before, hopper in needs), default=0)


def _unsupported_reason(x: Tensor, B: Tensor, C: Tensor, last_states: bool) -> tuple[str | None, int]:
    """Returns why the Triton kernels cannot do this, or None, and the bytes of shared memory that they need."""
    (tokens, _, width), size = x.shape, B.shape[2]
    needed = shared_memory_for(width, size, gpu_of(x.device))
    if last_states:
        return "its kernels give no last states", needed
    if tokens == 0:
        return EMPTY, needed
    if not x.dtype == B.dtype == C.dtype:
        return f"its kernels want x, B and C of one dtype, and these are {x.dtype}, {B.dtype} and {C.dtype}", needed
    if not needed:
        return f"its kernels are for p and n up to one of {[*SHARED]}, and these are {width} and {size}", needed
    return None, needed


def _turns(heads: int, groups: int, max_heads: int) -> Iterator[tuple[slice, slice]]:
    """Yields heads that are processed together, with their groups: whole groups, or part of one."""
    share = heads // groups
    step = max(1, min(max_heads, heads))
    if step >= share:
        step -= step % share
        for start in range(0, heads, step):
            yield slice(start, start + step), slice(start // share, (start + step) // share)
    else:
        for group in range(groups):
            for start in range(group * share, (group + 1) * share, step):
                yield slice(start, min(start + step, (group + 1) * share)), slice(group, group + 1)


@dataclass(frozen=True)
class _Chunks:
    """`count` chunks of `length` tokens, the last one padded, and which tokens see each other."""

    count: int
    length: int
    visible: Tensor
    """[count, length, length] bool: whether the row's token sees the column's, in the same chunk."""
    stays: Tensor
    """[count, length] bool: whether the token is in the sequence of the chunk's last token."""
    continues: Tensor
    """[count, length] bool: whether the token's sequence began before the chunk."""
    ends: Tensor
    """[sequences] int64: the last token of each sequence."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, length: int) -> _Chunks:
        sequences, count = len(cu_seqlens) - 1, -(-total // length)
        numbers = torch.arange(sequences, device=cu_seqlens.device)
        sequence = numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)
        sequence = F.pad(sequence, (0, count * length - total), value=sequences).view(count, length)
        before = F.pad(sequence[:, -1], (1, 0), value=-1)[:-1]  # the sequence of the token before each chunk
        return cls(
            count,
            length,
            visible=(sequence[:, :, None] == sequence[:, None, :]).tril(),
            stays=sequence == sequence[:, -1:],
            continues=sequence == before[:, None],
            ends=cu_seqlens[1:].long() - 1,
        )

    def cut(self, tokens: Tensor) -> Tensor:
        """[T, ...] -> [count, length, ...], zeros at the end."""
        missing = self.count * self.length - tokens.shape[0]
        filled = F.pad(tokens, (0, 0) * (tokens.ndim - 1) + (0, missing)) if missing else tokens
        return filled.reshape(self.count, self.length, *tokens.shape[1:])


class _Scan(Function):
    """The scan. The backward computes it again, which costs less than the memory of its decays and states."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments[:6])
        ctx.options = arguments[6:]
        outputs: tuple[Tensor, Tensor] = _operator(*arguments)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, cu_seqlens = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
        arguments: list[Any] = [*inputs, cu_seqlens, *ctx.options]
        with torch.enable_grad():
            outputs = _scan(*arguments)
        differentiated = [tensor for tensor in inputs if tensor.requires_grad]
        count = 2 if ctx.options[1] else 1  # without last states there is no gradient of them
        input_gradients = iter(torch.autograd.grad(outputs[:count], differentiated, gradients[:count]))
        return *(next(input_gradients) if need else None for need in needed), None, None, None


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, chunk: int, last_states: bool
) -> tuple[Tensor, Tensor]:
    """Returns `ssd` without D in fp32 or wider: [T, heads, p] and [sequences, heads, p, n], or an empty tensor."""
    chunks = _Chunks.of(cu_seqlens, x.shape[0], chunk)
    wide = torch.promote_types(x.dtype, torch.float32)
    (tokens, heads, width), groups = x.shape, B.shape[1]
    split = (groups, heads // groups)
    # Sums of logarithms are float64, so that differences of large sums stay exact.
    log_decay = chunks.cut(dt.double() * A.double()).cumsum(1).permute(0, 2, 1).unflatten(1, split)  # [N, g, r, l]
    dt_x = chunks.cut(x.to(wide) * dt.to(wide)[..., None]).permute(0, 2, 1, 3).unflatten(1, split)  # [N, g, r, l, p]
    B, C = (chunks.cut(tensor.to(wide)).transpose(1, 2) for tensor in (B, C))  # [N, g, l, n]

    # Within a chunk each token sees those before it, as in attention, with decays instead of a softmax.
    difference = log_decay[..., :, None] - log_decay[..., None, :]
    decay = _exp(difference, chunks.visible[:, None, None], wide)  # [N, g, r, l, l]
    inside = ((C @ B.transpose(-1, -2))[:, :, None] * decay) @ dt_x

    # Between chunks there are states: each chunk adds to them, and its tokens read the state before it.
    to_end = _exp(log_decay[..., -1:] - log_decay, chunks.stays[:, None, None], wide)  # decay to the chunk's end
    added = (dt_x * to_end[..., None]).transpose(-1, -2).flatten(2, 3) @ B  # [N, g, r·p, n]
    starts_sequence = ~chunks.continues[:, -1]  # no state passes the start of a sequence
    across = log_decay[..., -1].flatten(1).masked_fill(starts_sequence[:, None], float("-inf")).to(wide)  # [N, heads]
    states = _carry(added.reshape(chunks.count, heads, width * B.shape[-1]), across).reshape(added.shape)
    from_start = _exp(log_decay, chunks.continues[:, None, None], wide)  # decay from the chunk's start
    before = (states @ C.transpose(-1, -2)).unflatten(2, (-1, width)) * from_start[..., None, :]  # [N, g, r, p, l]

    y = (
        (inside + before.transpose(-1, -2))
        .permute(0, 3, 1, 2, 4)
        .reshape(chunks.count * chunks.length, heads, width)[:tokens]
    )
    if not last_states:
        return y, y.new_empty(0)
    last, offset = chunks.ends // chunks.length, chunks.ends % chunks.length
    new = (dt_x[last] * decay[last, :, :, offset][..., None]).transpose(-1, -2).flatten(2, 3) @ B[last]
    old = states.unflatten(2, (-1, width))[last] * from_start[last, :, :, offset][..., None, None]
    return y, (new.reshape(old.shape) + old).flatten(1, 2)


# One operator, so that selective recompute keeps its result and not each product inside.
_operator = torch.library.custom_op(
    "postlude::ssd",
    _scan,
    mutates_args=(),
    schema="(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor cu_seqlens, int chunk, bool last_states)"
    " -> (Tensor, Tensor)",
)


class _TritonScan(Function):
    """The Triton kernels, D included. The backward computes the states again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:7])
        ctx.chunk = arguments[7]
        output: Tensor = _triton_operator(*arguments)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from postlude.ops.kernels.ssd import Scan

        x, dt, A, B, C, D, sequence = ctx.saved_tensors
        scan = Scan.of(x, dt, A, B, C, sequence, ctx.chunk)
        pairs = zip((x, dt, A, B, C, D), scan.gradients(D, gradients[0]), strict=True)
        return *(None if like is None else gradient.to(like.dtype) for like, gradient in pairs), None, None


def _triton_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, sequence: Tensor, chunk: int
) -> Tensor:
    from postlude.ops.kernels.ssd import Scan  # needs triton

    return Scan.of(x, dt, A, B, C, sequence, chunk).outputs(D)


_triton_operator = torch.library.custom_op(
    "postlude::ssd_triton",
    _triton_scan,
    mutates_args=(),
    schema="(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor sequence, int chunk) -> Tensor",
)


def _carry(added: Tensor, through: Tensor) -> Tensor:
    """Returns the state before each chunk, [N, heads, size].

    `added` [N, heads, size] is what each chunk adds; `through` [N, heads] the log decay across it. It works in blocks
    of chunks: first what each block adds, then the state before each block, then before each chunk.
    """
    count = len(added)
    if count <= 1:
        return torch.zeros_like(added)
    blocks = -(-count // BLOCK)
    missing = blocks * BLOCK - count
    added = F.pad(added, (0, 0, 0, 0, 0, missing)).unflatten(0, (blocks, BLOCK)).transpose(1, 2)  # [M, heads, b, size]
    through = F.pad(through, (0, 0, 0, missing)).unflatten(0, (blocks, BLOCK)).transpose(1, 2)  # [M, heads, b]
    # Row k: what is left after chunk k of the state before the block (column 0) and of each chunk's addition (from
    # column 1 on). Logarithms are summed, not subtracted, since they may be -inf.
    square = torch.ones(BLOCK, BLOCK + 1, dtype=torch.bool, device=through.device)
    sums = torch.where(square.tril(), through[..., None], 0.0).cumsum(-2)  # [M, heads, b, b + 1]
    decays = sums.masked_fill(~square.tril(1), float("-inf")).exp()
    by_block = (decays[..., -1:, 1:] @ added).squeeze(2)
    first = _carry(by_block, sums[..., -1, 0])[:, :, None]
    remaining = decays[..., :-1, :-1] @ torch.cat((first, added[:, :, :-1]), 2)
    return torch.cat((first, remaining), 2).transpose(1, 2).flatten(0, 1)[:count]


def _exp(logarithm: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns exp where `mask` is True, else 0. Other logarithms may be large."""
    return logarithm.masked_fill(~mask, float("-inf")).to(dtype).exp()
