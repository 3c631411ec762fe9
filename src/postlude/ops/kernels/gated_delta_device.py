"""Device code of the gated delta rule: what `ops/gated_delta._Scan` computes, on packed tokens, with the same names.

Products take operands in the inputs' dtype (bf16) and sum in fp32. States are fp32 and rounded where a chunk reads
them. Log decays are summed in float64, so that differences of large sums stay exact. Keys and queries enter products as
they are; their lengths scale the result, which costs no rounding.

`decay_sums` are G, the sums of log decays. `key_decay` is e^{G_C − G} over the key's length, `query_decay` is e^G times
the scale over the query's length. A chunk's tokens are `rows`; `feature` is of keys, `column` of values. `head_at` is
the index of a head of the chunk's first token among all tokens' heads, `key_at` that of its key head.

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
def _load_tile(base, rows, columns, stride, count, width):
    """Loads [rows, columns] of a matrix of count × width; zero outside."""
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_transposed(base, rows, columns, stride, count, width):
    """Loads the same transposed, [columns, rows]."""
    inside = (rows[None, :] < count) & (columns[:, None] < width)
    return tl.load(base + rows[None, :] * stride + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _store_tile(base, rows, columns, stride, count, width, values):
    inside = (rows[:, None] < count) & (columns[None, :] < width)
    pointers = base + rows[:, None] * stride + columns[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_length(vectors, NORMALISE: tl.constexpr):
    """Returns 1 / length of each row [C, d], or 1."""
    vectors_fp32 = vectors.to(tl.float32)
    squares = tl.sum(vectors_fp32 * vectors_fp32, 1)
    return tl.rsqrt(squares + _NORM_EPS) if NORMALISE else tl.full(squares.shape, 1.0, tl.float32)


@triton.jit
def _gradient_before_norm(gradient, vectors, inverse_length):
    """Returns the gradient of vectors [C, d] from that of the vectors of length one."""
    unit = vectors.to(tl.float32) * inverse_length[:, None]
    projection = tl.sum(unit * gradient, 1)
    return inverse_length[:, None] * (gradient - unit * projection[:, None])


@triton.jit
def _product(left, right):
    """Returns the product in fp32. fp32 operands are not rounded, which lets tests see more than rounding."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _pair_decay(decay_sums, rows, count):
    """Returns D [C, C], zero above the diagonal and in padding."""
    mask = (rows[:, None] >= rows[None, :]) & (rows[:, None] < count)
    log_decay = tl.where(mask, decay_sums[:, None] - decay_sums[None, :], 0.0).to(tl.float32)
    return tl.where(mask, tl.exp(log_decay), 0.0)


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
        inverse = _merge_blocks(inverse, lower, rows, size)
    if CHUNK >= 64:
        inverse = _merge_blocks(inverse, lower, rows, size * 2)
    return inverse


@triton.jit
def _merge_blocks(inverse, lower, rows, size: tl.constexpr):
    """Returns the inverses of blocks twice as large from those of diagonal blocks of `size`."""
    block = rows // size
    below = (block[:, None] % 2 == 1) & (block[None, :] + 1 == block[:, None])
    product = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision="tf32x3")
    return inverse - tl.dot(product, inverse, input_precision="tf32x3")


