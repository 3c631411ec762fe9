"""Converts between protobuf bytes and the backend's types. Arrays are little-endian raw bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from postlude.serving.http.errors import HTTPError
from postlude.tinker.backend import Datum, ForwardBackwardResult, LossInput, PassRequest, SampleResult, TopK
from postlude.tinker.limits import check_tokens, dense_from_csr
from postlude.tinker.wire_messages import message_class

ForwardBackwardRequest = message_class("ForwardBackwardRequest")
ForwardBackwardOutput = message_class("ForwardBackwardOutput")
SampleResponse = message_class("SampleResponse")
DTYPES: dict[int, Any] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4"), 4: np.dtype("<u2")}
FLOAT32, BFLOAT16 = 1, 4
OUTPUT_TYPE = "ArrayRecord"


def decompress(body: bytes, limit: int) -> bytes:
    """Returns a zstd body decompressed; refuses one that becomes larger than `limit`."""
    try:
        import zstandard
    except ImportError:
        raise HTTPError(415, "this server cannot read zstd: install postlude[tinker] there, or send plain.") from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            plain: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise HTTPError(400, f"the request is not zstd, which its Content-Encoding says: {error}.") from error
    if len(plain) > limit:
        raise HTTPError(413, f"the request has more than {limit} bytes without compression, which is the limit.")
    return plain


def decompress_head(body: bytes, length: int) -> bytes:
    """Returns the first bytes of a zstd body that has been found to be too large."""
    import zstandard

    with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
        head: bytes = reader.read(length)
    return head


def parse_forward_backward(body: bytes) -> Any:
    """Returns the message of a request, whose arrays are not read yet."""
    message = ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HTTPError(400, "the request is not a protobuf ForwardBackwardRequest.") from error
    return message


def head_of_forward_backward(start: bytes) -> tuple[str, int] | None:
    """Returns model_id and seq_id from the first bytes of a request that is too large to be read, if they are there."""
    try:
        length = start[1]
        if start[0] != 0x0A or length > 127 or start[2 + length] != 0x10:
            return None
        number, shift = 0, 0
        for byte in start[3 + length : 8 + length]:
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return start[2 : 2 + length].decode(), number
    except (IndexError, UnicodeDecodeError):
        pass
    return None


def read_pass_request(message: Any, max_tokens: int, vocab_size: int) -> PassRequest:
    """Reads the arrays of a request. Raises a ValueError with a sentence about what is wrong."""
    if not message.data:
        raise ValueError("forward_backward got no data: give at least one datum.")
    data = []
    for index, datum in enumerate(message.data):
        location = f"data[{index}]"
        tokens = _read_tokens(datum.model_input, location, max_tokens, vocab_size)
        inputs = {name: _read_loss_input(tensor, name, location) for name, tensor in datum.loss_fn_inputs.items()}
        for name, values in inputs.items():
            if values.ndim and len(values) != len(tokens):
                raise ValueError(
                    f"{location}: {name} has {len(values)} entries, but model_input has {len(tokens)} tokens; each "
                    "token has one entry."
                )
        data.append(Datum(tokens, inputs))
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassRequest(data, message.loss_fn, config, message.forward_only)


def _read_tokens(chunks: Any, location: str, max_tokens: int, vocab_size: int) -> NDArray[np.int32]:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("value")
        if kind != "encoded_text":
            raise ValueError(f"{location}: model_input has a chunk of type {kind}, but only encoded_text is supported.")
        if len(chunk.encoded_text.tokens) % 4:
            raise ValueError(f"{location}: the tokens of a chunk are not whole int32 numbers.")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, "<i4")
    return check_tokens(tokens, f"{location}: model_input", max_tokens, vocab_size)


def _read_loss_input(tensor: Any, name: str, location: str) -> LossInput:
    location = f"{location}: {name}"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{location} has the dtype number {tensor.dtype}, which is not known; send float32 or int64.")
    sparse = tensor.WhichOneof("value") == "sparse_csr"
    raw = tensor.sparse_csr.values if sparse else tensor.dense
    if len(raw) % dtype.itemsize:
        raise ValueError(f"{location} has {len(raw)} bytes, which are not whole numbers of {dtype}.")
    values: Any = np.frombuffer(raw, dtype)
    if tensor.dtype == BFLOAT16:
        values = (values.astype("<u4") << 16).view("<f4")
    shape = tuple(tensor.shape) or (len(values),)
    if min(shape) < 0 or len(shape) > 2:
        raise ValueError(f"{location} has the shape {list(shape)}; give [N] or [N, K].")
    if sparse:
        values = dense_from_csr(
            values,
            _indices(tensor.sparse_csr.crow_indices, location),
            _indices(tensor.sparse_csr.col_indices, location),
            shape,
            location,
        )
    elif math.prod(shape) != len(values):
        raise ValueError(f"{location} has {len(values)} values, which do not fill its shape {list(shape)}.")
    floating = tensor.dtype in (FLOAT32, BFLOAT16)
    dense: LossInput = values.reshape(shape).astype(np.float32 if floating else np.int64, copy=False)
    return dense


def _indices(raw: bytes, location: str) -> NDArray[np.int64]:
    if len(raw) % 8:
        raise ValueError(f"{location}: the indices of a sparse tensor are not whole int64 numbers.")
    return np.frombuffer(raw, "<i8")


def encode_pass(result: ForwardBackwardResult) -> bytes:
    message = ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in result.metrics.items():
        message.metrics[name] = value
    start = 0
    outputs = result.loss_fn_outputs
    while start < len(outputs):  # one record per run of datums with equal trailing shapes
        shapes = {name: values.shape[1:] for name, values in outputs[start].items()}
        end = start
        while (
            end < len(outputs)
            and {name: output_values.shape[1:] for name, output_values in outputs[end].items()} == shapes
        ):
            end += 1
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=end - start)
        for name, trailing in shapes.items():
            arrays = [np.ascontiguousarray(output[name], "<f4") for output in outputs[start:end]]
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
            field.dtype = FLOAT32
            field.trailing_shape.extend(trailing)
        start = end
    encoded: bytes = message.SerializeToString()
    return encoded


def encode_sample(result: SampleResult) -> bytes:
    message = SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for completion in result.completions:
        message.sequences.add(
            stop_reason=("stop", "length").index(completion.finish_reason),
            tokens=np.asarray(completion.tokens, "<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs, "<f4").tobytes(),
        )
    for entry, topk in zip(message.sequences, result.topk_samples, strict=False):
        _set_topk(entry.topk_sampled_logprobs, topk)
    scores = result.prompt
    if scores.logprobs is not None:
        message.prompt_logprobs = np.asarray(scores.logprobs, "<f4").tobytes()
    if scores.top is not None:
        _set_topk(message.topk_prompt_logprobs, scores.top)
    if scores.targets is not None:
        target = message.target_prompt_logprobs
        target.dense = np.asarray(scores.targets, "<f4").tobytes()
        target.dtype = FLOAT32
        target.shape.extend(scores.targets.shape)
    encoded: bytes = message.SerializeToString()
    return encoded


def _set_topk(message: Any, topk: TopK) -> None:
    message.token_ids = np.asarray(topk.tokens, "<i4").tobytes()
    message.logprobs = np.asarray(topk.logprobs, "<f4").tobytes()
    message.length, message.k = topk.tokens.shape
