"""Device code of the gated delta rule: what `ops/gated_delta._Scan` does, on packed tokens. See there for the names.

Products take operands in the inputs' dtype (bf16) and sum in fp32. States are fp32 and rounded where a chunk reads
them. Log decays are summed in float64, so that differences of large sums stay exact. Keys and queries enter products as
they are; their lengths scale the result, which costs no rounding.

Constants: the numbers of heads, the widths KEY and VALUE of keys and values, the tokens of a CHUNK, and the columns of
a tile of keys (KEYS, all of them) and of values (VALUES, a slice).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from postlude.ops.kernels.launch import Kernel

_BLOCK = tl.constexpr(16)  # solved row by row
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _tile(base, rows, columns, stride, count, width):
    """Loads [rows, columns] of a matrix of count × width; zero outside."""
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _turned(base, rows, columns, stride, count, width):
    """Loads the same transposed, [columns, rows]."""
    inside = (rows[None, :] < count) & (columns[:, None] < width)
    return tl.load(base + rows[None, :] * stride + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _store_tile(base, rows, columns, stride, count, width, values):
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    pointers = base + rows[:, None] * stride + columns[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _over(vectors, NORMALISE: tl.constexpr):
    """Returns 1 / length of each row [C, d], or 1."""
    wide = vectors.to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    return tl.rsqrt(squares + _NORM_EPS) if NORMALISE else tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _through_unit(gradient, vectors, over):
    """Returns the gradient of vectors [C, d] from that of the vectors of length one."""
    unit = vectors.to(tl.float32) * over[:, None]
    along = tl.sum(unit * gradient, 1)
    return over[:, None] * (gradient - unit * along[:, None])


@triton.jit
def _product(left, right):
    """Returns the product in fp32. fp32 operands are not rounded, which lets tests see more than rounding."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _between(total, rows, count):
    """Returns D [C, C], zero above the diagonal and in padding."""
    mask = (rows[:, None] >= rows[None, :]) & (rows[:, None] < count)
    apart = tl.where(mask, total[:, None] - total[None, :], 0.0).to(tl.float32)
    return tl.where(mask, tl.exp(apart), 0.0)


@triton.jit
def _inverse_of_one_plus(lower, rows, CHUNK: tl.constexpr):
    """Returns (1 + A)⁻¹ of a strictly lower triangle [C, C] in fp32: diagonal blocks row by row, then doubled in size.

    Powers of A would be fewer steps, but cancel: similar keys make them as large as binomials.
    """
    count: tl.constexpr = CHUNK // _BLOCK
    block = tl.arange(0, count)
    row = tl.arange(0, _BLOCK)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.sum(tl.where(is_diagonal, tl.reshape(lower, (count, _BLOCK, count, _BLOCK)), 0.0), 2)
    solved = tl.zeros((count, _BLOCK, _BLOCK), tl.float32) + tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None]
    for index in range(1, _BLOCK):
        is_row = row[None, :, None] == index
        factors = tl.sum(tl.where(is_row, parts, 0.0), 1)
        correction = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(is_row, solved - correction[:, None, :], solved)
    inverse = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    size: tl.constexpr = _BLOCK
    if CHUNK >= 32:
        inverse = _joined(inverse, lower, rows, size)
    if CHUNK >= 64:
        inverse = _joined(inverse, lower, rows, size * 2)
    return inverse


@triton.jit
def _joined(inverse, lower, rows, size: tl.constexpr):
    """Returns the inverses of blocks twice as large from those of diagonal blocks of `size`."""
    block = rows // size
    below = (block[:, None] % 2 == 1) & (block[None, :] + 1 == block[:, None])
    through = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision="tf32x3")
    return inverse - tl.dot(through, inverse, input_precision="tf32x3")


