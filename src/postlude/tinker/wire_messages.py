"""The protobuf messages of the Tinker API (package `tinker_public`, proto3), built from a table.

There is no generated code: a message is a row of MESSAGES, `message_class` builds the class. The pool of descriptors is
our own, so that the client's messages of the same names can be in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
ENUMS = {
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
}
# name: "number type", after an optional "repeated", "optional" (with presence), "oneof" or "map" (by text).
MESSAGES: dict[str, dict[str, str]] = {
    "EncodedTextChunk": {"tokens": "1 bytes"},
    "ImageDimensions": {"width": "1 uint32", "height": "2 uint32"},
    "ImageChunk": {
        "data": "1 bytes",
        "format": "2 string",
        "expected_tokens": "optional 3 int32",
        "override_dimensions": "optional 4 ImageDimensions",
    },
    "DmelChunk": {"dmel": "1 bytes"},
    "Chunk": {"encoded_text": "oneof 1 EncodedTextChunk", "image": "oneof 2 ImageChunk", "dmel": "oneof 3 DmelChunk"},
    "SparseCsr": {"values": "1 bytes", "crow_indices": "2 bytes", "col_indices": "3 bytes"},
    "Tensor": {
        "dense": "oneof 1 bytes",
        "sparse_csr": "oneof 2 SparseCsr",
        "dtype": "3 DType",
        "shape": "repeated 4 int64",
    },
    "PromptProvenanceSpan": {"sequence_id": "1 string", "offset": "2 int64", "length": "3 int64"},
    "SampledProvenanceSpan": {"sequence_id": "1 string", "offset": "2 int64", "length": "3 int64"},
    "ProvenanceSpan": {
        "prompt_tokens": "oneof 1 PromptProvenanceSpan",
        "sampled_tokens": "oneof 2 SampledProvenanceSpan",
    },
    "Datum": {
        "model_input": "repeated 1 Chunk",
        "loss_fn_inputs": "map 2 Tensor",
        "model_input_spans": "repeated 3 ProvenanceSpan",
        "loss_fn_input_spans": "repeated 4 ProvenanceSpan",
    },
    "LossConfigValue": {"number": "oneof 1 double", "text": "oneof 2 string"},
    "ForwardBackwardRequest": {
        "model_id": "1 string",
        "seq_id": "2 int32",
        "data": "repeated 3 Datum",
        "loss_fn": "4 string",
        "loss_fn_config": "map 5 double",
        "forward_only": "6 bool",
        "loss_fn_config_v2": "map 7 LossConfigValue",
    },
    "BatchedTensor": {
        "data": "1 bytes",
        "offsets": "2 bytes",
        "dtype": "3 DType",
        "trailing_shape": "repeated 4 int64",
    },
    "ArrayRecord": {"type_tag": "1 string", "fields": "map 2 BatchedTensor", "num_datums": "3 int64"},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "1 string",
        "loss_fn_outputs": "repeated 2 ArrayRecord",
        "metrics": "map 3 double",
    },
    "TopkLogprobs": {"token_ids": "1 bytes", "logprobs": "2 bytes", "k": "3 uint32", "length": "4 uint32"},
    "SampledSequence": {
        "stop_reason": "1 StopReason",
        "tokens": "2 bytes",
        "logprobs": "optional 3 bytes",
        "topk_sampled_logprobs": "optional 4 TopkLogprobs",
    },
    "PromptAltTokens": {"tokens": "1 Tensor", "logprobs": "2 Tensor"},
    "SampleResponse": {
        "sequences": "repeated 1 SampledSequence",
        "prompt_logprobs": "optional 2 bytes",
        "topk_prompt_logprobs": "optional 3 TopkLogprobs",
        "prompt_cache_hit_tokens": "4 int32",
        "target_prompt_logprobs": "optional 5 Tensor",
        "prompt_alt_tokens": "optional 6 PromptAltTokens",
    },
}
_Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "double": _Field.TYPE_DOUBLE,
}


def _set_type(field: Any, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _add_field(message: Any, name: str, declaration: str) -> None:
    *labels, number, kind = declaration.split()
    label = labels[0] if labels else ""
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if label == "map":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, kind)
    if label == "repeated":
        field.label = _Field.LABEL_REPEATED
    elif label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0
    elif label == "optional" and kind in SCALARS:  # a message has presence anyway
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, declaration in fields.items():
            _add_field(message, field, declaration)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def message_class(name: str) -> Any:
    """Returns the class of a message of MESSAGES."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
