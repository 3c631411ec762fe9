"""Device code of `kernels/ssd.py`.

`steps` is [3, heads, padded], where `padded` counts all chunks' tokens: dt, and the high and low part of the sum of
dt · A since the chunk began. States are [chunks, heads, STATE, WIDTH]. The blocks P and N hold WIDTH and STATE.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from postlude.ops.kernels.launch import Kernel


@Kernel
@triton.jit
def steps(dt, A, steps, tokens, heads, dt_token, padded, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """Fills `steps` of one chunk and some heads."""
    # A grid of one dimension: CUDA limits the others to 65,535.
    along = tl.cdiv(heads, HEADS)
    place = tl.program_id(0) // along * LENGTH + tl.arange(0, LENGTH)
    head = tl.program_id(0) % along * HEADS + tl.arange(0, HEADS)
    mask = (place < tokens)[:, None] & (head < heads)[None, :]
    step = tl.load(dt + place.to(tl.int64)[:, None] * dt_token + head[None, :], mask=mask, other=0.0)
    rate = tl.load(A + head, mask=head < heads, other=0.0)
    passed = tl.cumsum(step.to(tl.float64) * rate.to(tl.float64)[None, :], 0)
    high = passed.to(tl.float32)
    low = (passed - high.to(tl.float64)).to(tl.float32)
    plane = tl.cast(heads, tl.int64) * padded
    out = steps + head.to(tl.int64)[None, :] * padded + place[:, None]
    head_mask = (head < heads)[None, :]
    tl.store(out, step.to(tl.float32), mask=head_mask)
    tl.store(out + plane, high, mask=head_mask)
    tl.store(out + 2 * plane, low, mask=head_mask)


@triton.jit
def _tile(tensor, token_stride, other_stride, other, place, tokens, column, COLUMNS: tl.constexpr):
    # Rows are tokens, of one head or group.
    mask = (place < tokens)[:, None] & (column < COLUMNS)[None, :]
    start = tensor + tl.cast(other, tl.int64) * other_stride
    return tl.load(start + place.to(tl.int64)[:, None] * token_stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _state_at(states, chunk, head, n, p, HEADS: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr):
    start = (tl.cast(chunk, tl.int64) * HEADS + head) * (STATE * WIDTH)
    return states + start + n[:, None] * WIDTH + p[None, :], (n < STATE)[:, None] & (p < WIDTH)[None, :]


@triton.jit
def _step(steps, head, place, padded):
    return tl.load(steps + tl.cast(head, tl.int64) * padded + place)


@triton.jit
def _passed(steps, head, place, padded, HEADS: tl.constexpr):
    # The two parts of the log decay from the chunk's start to a token.
    high = steps + tl.cast(head + HEADS, tl.int64) * padded + place
    return tl.load(high), tl.load(high + tl.cast(padded, tl.int64) * HEADS)


@triton.jit
def _borders(sequence, start, tokens, LENGTH: tl.constexpr):
    # The sequences of the token before the chunk and of its last token. No token's is below 0.
    last = start + LENGTH - 1
    before = tl.load(sequence + start - 1, mask=start > 0, other=-2)
    return before, tl.load(sequence + last, mask=last < tokens, other=-1)


@triton.jit
def _exp(logarithm, mask):
    # Where the mask is False it may be far above 0.
    return tl.exp(tl.where(mask, logarithm, float("-inf")))


@Kernel
@triton.jit
def states(
    keys, key_token, key_group, values, value_token, value_head, sequence, steps, states, tokens, chunks,
    BACK: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr,
    LENGTH: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head and tile: the state before each chunk, or with BACK the gradient of the state after each."""
    head = tl.program_id(0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    p = tl.program_id(2) * P + tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    state = tl.zeros((N, P), tl.float32)
    for turn in range(chunks):
        chunk = turn
        if BACK:
            chunk = chunks - 1 - turn
        chunk = tl.cast(chunk, tl.int32)
        place = chunk * LENGTH + tl.arange(0, LENGTH)
        at, mask = _state_at(states, chunk, head, n, p, HEADS, STATE, WIDTH)
        tl.store(at, state.to(states.dtype.element_ty), mask=mask)
        own_sequence = tl.load(sequence + place, mask=place < tokens, other=-1)
        before, last = _borders(sequence, chunk * LENGTH, tokens, LENGTH)
        dt = _step(steps, head, place, padded)
        high, low = _passed(steps, head, place, padded, HEADS)
        end_high, end_low = _passed(steps, head, chunk * LENGTH + LENGTH - 1, padded, HEADS)
        weight = _exp(high + low, own_sequence == before)  # a token's y reads the state before the chunk
        if not BACK:  # a token's x is written to the state after it
            weight = _exp((end_high - high) + (end_low - low), own_sequence == last) * dt
        key = _tile(keys, key_token, key_group, head // SHARE, place, tokens, n, STATE)
        value = _tile(values, value_token, value_head, head, place, tokens, p, WIDTH)
        weighted = (key.to(tl.float32) * weight[:, None]).to(value.dtype)
        state *= _exp(end_high + end_low, before == last)
        state = tl.dot(tl.trans(weighted), value, state, input_precision="ieee")


@Kernel
@triton.jit
def outputs(
    x, x_token, x_head, B, B_token, B_group, C, C_token, C_group, D, sequence, steps, states, y, tokens, chunks,
    HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One head and block of tokens: y."""
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    group, chunk = head // SHARE, block * BLOCK // LENGTH
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    t = block * BLOCK + tl.arange(0, BLOCK)
    before, _last = _borders(sequence, chunk * LENGTH, tokens, LENGTH)
    own_t = tl.load(sequence + t, mask=t < tokens, other=-1)
    high_t, low_t = _passed(steps, head, t, padded, HEADS)
    c = _tile(C, C_token, C_group, group, t, tokens, n, STATE)
    at, mask = _state_at(states, chunk, head, n, p, HEADS, STATE, WIDTH)
    state = tl.load(at, mask=mask, other=0.0)
    sums = tl.dot(c, state, input_precision="ieee") * _exp(high_t + low_t, own_t == before)[:, None]
    for first in range(chunk * LENGTH, (block + 1) * BLOCK, BLOCK):
        s = first + tl.arange(0, BLOCK)
        own_s = tl.load(sequence + s, mask=s < tokens, other=-1)
        dt = _step(steps, head, s, padded)
        high, low = _passed(steps, head, s, padded, HEADS)
        b = _tile(B, B_token, B_group, group, s, tokens, n, STATE)
        value = _tile(x, x_token, x_head, head, s, tokens, p, WIDTH)
        visible = (own_t[:, None] == own_s[None, :]) & (t[:, None] >= s[None, :])
        decay = _exp((high_t[:, None] - high[None, :]) + (low_t[:, None] - low[None, :]), visible)
        pairs = tl.dot(c, tl.trans(b), input_precision="ieee") * (decay * dt[None, :])
        sums = tl.dot(pairs.to(value.dtype), value, sums, input_precision="ieee")
    if D is not None:
        value = _tile(x, x_token, x_head, head, t, tokens, p, WIDTH)
        sums += tl.load(D + head).to(tl.float32) * value.to(tl.float32)
    out = y + (t.to(tl.int64)[:, None] * HEADS + head) * WIDTH + p[None, :]
    tl.store(out, sums.to(y.dtype.element_ty), mask=(t < tokens)[:, None] & (p < WIDTH)[None, :])


@Kernel
@triton.jit
def heads_gradient(  # noqa: PLR0915
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
    ahead,
    D,
    of_x,
    of_D,
    parts,
    through,
    tokens,
    chunks,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
):
    """One head and chunk: the gradient of x, and the parts of dt's gradient, `parts` and `through` (see `rates`)."""
    head, chunk = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    group = head // SHARE
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    plane = tl.cast(padded, tl.int64) * HEADS
    start = chunk * LENGTH
    before, last = _borders(sequence, start, tokens, LENGTH)
    end_high, end_low = _passed(steps, head, start + LENGTH - 1, padded, HEADS)
    at, mask = _state_at(states, chunk, head, n, p, HEADS, STATE, WIDTH)
    state = tl.load(at, mask=mask, other=0.0)
    at, mask = _state_at(ahead, chunk, head, n, p, HEADS, STATE, WIDTH)
    after = tl.load(at, mask=mask, other=0.0)
    inner = tl.sum(state.to(tl.float32) * after.to(tl.float32)) * _exp(end_high + end_low, before == last)
    tl.store(through + chunk * HEADS + head, inner)
    place = tl.arange(0, BLOCK)
    of_skip = tl.zeros((BLOCK,), tl.float32)
    seen_before = tl.zeros((BLOCK,), tl.float32)  # pairs of a token of this block with all of the one before
    skip = 0.0
    if D is not None:
        skip = tl.load(D + head).to(tl.float32)
    for first in range(start, start + LENGTH, BLOCK):
        s = first + place
        own_s = tl.load(sequence + s, mask=s < tokens, other=-1)
        dt = _step(steps, head, s, padded)
        high, low = _passed(steps, head, s, padded, HEADS)
        value = _tile(x, x_token, x_head, head, s, tokens, p, WIDTH)
        wide = value.to(tl.float32)
        b = _tile(B, B_token, B_group, group, s, tokens, n, STATE)
        c = _tile(C, C_token, C_group, group, s, tokens, n, STATE)
        arriving = _tile(gradient, gradient_token, gradient_head, head, s, tokens, p, WIDTH)
        out = parts + tl.cast(head, tl.int64) * padded + s
        tl.store(out + 2 * plane, tl.cumsum(seen_before, 0, reverse=True))
        read = tl.sum(tl.dot(c, state, input_precision="ieee") * arriving.to(tl.float32), 1)
        tl.store(out + 3 * plane, read * _exp(high + low, own_s == before))
        decay_to_end = _exp((end_high - high) + (end_low - low), own_s == last)
        pushed = tl.dot(b, after, input_precision="ieee") * decay_to_end[:, None]  # the gradient of dt · x
        tl.store(out, tl.sum(pushed * wide, 1) * dt)

        visible = (own_s[:, None] == own_s[None, :]) & (place[:, None] <= place[None, :])
        decay = _exp((high[None, :] - high[:, None]) + (low[None, :] - low[:, None]), visible)
        pairs = tl.dot(b, tl.trans(c), input_precision="ieee") * decay  # [s, t]
        pushed = tl.dot(pairs.to(value.dtype), arriving, pushed, input_precision="ieee")
        pairs *= tl.dot(value, tl.trans(arriving), input_precision="ieee") * dt[:, None]
        later = (place[:, None] > place[None, :]).to(tl.float32)
        pairs = tl.dot(pairs, later, input_precision=PRECISION)  # with all tokens behind the column's
        across = tl.sum(tl.where(place[:, None] <= place[None, :], pairs, 0.0), 0)
        if first + BLOCK < start + LENGTH:
            t = first + BLOCK + place
            own_t = tl.load(sequence + t, mask=t < tokens, other=-1)
            high_t, low_t = _passed(steps, head, t, padded, HEADS)
            c = _tile(C, C_token, C_group, group, t, tokens, n, STATE)
            arriving_t = _tile(gradient, gradient_token, gradient_head, head, t, tokens, p, WIDTH)
            decay = _exp(
                (high_t[None, :] - high[:, None]) + (low_t[None, :] - low[:, None]), own_s[:, None] == own_t[None, :]
            )
            pairs = tl.dot(b, tl.trans(c), input_precision="ieee") * decay
            pushed = tl.dot(pairs.to(value.dtype), arriving_t, pushed, input_precision="ieee")
            pairs *= tl.dot(value, tl.trans(arriving_t), input_precision="ieee") * dt[:, None]
            seen_before = tl.sum(pairs, 0)
            across += tl.where(place < BLOCK - 1, tl.cumsum(tl.sum(pairs, 1), 0), 0.0)
        tl.store(out + plane, across)
        tl.store(out + 4 * plane, tl.sum(pushed * wide, 1))
        of_skip += tl.sum(wide * arriving.to(tl.float32), 1)
        pushed = pushed * dt[:, None] + skip * arriving.to(tl.float32)
        out = of_x + (s.to(tl.int64)[:, None] * HEADS + head) * WIDTH + p[None, :]
        tl.store(out, pushed.to(of_x.dtype.element_ty), mask=(s < tokens)[:, None] & (p < WIDTH)[None, :])
    tl.store(of_D + chunk * HEADS + head, tl.sum(of_skip))


@Kernel
@triton.jit
def rates(steps, parts, through, A, of_dt, of_A, tokens, heads, padded, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """The gradient of dt, and of A.

    The gradient of dt · A at token k sums all that decays by it: what tokens s < k write to the state after the chunk
    (part 0), pairs s < k ≤ t (part 1 at k - 1, part 2 at k), the state before as tokens t ≥ k read it (part 3), and the
    state that passes through. Nothing is subtracted, since a difference would be lost in rounding. Part 4 is the
    gradient of dt · x times x.
    """
    along = tl.cdiv(heads, HEADS)
    head = tl.program_id(0) % along * HEADS + tl.arange(0, HEADS)
    chunk = tl.program_id(0) // along
    head_mask = head < heads
    inside = tl.arange(0, LENGTH)
    plane = tl.cast(heads, tl.int64) * padded
    at = head.to(tl.int64)[:, None] * padded + chunk * LENGTH + inside[None, :]
    mask = head_mask[:, None] & (inside >= 0)[None, :]
    behind = head_mask[:, None] & (inside > 0)[None, :]
    start = tl.load(through + chunk * heads + head, mask=head_mask, other=0.0)
    written = tl.load(parts + at - 1, mask=behind, other=0.0)
    read = tl.load(parts + 3 * plane + at, mask=mask, other=0.0)
    pairs = tl.load(parts + plane + at - 1, mask=behind, other=0.0) + tl.load(
        parts + 2 * plane + at, mask=mask, other=0.0
    )
    rate = tl.cumsum(written, 1) + tl.cumsum(read, 1, reverse=True) + pairs + start[:, None]
    step = tl.load(steps + at, mask=mask, other=0.0)
    tl.store(of_A + chunk * heads + head, tl.sum(step * rate, 1), mask=head_mask)
    rate *= tl.load(A + head, mask=head_mask, other=0.0).to(tl.float32)[:, None]
    rate += tl.load(parts + 4 * plane + at, mask=mask, other=0.0)
    token = chunk * LENGTH + inside
    out = of_dt + token.to(tl.int64)[None, :] * heads + head[:, None]
    tl.store(out, rate, mask=head_mask[:, None] & (token < tokens)[None, :])


@Kernel
@triton.jit
def groups_gradient(  # noqa: PLR0915
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
    ahead,
    out,
    tokens,
    chunks,
    OF_B: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
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
    group, block = tl.program_id(0) % (HEADS // SHARE), tl.program_id(0) // (HEADS // SHARE)
    chunk = block * BLOCK // LENGTH
    n, p = tl.arange(0, N), tl.arange(0, P)
    padded = tl.cast(chunks, tl.int32) * LENGTH
    start = chunk * LENGTH
    row = block * BLOCK + tl.arange(0, BLOCK)
    before, last = _borders(sequence, start, tokens, LENGTH)
    own_sequence = tl.load(sequence + row, mask=row < tokens, other=-1)
    sums = tl.zeros((BLOCK, N), tl.float32)
    for head in range(group * SHARE, (group + 1) * SHARE):
        dt = _step(steps, head, row, padded)
        high, low = _passed(steps, head, row, padded, HEADS)
        if OF_B:
            end_high, end_low = _passed(steps, head, start + LENGTH - 1, padded, HEADS)
            rows = _tile(x, x_token, x_head, head, row, tokens, p, WIDTH)
            weight = _exp((end_high - high) + (end_low - low), own_sequence == last) * dt
            at, mask = _state_at(ahead, chunk, head, n, p, HEADS, STATE, WIDTH)
        else:
            rows = _tile(gradient, gradient_token, gradient_head, head, row, tokens, p, WIDTH)
            weight = _exp(high + low, own_sequence == before)
            at, mask = _state_at(states, chunk, head, n, p, HEADS, STATE, WIDTH)
        state = tl.load(at, mask=mask, other=0.0)
        weighted = (rows.to(tl.float32) * weight[:, None]).to(rows.dtype)
        sums = tl.dot(weighted, tl.trans(state), sums, input_precision="ieee")
    begin, end = start, (block + 1) * BLOCK
    if OF_B:
        begin, end = block * BLOCK, start + LENGTH
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        other = tl.load(sequence + column, mask=column < tokens, other=-1)
        ordered = row[:, None] >= column[None, :]
        if OF_B:
            ordered = row[:, None] <= column[None, :]
        visible = ordered & (own_sequence[:, None] == other[None, :])
        pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
        for head in range(group * SHARE, (group + 1) * SHARE):
            dt = _step(steps, head, row, padded)
            high, low = _passed(steps, head, row, padded, HEADS)
            dt_other = _step(steps, head, column, padded)
            high_other, low_other = _passed(steps, head, column, padded, HEADS)
            between = (high[:, None] - high_other[None, :]) + (low[:, None] - low_other[None, :])
            if OF_B:
                weight = _exp(-between, visible) * dt[:, None]
                rows = _tile(x, x_token, x_head, head, row, tokens, p, WIDTH)
                columns = _tile(gradient, gradient_token, gradient_head, head, column, tokens, p, WIDTH)
            else:
                weight = _exp(between, visible) * dt_other[None, :]
                rows = _tile(gradient, gradient_token, gradient_head, head, row, tokens, p, WIDTH)
                columns = _tile(x, x_token, x_head, head, column, tokens, p, WIDTH)
            pairs += tl.dot(rows, tl.trans(columns), input_precision="ieee") * weight
        if OF_B:
            met = _tile(C, C_token, C_group, group, column, tokens, n, STATE)
        else:
            met = _tile(B, B_token, B_group, group, column, tokens, n, STATE)
        sums = tl.dot(pairs.to(met.dtype), met, sums, input_precision="ieee")
    groups: tl.constexpr = HEADS // SHARE
    at = out + (row.to(tl.int64)[:, None] * groups + group) * STATE + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=(row < tokens)[:, None] & (n < STATE)[None, :])