@Kernel
@triton.jit
def solve_kernel(
    key, value, log_decay, beta, starts, stops, total, leaving, reading, written, inverse,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: G, w and u, the inverse if it is kept, and the decay of a write to the chunk's end."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, across = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    inside = rows < count
    first = start * HEADS + head
    at = first + rows * HEADS

    decays = tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float64)
    sums = tl.cumsum(decays, 0)
    tl.store(total + at, sums, mask=inside)
    step = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
    key_head = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    keys = _tile(key + key_head * KEY, rows, across, KEY_HEADS * KEY, count, KEY)
    over = _over(keys, NORMALISE)
    until = tl.exp((tl.sum(decays, 0) - sums).to(tl.float32))
    tl.store(leaving + at, until * over, mask=inside)

    similarity = _product(keys, tl.trans(keys)) * over[:, None] * over[None, :] * _between(sums, rows, count)
    lower = tl.where(rows[:, None] > rows[None, :], step[:, None] * similarity, 0.0)
    solved = _inverse_of_one_plus(lower, rows, CHUNK)
    if inverse is not None:
        _store_tile(inverse + first * CHUNK, rows, rows, HEADS * CHUNK, count, CHUNK, solved)
    since = tl.exp(sums.to(tl.float32))
    reading_rows = _product((solved * (step * since * over)[None, :]).to(keys.dtype), keys)
    _store_tile(reading + first * KEY, rows, across, HEADS * KEY, count, KEY, reading_rows)
    weights = (solved * step[None, :]).to(keys.dtype)
    for begin in range(0, VALUE, VALUES):
        columns = begin + tl.arange(0, VALUES)
        values = _tile(value + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
        _store_tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, _product(weights, values))


