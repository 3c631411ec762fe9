"""Device code of `kernels/ssd.py`.

`steps` is [3, heads, padded], where `padded` counts all chunks' tokens: dt, and the high and low part of the sum of
dt · A since the chunk began, which is a log decay. States are [chunks, heads, STATE, WIDTH]. Their width is p and their
size n in `ops/ssd.py`; the blocks P and N hold them. Parameters `x_token`, `x_head` and `x_group` are strides of x.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from postlude.ops.kernels.launch import Kernel


@Kernel
@triton.jit
def fill_steps(dt, A, steps, tokens, heads, dt_token, padded, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """Fills `steps` of one chunk and some heads."""
    # A grid of one dimension: CUDA limits the others to 65,535.
    head_tiles = tl.cdiv(heads, HEADS)
    token = tl.program_id(0) // head_tiles * LENGTH + tl.arange(0, LENGTH)
    head = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS)
    mask = (token < tokens)[:, None] & (head < heads)[None, :]
    dt_tile = tl.load(dt + token.to(tl.int64)[:, None] * dt_token + head[None, :], mask=mask, other=0.0)
    A_row = tl.load(A + head, mask=head < heads, other=0.0)
    log_decay = tl.cumsum(dt_tile.to(tl.float64) * A_row.to(tl.float64)[None, :], 0)
    high = log_decay.to(tl.float32)
    low = (log_decay - high.to(tl.float64)).to(tl.float32)
    head_plane = tl.cast(heads, tl.int64) * padded
    steps_at = steps + head.to(tl.int64)[None, :] * padded + token[:, None]
    head_mask = (head < heads)[None, :]
    tl.store(steps_at, dt_tile.to(tl.float32), mask=head_mask)
    tl.store(steps_at + head_plane, high, mask=head_mask)
    tl.store(steps_at + 2 * head_plane, low, mask=head_mask)


@triton.jit
def _load_tile(tensor, token_stride, row_stride, row, token, tokens, column, COLUMNS: tl.constexpr):
    # Loads [tokens, columns] of one head or group, `row`.
    mask = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    start = tensor + tl.cast(row, tl.int64) * row_stride
    return tl.load(start + token.to(tl.int64)[:, None] * token_stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _state_pointers(states, chunk, head, n, p, HEADS: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr):
    start = (tl.cast(chunk, tl.int64) * HEADS + head) * (STATE * WIDTH)
    return states + start + n[:, None] * WIDTH + p[None, :], (n < STATE)[:, None] & (p < WIDTH)[None, :]


@triton.jit
def _load_dt(steps, head, token, padded):
    return tl.load(steps + tl.cast(head, tl.int64) * padded + token)


@triton.jit
def _load_log_decay(steps, head, token, padded, HEADS: tl.constexpr):
    # Loads the high and low part of the log decay from the chunk's start to a token.
    high = steps + tl.cast(head + HEADS, tl.int64) * padded + token
    return tl.load(high), tl.load(high + tl.cast(padded, tl.int64) * HEADS)


@triton.jit
def _border_sequences(sequence, start, tokens, LENGTH: tl.constexpr):
    # Returns the sequences of the token before the chunk and of its last token. No token's is below 0.
    last = start + LENGTH - 1
    before = tl.load(sequence + start - 1, mask=start > 0, other=-2)
    return before, tl.load(sequence + last, mask=last < tokens, other=-1)


@triton.jit
def _masked_exp(log_value, mask):
    # Returns e^x where the mask is True, else 0. There x may be far above 0.
    return tl.exp(tl.where(mask, log_value, float("-inf")))


@Kernel
@triton.jit
def scan_states(
    keys, key_token, key_group, values, value_token, value_head, sequence, steps, states, tokens, chunks,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    LENGTH: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head and tile: the state before each chunk, or with BACKWARD the gradient of the state after each."""
    head = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    p = tl.program_id(2) * P + tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    state = tl.zeros((N, P), tl.float32)
    for index in range(chunks):
        chunk = index
        if BACKWARD:
            chunk = chunks - 1 - index
        chunk = tl.cast(chunk, tl.int32)
        token = chunk * LENGTH + tl.arange(0, LENGTH)
        state_at, mask = _state_pointers(states, chunk, head, n, p, HEADS, STATE, WIDTH)
        tl.store(state_at, state.to(states.dtype.element_ty), mask=mask)
        row_sequence = tl.load(sequence + token, mask=token < tokens, other=-1)
        previous_sequence, last_sequence = _border_sequences(sequence, chunk * LENGTH, tokens, LENGTH)
        dt = _load_dt(steps, head, token, padded)
        high, low = _load_log_decay(steps, head, token, padded, HEADS)
        end_high, end_low = _load_log_decay(steps, head, chunk * LENGTH + LENGTH - 1, padded, HEADS)
        weight = _masked_exp(
            high + low, row_sequence == previous_sequence
        )  # a token's y reads the state before the chunk
        if not BACKWARD:  # a token's x is written to the state after it
            weight = _masked_exp((end_high - high) + (end_low - low), row_sequence == last_sequence) * dt
        key = _load_tile(keys, key_token, key_group, head // GROUP_HEADS, token, tokens, n, STATE)
        value = _load_tile(values, value_token, value_head, head, token, tokens, p, WIDTH)
        weighted = (key.to(tl.float32) * weight[:, None]).to(value.dtype)
        state *= _masked_exp(end_high + end_low, previous_sequence == last_sequence)
        state = tl.dot(tl.trans(weighted), value, state, input_precision="ieee")


@Kernel
@triton.jit
def compute_outputs(
    x, x_token, x_head, B, B_token, B_group, C, C_token, C_group, D, sequence, steps, states, y, tokens, chunks,
    HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head and block of tokens: y."""
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    group, chunk = head // GROUP_HEADS, block * BLOCK // LENGTH
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    t = block * BLOCK + tl.arange(0, BLOCK)
    previous_sequence, _last_sequence = _border_sequences(sequence, chunk * LENGTH, tokens, LENGTH)
    sequence_t = tl.load(sequence + t, mask=t < tokens, other=-1)
    high_t, low_t = _load_log_decay(steps, head, t, padded, HEADS)
    c = _load_tile(C, C_token, C_group, group, t, tokens, n, STATE)
    state_at, mask = _state_pointers(states, chunk, head, n, p, HEADS, STATE, WIDTH)
    state = tl.load(state_at, mask=mask, other=0.0)
    sums = (
        tl.dot(c, state, input_precision="ieee") * _masked_exp(high_t + low_t, sequence_t == previous_sequence)[:, None]
    )
    for first in range(chunk * LENGTH, (block + 1) * BLOCK, BLOCK):
        s = first + tl.arange(0, BLOCK)
        sequence_s = tl.load(sequence + s, mask=s < tokens, other=-1)
        dt = _load_dt(steps, head, s, padded)
        high, low = _load_log_decay(steps, head, s, padded, HEADS)
        b = _load_tile(B, B_token, B_group, group, s, tokens, n, STATE)
        value = _load_tile(x, x_token, x_head, head, s, tokens, p, WIDTH)
        visible = (sequence_t[:, None] == sequence_s[None, :]) & (t[:, None] >= s[None, :])
        decay = _masked_exp((high_t[:, None] - high[None, :]) + (low_t[:, None] - low[None, :]), visible)
        pairs = tl.dot(c, tl.trans(b), input_precision="ieee") * (decay * dt[None, :])
        sums = tl.dot(pairs.to(value.dtype), value, sums, input_precision="ieee")
    if D is not None:
        value = _load_tile(x, x_token, x_head, head, t, tokens, p, WIDTH)
        sums += tl.load(D + head).to(tl.float32) * value.to(tl.float32)
    output_at = y + (t.to(tl.int64)[:, None] * HEADS + head) * WIDTH + p[None, :]
    tl.store(output_at, sums.to(y.dtype.element_ty), mask=(t < tokens)[:, None] & (p < WIDTH)[None, :])


@Kernel
@triton.jit
def gradient_by_head(  # noqa: PLR0915
    x,
    x_token,
    x_head,
    B,
    B_token,
    B_group,
    C,
    C_token,
    C_group,
    gradient,
    gradient_token,
    gradient_head,
    sequence,
    steps,
    states,
    grad_states,
    D,
    grad_x,
    grad_D,
    decay_grads,
    state_decay_grad,
    tokens,
    chunks,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
):
    """One head and chunk: the gradient of x, and the terms of dt's gradient, `decay_grads` and `state_decay_grad`.

    See `gradient_of_dt` for them.
    """
    head, chunk = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    group = head // GROUP_HEADS
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    plane = tl.cast(padded, tl.int64) * HEADS
    start = chunk * LENGTH
    previous_sequence, last_sequence = _border_sequences(sequence, start, tokens, LENGTH)
    end_high, end_low = _load_log_decay(steps, head, start + LENGTH - 1, padded, HEADS)
    state_at, mask = _state_pointers(states, chunk, head, n, p, HEADS, STATE, WIDTH)
    state = tl.load(state_at, mask=mask, other=0.0)
    state_at, mask = _state_pointers(grad_states, chunk, head, n, p, HEADS, STATE, WIDTH)
    grad_state = tl.load(state_at, mask=mask, other=0.0)
    product = tl.sum(state.to(tl.float32) * grad_state.to(tl.float32)) * _masked_exp(
        end_high + end_low, previous_sequence == last_sequence
    )
    tl.store(state_decay_grad + chunk * HEADS + head, product)
    offset = tl.arange(0, BLOCK)
    grad_D_terms = tl.zeros((BLOCK,), tl.float32)
    pairs_before = tl.zeros((BLOCK,), tl.float32)  # pairs of a token of this block with all of the one before
    skip = 0.0
    if D is not None:
        skip = tl.load(D + head).to(tl.float32)
    for first in range(start, start + LENGTH, BLOCK):
        s = first + offset
        sequence_s = tl.load(sequence + s, mask=s < tokens, other=-1)
        dt = _load_dt(steps, head, s, padded)
        high, low = _load_log_decay(steps, head, s, padded, HEADS)
        value = _load_tile(x, x_token, x_head, head, s, tokens, p, WIDTH)
        value_fp32 = value.to(tl.float32)
        b = _load_tile(B, B_token, B_group, group, s, tokens, n, STATE)
        c = _load_tile(C, C_token, C_group, group, s, tokens, n, STATE)
        grad = _load_tile(gradient, gradient_token, gradient_head, head, s, tokens, p, WIDTH)
        grads_at = decay_grads + tl.cast(head, tl.int64) * padded + s
        tl.store(grads_at + 2 * plane, tl.cumsum(pairs_before, 0, reverse=True))
        read_product = tl.sum(tl.dot(c, state, input_precision="ieee") * grad.to(tl.float32), 1)
        tl.store(grads_at + 3 * plane, read_product * _masked_exp(high + low, sequence_s == previous_sequence))
        decay_to_end = _masked_exp((end_high - high) + (end_low - low), sequence_s == last_sequence)
        grad_dtx = tl.dot(b, grad_state, input_precision="ieee") * decay_to_end[:, None]  # the gradient of dt · x
        tl.store(grads_at, tl.sum(grad_dtx * value_fp32, 1) * dt)

        visible = (sequence_s[:, None] == sequence_s[None, :]) & (offset[:, None] <= offset[None, :])
        decay = _masked_exp((high[None, :] - high[:, None]) + (low[None, :] - low[:, None]), visible)
        pairs = tl.dot(b, tl.trans(c), input_precision="ieee") * decay  # [s, t]
        grad_dtx = tl.dot(pairs.to(value.dtype), grad, grad_dtx, input_precision="ieee")
        pairs *= tl.dot(value, tl.trans(grad), input_precision="ieee") * dt[:, None]
        is_later = (offset[:, None] > offset[None, :]).to(tl.float32)
        pairs = tl.dot(pairs, is_later, input_precision=PRECISION)  # with all tokens behind the column's
        pairs_across = tl.sum(tl.where(offset[:, None] <= offset[None, :], pairs, 0.0), 0)
        if first + BLOCK < start + LENGTH:
            t = first + BLOCK + offset
            sequence_t = tl.load(sequence + t, mask=t < tokens, other=-1)
            high_t, low_t = _load_log_decay(steps, head, t, padded, HEADS)
            c = _load_tile(C, C_token, C_group, group, t, tokens, n, STATE)
            grad_t = _load_tile(gradient, gradient_token, gradient_head, head, t, tokens, p, WIDTH)
            decay = _masked_exp(
                (high_t[None, :] - high[:, None]) + (low_t[None, :] - low[:, None]),
                sequence_s[:, None] == sequence_t[None, :],
            )
            pairs = tl.dot(b, tl.trans(c), input_precision="ieee") * decay
            grad_dtx = tl.dot(pairs.to(value.dtype), grad_t, grad_dtx, input_precision="ieee")
            pairs *= tl.dot(value, tl.trans(grad_t), input_precision="ieee") * dt[:, None]
            pairs_before = tl.sum(pairs, 0)
            pairs_across += tl.where(offset < BLOCK - 1, tl.cumsum(tl.sum(pairs, 1), 0), 0.0)
        tl.store(grads_at + plane, pairs_across)
        tl.store(grads_at + 4 * plane, tl.sum(grad_dtx * value_fp32, 1))
        grad_D_terms += tl.sum(value_fp32 * grad.to(tl.float32), 1)
        grad_dtx = grad_dtx * dt[:, None] + skip * grad.to(tl.float32)
        grads_at = grad_x + (s.to(tl.int64)[:, None] * HEADS + head) * WIDTH + p[None, :]
        tl.store(grads_at, grad_dtx.to(grad_x.dtype.element_ty), mask=(s < tokens)[:, None] & (p < WIDTH)[None, :])
    tl.store(grad_D + chunk * HEADS + head, tl.sum(grad_D_terms))


@Kernel
@triton.jit
def gradient_of_dt(
    steps, decay_grads, state_decay_grad, A, grad_dt, grad_A, tokens, heads, padded,
    LENGTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of dt, and of A.

    The gradient of dt · A at token k sums all that decays by it: what tokens s < k write to the state after the chunk
    (`decay_grads`[0]), pairs s < k ≤ t ([1] at k - 1, [2] at k), the state before as tokens t ≥ k read it ([3]), and
    the state that passes through the chunk (`state_decay_grad`). Nothing is subtracted, since a difference would be
    lost in rounding. [4] is the gradient of dt · x times x.
    """
    head_tiles = tl.cdiv(heads, HEADS)
    head = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS)
    chunk = tl.program_id(0) // head_tiles
    head_mask = head < heads
    offset = tl.arange(0, LENGTH)
    head_plane = tl.cast(heads, tl.int64) * padded
    at = head.to(tl.int64)[:, None] * padded + chunk * LENGTH + offset[None, :]
    mask = head_mask[:, None] & (offset >= 0)[None, :]
    has_previous = head_mask[:, None] & (offset > 0)[None, :]
    state_term = tl.load(state_decay_grad + chunk * heads + head, mask=head_mask, other=0.0)
    written_term = tl.load(decay_grads + at - 1, mask=has_previous, other=0.0)
    read_term = tl.load(decay_grads + 3 * head_plane + at, mask=mask, other=0.0)
    pairs_term = tl.load(decay_grads + head_plane + at - 1, mask=has_previous, other=0.0) + tl.load(
        decay_grads + 2 * head_plane + at, mask=mask, other=0.0
    )
    grad_log_decay = (
        tl.cumsum(written_term, 1) + tl.cumsum(read_term, 1, reverse=True) + pairs_term + state_term[:, None]
    )
    dt = tl.load(steps + at, mask=mask, other=0.0)
    tl.store(grad_A + chunk * heads + head, tl.sum(dt * grad_log_decay, 1), mask=head_mask)
    grad_log_decay *= tl.load(A + head, mask=head_mask, other=0.0).to(tl.float32)[:, None]
    grad_log_decay += tl.load(decay_grads + 4 * head_plane + at, mask=mask, other=0.0)
    token = chunk * LENGTH + offset
    dt_at = grad_dt + token.to(tl.int64)[None, :] * heads + head[:, None]
    tl.store(dt_at, grad_log_decay, mask=head_mask[:, None] & (token < tokens)[None, :])


@Kernel
@triton.jit
def gradient_by_group(  # noqa: PLR0915
    x,
    x_token,
    x_head,
    B,
    B_token,
    B_group,
    C,
    C_token,
    C_group,
    gradient,
    gradient_token,
    gradient_head,
    sequence,
    steps,
    states,
    grad_states,
    output,
    tokens,
    chunks,
    OF_B: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
):
    """The gradient of a block of C's rows, or with OF_B of B's, summed over the group's heads.

    C's rows t have it from B's tokens s ≤ t and the state before the chunk, B's rows s from C's tokens t ≥ s and the
    state after it. Heads come one after another; pairs of tokens are summed before they meet B or C.
    """
    group, block = tl.program_id(0) % (HEADS // GROUP_HEADS), tl.program_id(0) // (HEADS // GROUP_HEADS)
    chunk = block * BLOCK // LENGTH
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    start = chunk * LENGTH
    row = block * BLOCK + tl.arange(0, BLOCK)
    previous_sequence, last_sequence = _border_sequences(sequence, start, tokens, LENGTH)
    row_sequence = tl.load(sequence + row, mask=row < tokens, other=-1)
    sums = tl.zeros((BLOCK, N), tl.float32)
    for head in range(group * GROUP_HEADS, (group + 1) * GROUP_HEADS):
        dt = _load_dt(steps, head, row, padded)
        high, low = _load_log_decay(steps, head, row, padded, HEADS)
        if OF_B:
            end_high, end_low = _load_log_decay(steps, head, start + LENGTH - 1, padded, HEADS)
            rows = _load_tile(x, x_token, x_head, head, row, tokens, p, WIDTH)
            weight = _masked_exp((end_high - high) + (end_low - low), row_sequence == last_sequence) * dt
            state_at, mask = _state_pointers(grad_states, chunk, head, n, p, HEADS, STATE, WIDTH)
        else:
            rows = _load_tile(gradient, gradient_token, gradient_head, head, row, tokens, p, WIDTH)
            weight = _masked_exp(high + low, row_sequence == previous_sequence)
            state_at, mask = _state_pointers(states, chunk, head, n, p, HEADS, STATE, WIDTH)
        state = tl.load(state_at, mask=mask, other=0.0)
        weighted = (rows.to(tl.float32) * weight[:, None]).to(rows.dtype)
        sums = tl.dot(weighted, tl.trans(state), sums, input_precision="ieee")
    start_column, stop_column = start, (block + 1) * BLOCK
    if OF_B:
        start_column, stop_column = block * BLOCK, start + LENGTH
    for first in range(start_column, stop_column, BLOCK):
        column = first + tl.arange(0, BLOCK)
        column_sequence = tl.load(sequence + column, mask=column < tokens, other=-1)
        is_ordered = row[:, None] >= column[None, :]
        if OF_B:
            is_ordered = row[:, None] <= column[None, :]
        visible = is_ordered & (row_sequence[:, None] == column_sequence[None, :])
        pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
        for head in range(group * GROUP_HEADS, (group + 1) * GROUP_HEADS):
            dt = _load_dt(steps, head, row, padded)
            high, low = _load_log_decay(steps, head, row, padded, HEADS)
            column_dt = _load_dt(steps, head, column, padded)
            column_high, column_low = _load_log_decay(steps, head, column, padded, HEADS)
            log_decay = (high[:, None] - column_high[None, :]) + (low[:, None] - column_low[None, :])
            if OF_B:
                weight = _masked_exp(-log_decay, visible) * dt[:, None]
                rows = _load_tile(x, x_token, x_head, head, row, tokens, p, WIDTH)
                columns = _load_tile(gradient, gradient_token, gradient_head, head, column, tokens, p, WIDTH)
            else:
                weight = _masked_exp(log_decay, visible) * column_dt[None, :]
                rows = _load_tile(gradient, gradient_token, gradient_head, head, row, tokens, p, WIDTH)
                columns = _load_tile(x, x_token, x_head, head, column, tokens, p, WIDTH)
            pairs += tl.dot(rows, tl.trans(columns), input_precision="ieee") * weight
        if OF_B:
            factors = _load_tile(C, C_token, C_group, group, column, tokens, n, STATE)
        else:
            factors = _load_tile(B, B_token, B_group, group, column, tokens, n, STATE)
        sums = tl.dot(pairs.to(factors.dtype), factors, sums, input_precision="ieee")
    groups: tl.constexpr = HEADS // GROUP_HEADS
    state_at = output + (row.to(tl.int64)[:, None] * groups + group) * STATE + n[None, :]
    tl.store(state_at, sums.to(output.dtype.element_ty), mask=(row < tokens)[:, None] & (n < STATE)[None, :])
