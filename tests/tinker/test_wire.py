"""Protobuf requests become arrays, invalid ones give clear errors, and results keep their shapes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from postlude.tinker.backend import ForwardBackwardResult
from postlude.tinker.wire import (
    BFLOAT16,
    FLOAT32,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    encode_pass,
    head_of_forward_backward,
    read_pass_request,
)

from .asgi_client import pass_body


def read(message: Any) -> Any:
    return read_pass_request(message, max_tokens=8, vocab_size=10)


def request_with(name: str = "weights", **tensor: Any) -> Any:
    message = ForwardBackwardRequest.FromString(pass_body("model", 1, 1.0))
    target = message.data[0].loss_fn_inputs[name]
    target.Clear()
    shape = tensor.pop("shape", [2])
    for field, value in tensor.items():
        if field == "sparse":
            for part, array in value.items():
                setattr(target.sparse_csr, part, array.tobytes())
        else:
            setattr(target, field, value)
    target.shape.extend(shape)
    return message


def test_dense_sparse_and_bfloat16_inputs_are_read() -> None:
    values = np.array([[0, 1.5], [2.5, 0]], "<f4")
    dense = read(request_with(dense=values.tobytes(), dtype=FLOAT32, shape=[2, 2])).data[0].loss_fn_inputs["weights"]
    parts = {"values": values[values != 0], "crow_indices": np.array([0, 1, 2]), "col_indices": np.array([1, 0])}
    sparse = read(request_with(sparse=parts, dtype=FLOAT32, shape=[2, 2])).data[0].loss_fn_inputs["weights"]
    halves = (np.array([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2")
    short = read(request_with(dense=halves.tobytes(), dtype=BFLOAT16)).data[0].loss_fn_inputs["weights"]
    np.testing.assert_array_equal(dense, values)
    np.testing.assert_array_equal(sparse, values)
    np.testing.assert_array_equal(short, [1.5, -2.0])
    assert dense.dtype == sparse.dtype == short.dtype == np.float32
    datum = read(request_with(dense=values.tobytes(), dtype=FLOAT32, shape=[2, 2])).data[0]
    assert datum.loss_fn_inputs["target_tokens"].dtype == np.int64
    assert datum.tokens.dtype == np.int32


def test_config_v2_takes_precedence() -> None:
    message = ForwardBackwardRequest.FromString(pass_body("model", 1, 1.0, loss_fn_config={"a": 1.0, "b": 2.0}))
    message.loss_fn_config_v2["a"].number = 3.0
    message.loss_fn_config_v2["c"].text = "word"
    assert read(message).config == {"a": 3.0, "b": 2.0, "c": "word"}


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ({"dense": b"abc", "dtype": FLOAT32}, "are not whole numbers"),
        ({"dense": b"abcd", "dtype": FLOAT32}, "do not fill its shape"),
        ({"dense": b"abcd", "dtype": 9}, "dtype number 9"),
        ({"dense": b"abcd", "dtype": FLOAT32, "shape": [1]}, "has 1 entries, but model_input has 2"),
        ({"dense": b"", "dtype": FLOAT32, "shape": [2, 2, 0]}, "give [N] or [N, K]"),
        (
            {"sparse": {"crow_indices": np.array([0, 5, 9])}, "dtype": FLOAT32, "shape": [2, 2]},
            "is not a sparse matrix",
        ),
        (
            {
                "sparse": {
                    "values": np.ones(1, "<f4"),
                    "crow_indices": np.array([0, 0, 1]),
                    "col_indices": np.array([1 << 40]),
                },
                "dtype": FLOAT32,
                "shape": [2, 1 << 41],
            },
            "is not a sparse matrix",
        ),
    ],
)
def test_invalid_tensor_gives_clear_error(tensor: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the sentence is compared
        read(request_with(**tensor))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("data[0]")


def test_invalid_tokens_give_clear_error() -> None:
    message = ForwardBackwardRequest.FromString(pass_body("model", 1, 1.0))
    for tokens, sentence in (
        ([1, 10], "has token 10,"),
        ([-1, 1], "has token -1,"),
        ([1] * 9, "9 tokens"),
        ([], "empty"),
    ):
        message.data[0].model_input[0].encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        with pytest.raises(ValueError, match=sentence):
            read(message)
    message.data[0].model_input[0].image.format = "png"
    with pytest.raises(ValueError, match="type image"):
        read(message)
    del message.data[:]
    with pytest.raises(ValueError, match="at least one datum"):
        read(message)


def test_results_keep_the_shapes_of_each_datum() -> None:
    arrays = [np.arange(3), np.arange(2), np.arange(6).reshape(3, 2), np.arange(4).reshape(2, 2), np.arange(1)]
    outputs = [{"logprobs": array.astype(np.float32)} for array in arrays]
    message = ForwardBackwardOutput.FromString(encode_pass(ForwardBackwardResult(outputs, {"loss:sum": 1.5})))
    assert dict(message.metrics) == {"loss:sum": 1.5}
    decoded = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        offsets, trailing = np.frombuffer(field.offsets, "<i8"), tuple(field.trailing_shape)
        assert len(offsets) == record.num_datums + 1
        for start, end in itertools.pairwise(offsets):
            decoded.append(np.frombuffer(field.data[start:end], "<f4").reshape(-1, *trailing))
    assert [values.shape for values in decoded] == [values.shape for values in arrays]
    for values, array in zip(decoded, arrays, strict=True):
        np.testing.assert_array_equal(values, array)


@pytest.mark.parametrize("seq_id", [1, 127, 128, 70_000, 2**31 - 1])
def test_request_header_has_model_id_and_seq_id(seq_id: int) -> None:
    body = pass_body("0123456789abcdef:train:0", seq_id, 1.0)
    assert head_of_forward_backward(body[:64]) == ("0123456789abcdef:train:0", seq_id)
    assert head_of_forward_backward(body[:5]) is None
    assert head_of_forward_backward(b"") is None
    assert head_of_forward_backward(b"something else") is None