@Kernel
@triton.jit
def states_kernel(
    key, total, leaving, reading, written, states, last, cu_seqlens, firsts, order,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A slice of one head's values along one sequence: the state at every chunk's start. Turns u into δ."""
    slices: tl.constexpr = (VALUE + VALUES - 1) // VALUES
    head = tl.program_id(0) // slices % HEADS
    sequence = tl.load(order + tl.program_id(0) // (slices * HEADS)).to(tl.int64)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1)
    chunks = (end - begin + CHUNK - 1) // CHUNK
    before = tl.load(firsts + sequence).to(tl.int64)
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    columns = tl.program_id(0) % slices * VALUES + tl.arange(0, VALUES)
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for index in range(chunks):
        start = begin + index * CHUNK
        count = tl.minimum(end - start, CHUNK)
        first = start * HEADS + head
        key_head = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
        _store_tile(states + ((before + index) * HEADS + head) * (KEY * VALUE), keys, columns, VALUE, KEY, VALUE, state)
        writes = _tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE).to(tl.float32)
        weights = _tile(reading + first * KEY, rows, keys, HEADS * KEY, count, KEY)
        writes -= _product(weights, state.to(weights.dtype))
        _store_tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, writes)
        leaving_rows = tl.load(leaving + first + rows * HEADS, mask=rows < count, other=0.0)
        across = tl.exp(tl.load(total + first + (count - 1) * HEADS).to(tl.float32))
        turned = _turned(key + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
        state = state * across + _product(turned, (writes * leaving_rows[:, None]).to(turned.dtype))
    if last is not None:
        _store_tile(last + (sequence * HEADS + head) * (KEY * VALUE), keys, columns, VALUE, KEY, VALUE, state)


@Kernel
@triton.jit
def outputs_kernel(
    query, key, total, written, states, output, starts, stops, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """A slice of one chunk's outputs of one head."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    columns = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    first = start * HEADS + head
    key_head = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    queries = _tile(query + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
    known = _tile(key + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
    sums = tl.load(total + first + rows * HEADS, mask=rows < count, other=0.0)
    over = _over(queries, NORMALISE) * scale
    scores = _product(queries, tl.trans(known)) * over[:, None] * _over(known, NORMALISE)[None, :]
    scores *= _between(sums, rows, count)
    state = _tile(states + (chunk.to(tl.int64) * HEADS + head) * (KEY * VALUE), keys, columns, VALUE, KEY, VALUE)
    outputs = _product(queries, state) * (over * tl.exp(sums.to(tl.float32)))[:, None]
    wrote = _tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
    outputs += _product(scores.to(wrote.dtype), wrote)
    _store_tile(output + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, outputs)


@Kernel
@triton.jit
def seen_back_kernel(
    query, key, total, output, written, entering, starts, stops, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the gradient of δ through the chunk's outputs, Pᵀ o, and how queries read the state."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    first = start * HEADS + head
    key_head = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    queries = _tile(query + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
    known = _tile(key + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
    sums = tl.load(total + first + rows * HEADS, mask=rows < count, other=0.0)
    over = _over(queries, NORMALISE) * scale
    tl.store(entering + first + rows * HEADS, over * tl.exp(sums.to(tl.float32)), mask=rows < count)
    mask = (rows[:, None] <= rows[None, :]) & (rows[None, :] < count)
    apart = tl.where(mask, sums[None, :] - sums[:, None], 0.0).to(tl.float32)
    scores = _product(known, tl.trans(queries)) * _over(known, NORMALISE)[:, None] * over[None, :]
    scores = tl.where(mask, scores * tl.exp(apart), 0.0).to(known.dtype)
    for begin in range(0, VALUE, VALUES):
        columns = begin + tl.arange(0, VALUES)
        grad_output = _tile(output + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
        _store_tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, _product(scores, grad_output))


@Kernel
@triton.jit
def states_back_kernel(
    query, key, total, leaving, entering, reading, output, written, ahead, last, cu_seqlens, firsts, order,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A slice of one head's values, backwards along a sequence: the gradient of each chunk's last state, and of δ."""
    slices: tl.constexpr = (VALUE + VALUES - 1) // VALUES
    head = tl.program_id(0) // slices % HEADS
    sequence = tl.load(order + tl.program_id(0) // (slices * HEADS)).to(tl.int64)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1)
    chunks = (end - begin + CHUNK - 1) // CHUNK
    before = tl.load(firsts + sequence).to(tl.int64)
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    columns = tl.program_id(0) % slices * VALUES + tl.arange(0, VALUES)
    state = tl.zeros((KEYS, VALUES), tl.float32)
    if last is not None:
        state += _tile(last + (sequence * HEADS + head) * (KEY * VALUE), keys, columns, VALUE, KEY, VALUE)
    for done in range(chunks):
        index = chunks - 1 - done
        start = begin + index * CHUNK
        count = tl.minimum(end - start, CHUNK)
        first = start * HEADS + head
        key_head = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
        _store_tile(ahead + ((before + index) * HEADS + head) * (KEY * VALUE), keys, columns, VALUE, KEY, VALUE, state)
        known = _tile(key + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
        leaving_rows = tl.load(leaving + first + rows * HEADS, mask=rows < count, other=0.0)
        writes = _tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE).to(tl.float32)
        writes += _product(known, state.to(known.dtype)) * leaving_rows[:, None]
        _store_tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, writes)
        entered = tl.load(entering + first + rows * HEADS, mask=rows < count, other=0.0)
        grad_output = _tile(output + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE).to(tl.float32)
        queries = _turned(query + key_head * KEY, rows, keys, KEY_HEADS * KEY, count, KEY)
        weights = _turned(reading + first * KEY, rows, keys, HEADS * KEY, count, KEY)
        across = tl.exp(tl.load(total + first + (count - 1) * HEADS).to(tl.float32))
        state = state * across + _product(queries, (grad_output * entered[:, None]).to(queries.dtype))
        state -= _product(weights, writes.to(weights.dtype))


@Kernel
@triton.jit
def gradients_kernel(  # noqa: PLR0915 - its numbers stay in registers
    query,
    key,
    value,
    beta,
    total,
    inverse,
    written,
    states,
    output,
    of_written,
    ahead,
    of_query,
    of_key,
    of_value,
    of_decay,
    of_beta,
    starts,
    stops,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One chunk of one key head and all its heads: the gradients of the inputs."""
    group: tl.constexpr = HEADS // KEY_HEADS
    chunk, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, keys = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    inside = rows < count
    key_start = (start * KEY_HEADS + key_head) * KEY
    queries = _tile(query + key_start, rows, keys, KEY_HEADS * KEY, count, KEY)
    known = _tile(key + key_start, rows, keys, KEY_HEADS * KEY, count, KEY)
    query_over, key_over = _over(queries, NORMALISE), _over(known, NORMALISE)
    query_gradient = tl.zeros((CHUNK, KEYS), tl.float32)  # of the query of length one, as of the key's
    key_gradient = tl.zeros((CHUNK, KEYS), tl.float32)

    for head in range(key_head * group, (key_head + 1) * group):
        first = start * HEADS + head
        at = first + rows * HEADS
        matrix = (chunk.to(tl.int64) * HEADS + head) * (KEY * VALUE)
        sums = tl.load(total + at, mask=inside, other=0.0)
        total_decay = tl.load(total + first + (count - 1) * HEADS)
        since, until = tl.exp(sums.to(tl.float32)), tl.exp((total_decay - sums).to(tl.float32))
        step = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
        solve = _turned(inverse + first * CHUNK, rows, rows, HEADS * CHUNK, count, CHUNK)

        pairs_seen = tl.zeros((CHUNK, CHUNK), tl.float32)  # of P
        pairs_alike = tl.zeros((CHUNK, CHUNK), tl.float32)  # of A
        by_value = tl.zeros((CHUNK,), tl.float32)  # solved · v
        by_query = tl.zeros((CHUNK,), tl.float32)  # q · (S o)
        by_key = tl.zeros((CHUNK,), tl.float32)  # k · (S solved)
        by_left = tl.zeros((CHUNK,), tl.float32)  # k · (what is ahead of it δ)
        by_state = tl.zeros((KEYS,), tl.float32)
        for begin in range(0, VALUE, VALUES):
            columns = begin + tl.arange(0, VALUES)
            grad_output = _tile(output + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
            wrote = _tile(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
            wrote_turned = _turned(written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
            of_wrote = _tile(of_written + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
            solved = _product(solve, of_wrote)
            _store_tile(of_value + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE, solved * step[:, None])
            values = _tile(value + first * VALUE, rows, columns, HEADS * VALUE, count, VALUE)
            by_value += tl.sum(solved * values.to(tl.float32), 1)
            solved_here = solved.to(known.dtype)
            pairs_seen += _product(grad_output, wrote_turned)
            pairs_alike -= _product(solved_here, wrote_turned)
            state = _turned(states + matrix, keys, columns, VALUE, KEY, VALUE)
            after = _turned(ahead + matrix, keys, columns, VALUE, KEY, VALUE)
            by_state += tl.sum(state.to(tl.float32) * after.to(tl.float32), 0)
            part = _product(grad_output, state)
            by_query += tl.sum(part * queries.to(tl.float32), 1)
            query_gradient += part * (since * scale)[:, None]
            part = _product(solved_here, state)
            by_key += tl.sum(part * known.to(tl.float32), 1)
            key_gradient -= part * (since * step)[:, None]
            part = _product(wrote, after)
            by_left += tl.sum(part * known.to(tl.float32), 1)
            key_gradient += part * until[:, None]

        between = _between(sums, rows, count)
        pairs_seen *= between
        pairs_alike = tl.where(rows[:, None] > rows[None, :], pairs_alike * between, 0.0)
        known_turned = tl.trans(known)
        scores = _product(queries, known_turned) * (query_over * scale)[:, None] * key_over[None, :]
        similarity = _product(known, known_turned) * key_over[:, None] * key_over[None, :]
        of_step = by_value - since * key_over * by_key + tl.sum(pairs_alike * similarity, 1)
        tl.store(of_beta + at, of_step.to(of_beta.dtype.element_ty), mask=inside)

        # A token's g is part of D_ij where j is before it and i is not; of e^G from it on, of e^{G_C − G} before it.
        pairs = pairs_seen * scores + pairs_alike * similarity * step[:, None]
        before = tl.cumsum(pairs, 1) - pairs
        reads = since * (query_over * scale * by_query - step * key_over * by_key)
        leaves = until * key_over * by_left
        decays = tl.where(rows[:, None] >= rows[None, :], reads[:, None] + before, leaves[:, None])
        of_sum = tl.sum(decays, 0) + tl.exp(total_decay.to(tl.float32)) * tl.sum(by_state, 0)
        tl.store(of_decay + at, of_sum.to(of_decay.dtype.element_ty), mask=inside)

        query_gradient += _product((pairs_seen * (key_over * scale)[None, :]).to(known.dtype), known)
        pairs_step = pairs_alike * step[:, None]
        pairs_step = (pairs_step + tl.trans(pairs_step)) * key_over[None, :]
        key_gradient += _product(pairs_step.to(known.dtype), known)
        turned = tl.trans(pairs_seen) * (query_over * scale)[None, :]
        key_gradient += _product(turned.to(known.dtype), queries)

    if NORMALISE:
        query_gradient = _through_unit(query_gradient, queries, query_over)
        key_gradient = _through_unit(key_gradient, known, key_over)
    _store_tile(of_query + key_start, rows, keys, KEY_HEADS * KEY, count, KEY, query_gradient)
    _store_tile(of_key + key_start, rows, keys, KEY_HEADS * KEY, count, KEY, key_gradient)