@Kernel
@triton.jit
def solve_kernel(
    key, value, log_decay, beta, starts, stops, decay_sums, key_decay, state_reader, delta, inverse,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: G, w and u, the inverse if it is kept, and the decay of a write to the chunk's end."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    mask = rows < count
    head_at = start * HEADS + head
    rows_at = head_at + rows * HEADS

    log_decays = tl.load(log_decay + rows_at, mask=mask, other=0.0).to(tl.float64)
    sums = tl.cumsum(log_decays, 0)
    tl.store(decay_sums + rows_at, sums, mask=mask)
    beta_rows = tl.load(beta + rows_at, mask=mask, other=0.0).to(tl.float32)
    key_at = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    key_tile = _load_tile(key + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
    inverse_length = _inverse_length(key_tile, NORMALISE)
    decay_to_end = tl.exp((tl.sum(log_decays, 0) - sums).to(tl.float32))
    tl.store(key_decay + rows_at, decay_to_end * inverse_length, mask=mask)

    similarity = (
        _product(key_tile, tl.trans(key_tile))
        * inverse_length[:, None]
        * inverse_length[None, :]
        * _pair_decay(sums, rows, count)
    )
    lower = tl.where(rows[:, None] > rows[None, :], beta_rows[:, None] * similarity, 0.0)
    solved = _inverse_of_one_plus(lower, rows, CHUNK)
    if inverse is not None:
        _store_tile(inverse + head_at * CHUNK, rows, rows, HEADS * CHUNK, count, CHUNK, solved)
    decay_from_start = tl.exp(sums.to(tl.float32))
    reader_rows = _product(
        (solved * (beta_rows * decay_from_start * inverse_length)[None, :]).to(key_tile.dtype), key_tile
    )
    _store_tile(state_reader + head_at * KEY, rows, feature, HEADS * KEY, count, KEY, reader_rows)
    weights = (solved * beta_rows[None, :]).to(key_tile.dtype)
    for start_value in range(0, VALUE, VALUES):
        column = start_value + tl.arange(0, VALUES)
        value_tile = _load_tile(value + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
        _store_tile(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, _product(weights, value_tile))


@Kernel
@triton.jit
def states_kernel(
    key, decay_sums, key_decay, state_reader, delta, states, last_states, cu_seqlens, first_chunks, order,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A slice of one head's values along one sequence: the state at every chunk's start. Turns u into δ."""
    slices: tl.constexpr = (VALUE + VALUES - 1) // VALUES
    head = tl.program_id(0) // slices % HEADS
    sequence = tl.load(order + tl.program_id(0) // (slices * HEADS)).to(tl.int64)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1)
    chunks = (end - begin + CHUNK - 1) // CHUNK
    first_chunk = tl.load(first_chunks + sequence).to(tl.int64)
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(0) % slices * VALUES + tl.arange(0, VALUES)
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for index in range(chunks):
        start = begin + index * CHUNK
        count = tl.minimum(end - start, CHUNK)
        head_at = start * HEADS + head
        key_at = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
        _store_tile(
            states + ((first_chunk + index) * HEADS + head) * (KEY * VALUE), feature, column, VALUE, KEY, VALUE, state
        )
        delta_tile = _load_tile(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE).to(tl.float32)
        reader_tile = _load_tile(state_reader + head_at * KEY, rows, feature, HEADS * KEY, count, KEY)
        delta_tile -= _product(reader_tile, state.to(reader_tile.dtype))
        _store_tile(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, delta_tile)
        key_decay_rows = tl.load(key_decay + head_at + rows * HEADS, mask=rows < count, other=0.0)
        chunk_decay = tl.exp(tl.load(decay_sums + head_at + (count - 1) * HEADS).to(tl.float32))
        key_transposed = _load_transposed(key + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
        state = state * chunk_decay + _product(
            key_transposed, (delta_tile * key_decay_rows[:, None]).to(key_transposed.dtype)
        )
    if last_states is not None:
        _store_tile(last_states + (sequence * HEADS + head) * (KEY * VALUE), feature, column, VALUE, KEY, VALUE, state)


@Kernel
@triton.jit
def outputs_kernel(
    query, key, decay_sums, delta, states, output, starts, stops, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    head_at = start * HEADS + head
    key_at = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    query_tile = _load_tile(query + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
    key_tile = _load_tile(key + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
    sums = tl.load(decay_sums + head_at + rows * HEADS, mask=rows < count, other=0.0)
    query_scale = _inverse_length(query_tile, NORMALISE) * scale
    scores = (
        _product(query_tile, tl.trans(key_tile)) * query_scale[:, None] * _inverse_length(key_tile, NORMALISE)[None, :]
    )
    scores *= _pair_decay(sums, rows, count)
    state = _load_tile(states + (chunk.to(tl.int64) * HEADS + head) * (KEY * VALUE), feature, column, VALUE, KEY, VALUE)
    outputs = _product(query_tile, state) * (query_scale * tl.exp(sums.to(tl.float32)))[:, None]
    delta_tile = _load_tile(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
    outputs += _product(scores.to(delta_tile.dtype), delta_tile)
    _store_tile(output + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, outputs)


@Kernel
@triton.jit
def delta_gradient_kernel(
    query, key, decay_sums, grad_output, delta_grads, query_decay, starts, stops, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the gradient of δ through the chunk's outputs, Pᵀ o, and how queries read the state."""
    chunk, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    start = tl.load(starts + chunk).to(tl.int64)
    count = tl.load(stops + chunk) - start
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    head_at = start * HEADS + head
    key_at = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
    query_tile = _load_tile(query + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
    key_tile = _load_tile(key + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
    sums = tl.load(decay_sums + head_at + rows * HEADS, mask=rows < count, other=0.0)
    query_scale = _inverse_length(query_tile, NORMALISE) * scale
    tl.store(query_decay + head_at + rows * HEADS, query_scale * tl.exp(sums.to(tl.float32)), mask=rows < count)
    mask = (rows[:, None] <= rows[None, :]) & (rows[None, :] < count)
    log_decay = tl.where(mask, sums[None, :] - sums[:, None], 0.0).to(tl.float32)
    scores = (
        _product(key_tile, tl.trans(query_tile)) * _inverse_length(key_tile, NORMALISE)[:, None] * query_scale[None, :]
    )
    scores = tl.where(mask, scores * tl.exp(log_decay), 0.0).to(key_tile.dtype)
    for start_value in range(0, VALUE, VALUES):
        column = start_value + tl.arange(0, VALUES)
        grad_tile = _load_tile(grad_output + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
        _store_tile(
            delta_grads + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, _product(scores, grad_tile)
        )


@Kernel
@triton.jit
def state_gradient_kernel(
    query, key, decay_sums, key_decay, query_decay, state_reader, grad_output, delta_grads, state_grads,
    last_state_grads, cu_seqlens, first_chunks, order,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A slice of one head's values, backwards along a sequence: the gradient of each chunk's last state, and of δ."""
    slices: tl.constexpr = (VALUE + VALUES - 1) // VALUES
    head = tl.program_id(0) // slices % HEADS
    sequence = tl.load(order + tl.program_id(0) // (slices * HEADS)).to(tl.int64)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1)
    chunks = (end - begin + CHUNK - 1) // CHUNK
    first_chunk = tl.load(first_chunks + sequence).to(tl.int64)
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(0) % slices * VALUES + tl.arange(0, VALUES)
    state_grad = tl.zeros((KEYS, VALUES), tl.float32)
    if last_state_grads is not None:
        state_grad += _load_tile(
            last_state_grads + (sequence * HEADS + head) * (KEY * VALUE), feature, column, VALUE, KEY, VALUE
        )
    for step in range(chunks):
        index = chunks - 1 - step
        start = begin + index * CHUNK
        count = tl.minimum(end - start, CHUNK)
        head_at = start * HEADS + head
        key_at = start * KEY_HEADS + head // (HEADS // KEY_HEADS)
        _store_tile(
            state_grads + ((first_chunk + index) * HEADS + head) * (KEY * VALUE),
            feature,
            column,
            VALUE,
            KEY,
            VALUE,
            state_grad,
        )
        key_tile = _load_tile(key + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
        key_decay_rows = tl.load(key_decay + head_at + rows * HEADS, mask=rows < count, other=0.0)
        delta_grad_tile = _load_tile(delta_grads + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE).to(
            tl.float32
        )
        delta_grad_tile += _product(key_tile, state_grad.to(key_tile.dtype)) * key_decay_rows[:, None]
        _store_tile(delta_grads + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, delta_grad_tile)
        query_decay_rows = tl.load(query_decay + head_at + rows * HEADS, mask=rows < count, other=0.0)
        grad_tile = _load_tile(grad_output + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE).to(tl.float32)
        query_transposed = _load_transposed(query + key_at * KEY, rows, feature, KEY_HEADS * KEY, count, KEY)
        reader_transposed = _load_transposed(state_reader + head_at * KEY, rows, feature, HEADS * KEY, count, KEY)
        chunk_decay = tl.exp(tl.load(decay_sums + head_at + (count - 1) * HEADS).to(tl.float32))
        state_grad = state_grad * chunk_decay + _product(
            query_transposed, (grad_tile * query_decay_rows[:, None]).to(query_transposed.dtype)
        )
        state_grad -= _product(reader_transposed, delta_grad_tile.to(reader_transposed.dtype))


@Kernel
@triton.jit
def input_gradient_kernel(  # noqa: PLR0915 - its numbers stay in registers
    query,
    key,
    value,
    beta,
    decay_sums,
    inverse,
    delta,
    states,
    grad_output,
    delta_grads,
    state_grads,
    grad_query,
    grad_key,
    grad_value,
    grad_log_decay,
    grad_beta,
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
    rows, feature = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    mask = rows < count
    key_start = (start * KEY_HEADS + key_head) * KEY
    query_tile = _load_tile(query + key_start, rows, feature, KEY_HEADS * KEY, count, KEY)
    key_tile = _load_tile(key + key_start, rows, feature, KEY_HEADS * KEY, count, KEY)
    query_inverse_length = _inverse_length(query_tile, NORMALISE)
    key_inverse_length = _inverse_length(key_tile, NORMALISE)
    query_gradient = tl.zeros((CHUNK, KEYS), tl.float32)  # of the query of length one, as of the key's
    key_gradient = tl.zeros((CHUNK, KEYS), tl.float32)

    for head in range(key_head * group, (key_head + 1) * group):
        head_at = start * HEADS + head
        rows_at = head_at + rows * HEADS
        state_start = (chunk.to(tl.int64) * HEADS + head) * (KEY * VALUE)
        sums = tl.load(decay_sums + rows_at, mask=mask, other=0.0)
        total_decay = tl.load(decay_sums + head_at + (count - 1) * HEADS)
        decay_from_start, decay_to_end = tl.exp(sums.to(tl.float32)), tl.exp((total_decay - sums).to(tl.float32))
        beta_rows = tl.load(beta + rows_at, mask=mask, other=0.0).to(tl.float32)
        inverse_transposed = _load_transposed(inverse + head_at * CHUNK, rows, rows, HEADS * CHUNK, count, CHUNK)

        query_key_grads = tl.zeros((CHUNK, CHUNK), tl.float32)  # of P
        key_key_grads = tl.zeros((CHUNK, CHUNK), tl.float32)  # of A
        solved_value = tl.zeros((CHUNK,), tl.float32)  # solved · v
        query_state = tl.zeros((CHUNK,), tl.float32)  # q · (S o)
        key_state = tl.zeros((CHUNK,), tl.float32)  # k · (S solved)
        key_state_grad = tl.zeros((CHUNK,), tl.float32)  # k · (state_grad δ)
        state_products = tl.zeros((KEYS,), tl.float32)
        for start_value in range(0, VALUE, VALUES):
            column = start_value + tl.arange(0, VALUES)
            grad_tile = _load_tile(grad_output + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
            delta_tile = _load_tile(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
            delta_transposed = _load_transposed(delta + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
            delta_grad_tile = _load_tile(delta_grads + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
            solved = _product(inverse_transposed, delta_grad_tile)
            _store_tile(
                grad_value + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE, solved * beta_rows[:, None]
            )
            value_tile = _load_tile(value + head_at * VALUE, rows, column, HEADS * VALUE, count, VALUE)
            solved_value += tl.sum(solved * value_tile.to(tl.float32), 1)
            solved_operand = solved.to(key_tile.dtype)
            query_key_grads += _product(grad_tile, delta_transposed)
            key_key_grads -= _product(solved_operand, delta_transposed)
            state = _load_transposed(states + state_start, feature, column, VALUE, KEY, VALUE)
            state_grad = _load_transposed(state_grads + state_start, feature, column, VALUE, KEY, VALUE)
            state_products += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), 0)
            part = _product(grad_tile, state)
            query_state += tl.sum(part * query_tile.to(tl.float32), 1)
            query_gradient += part * (decay_from_start * scale)[:, None]
            part = _product(solved_operand, state)
            key_state += tl.sum(part * key_tile.to(tl.float32), 1)
            key_gradient -= part * (decay_from_start * beta_rows)[:, None]
            part = _product(delta_tile, state_grad)
            key_state_grad += tl.sum(part * key_tile.to(tl.float32), 1)
            key_gradient += part * decay_to_end[:, None]

        pair_decay = _pair_decay(sums, rows, count)
        query_key_grads *= pair_decay
        key_key_grads = tl.where(rows[:, None] > rows[None, :], key_key_grads * pair_decay, 0.0)
        key_transposed = tl.trans(key_tile)
        scores = (
            _product(query_tile, key_transposed) * (query_inverse_length * scale)[:, None] * key_inverse_length[None, :]
        )
        similarity = _product(key_tile, key_transposed) * key_inverse_length[:, None] * key_inverse_length[None, :]
        grad_beta_rows = (
            solved_value - decay_from_start * key_inverse_length * key_state + tl.sum(key_key_grads * similarity, 1)
        )
        tl.store(grad_beta + rows_at, grad_beta_rows.to(grad_beta.dtype.element_ty), mask=mask)

        # A token's g is part of D_ij where j is before it and i is not; of e^G from it on, of e^{G_C − G} before it.
        pair_terms = query_key_grads * scores + key_key_grads * similarity * beta_rows[:, None]
        pair_terms_before = tl.cumsum(pair_terms, 1) - pair_terms
        reads = decay_from_start * (
            query_inverse_length * scale * query_state - beta_rows * key_inverse_length * key_state
        )
        leaves = decay_to_end * key_inverse_length * key_state_grad
        decay_terms = tl.where(rows[:, None] >= rows[None, :], reads[:, None] + pair_terms_before, leaves[:, None])
        grad_log_decay_rows = tl.sum(decay_terms, 0) + tl.exp(total_decay.to(tl.float32)) * tl.sum(state_products, 0)
        tl.store(grad_log_decay + rows_at, grad_log_decay_rows.to(grad_log_decay.dtype.element_ty), mask=mask)

        query_gradient += _product(
            (query_key_grads * (key_inverse_length * scale)[None, :]).to(key_tile.dtype), key_tile
        )
        key_key_beta_grads = key_key_grads * beta_rows[:, None]
        key_key_beta_grads = (key_key_beta_grads + tl.trans(key_key_beta_grads)) * key_inverse_length[None, :]
        key_gradient += _product(key_key_beta_grads.to(key_tile.dtype), key_tile)
        query_key_transposed = tl.trans(query_key_grads) * (query_inverse_length * scale)[None, :]
        key_gradient += _product(query_key_transposed.to(key_tile.dtype), query_tile)

    if NORMALISE:
        query_gradient = _gradient_before_norm(query_gradient, query_tile, query_inverse_length)
        key_gradient = _gradient_before_norm(key_gradient, key_tile, key_inverse_length)
    _store_tile(grad_query + key_start, rows, feature, KEY_HEADS * KEY, count, KEY, query_gradient)
    _store_tile(grad_key + key_start, rows, feature, KEY_HEADS * KEY, count, KEY, key_gradient)
