"""Parameters that stay in fp32 are stored, gathered and used in fp32, with fp32 gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude import LanguageModel, Layout, OutputInputs
from postlude.data import shard_context
from postlude.engine.fsdp import shard_stage
from postlude.engine.unsharded import ParameterSharding
from postlude.model.blocks import MoEConfig
from postlude.model.parallel import PerHeadVectors, local, local_shard, region
from tests.engine.training import bitwise_equal, build
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import small_config, small_microbatch

WIDE = MoEConfig(experts=5, top_k=2, intermediate_size=12, router_fp32=True, selection_bias=True)
CONFIG = small_config("[*E]", blocks={"E": WIDE})
PROMISED = {"layers.0.moe.router.weight", "value_head.weight"}
RECURRENT = small_config("[M-]G")


@contextmanager
def run_last_microbatch(sharding: ParameterSharding) -> Iterator[None]:
    """Runs as an engine does around the only microbatch of a step."""
    sharding.begin_pass(train=True)
    sharding.before_last_backward()
    yield
    sharding.finish_grads()
    sharding.end_pass()


def randomise_value_head(model: LanguageModel) -> None:
    """Sets a non-zero value head, the same in every layout."""
    assert model.value_head is not None
    weight = model.value_head.weight
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    local_shard(weight).copy_(drawn[region(weight)])


def dtypes_in_forward(group: Any, layout: str, recompute: Any) -> dict[str, Any]:
    """Returns the dtypes of inputs, weights, outputs and gradients of router and value head in a bf16 model."""
    place = mesh(Layout.parse(layout))
    with torch.device("meta"):
        model = LanguageModel(CONFIG, mesh=place, value_head=True, recompute=recompute)
    sharding = shard_stage(model, place, torch.bfloat16)
    model.to_empty(device="cpu")
    model.reset()
    randomise_value_head(model)
    recorded: dict[str, Any] = {}
    for name in PROMISED:
        module = model.get_submodule(name.removesuffix(".weight"))

        def before(module: Any, arguments: Any, name: str = name) -> None:
            recorded.setdefault(
                name, {"hidden": arguments[0].detach(), "weight": local(module.weight).detach().clone()}
            )

        def after(module: Any, arguments: Any, output: Tensor, name: str = name) -> None:
            if "output" not in recorded[name]:  # the first time, not when it is computed again
                recorded[name]["output"] = output.detach()
                output.register_hook(lambda gradient: recorded[name].update(upstream=gradient))

        module.register_forward_pre_hook(before)  # after FSDP's, which gathers
        module.register_forward_hook(after)

    def values(inputs: OutputInputs, context: Any) -> Tensor:
        recorded["hidden dtype"] = inputs.hidden.dtype
        return inputs.head.values(inputs.hidden).square().sum()

    microbatch = shard_context(small_microbatch(5, 1, 8, 2), place.cp, place.tp)
    with run_last_microbatch(sharding):
        model(microbatch, output_processor=values).backward()
    for name in PROMISED:
        parameter = model.get_parameter(name)
        gradient = torch.zeros(parameter.shape)
        assert parameter.grad is not None
        gradient[region(parameter)] = local_shard(parameter.grad)
        recorded[name] |= {
            "stored": local_shard(parameter).dtype,
            "gradient": gradient,
            "kept": local_shard(parameter.grad).dtype,
        }
    return recorded


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("", "none"),
        ("dp_shard=2", "none"),
        pytest.param("tp=2", "selective", marks=pytest.mark.slow),
        pytest.param("dp_shard=2", "full", marks=pytest.mark.slow),
    ],
)
def test_router_and_value_head_are_fp32_in_a_bf16_model(ranks: Any, layout: str, recompute: str) -> None:
    full_model = LanguageModel(CONFIG, value_head=True)
    randomise_value_head(full_model)
    everyone = ranks(Layout.parse(layout).world_size, dtypes_in_forward, layout, recompute)
    for name in PROMISED:
        expected = full_model.get_parameter(name).detach()
        learned = torch.zeros_like(expected)
        for rank_record in everyone:
            assert rank_record["hidden dtype"] == torch.bfloat16  # the rest is not
            record = rank_record[name]
            assert (
                record["stored"] == record["weight"].dtype == record["output"].dtype == record["kept"] == torch.float32
            )
            assert torch.equal(record["weight"], expected)  # not rounded on the way
            hidden = record["hidden"].float()
            assert_equal(
                record["output"], F.linear(hidden, expected) if expected.ndim == 2 else hidden @ expected, name
            )
            learned += (record["upstream"].view(len(hidden), -1).T @ hidden).view(expected.shape)
        gradient = (
            everyone[0][name]["gradient"] if layout.startswith("tp") else sum(f[name]["gradient"] for f in everyone)
        )
        assert_equal(gradient, learned, f"gradient of {name}")


def streamed(group: Any, layout: str) -> dict[str, Tensor]:
    """Returns all weights of a bf16 engine: as streamed, and in a generator's copy."""
    engine = build(layout, CONFIG, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for stage in engine.stage_models.values():
            for block in stage.blocks:
                for buffer in block.buffers():
                    buffer.fill_(1.0 + 2.0**-20)  # as a selection bias is after a while
    actual = {name: tensor.clone() for name, tensor in engine.stream_weights(bucket_bytes=500)}
    copy = LanguageModel(CONFIG, dtype=torch.bfloat16)
    engine.copy_weights(copy)
    assert bitwise_equal({name: copy.state_dict()[name] for name in actual}, actual)
    return actual


@pytest.mark.parametrize("layout", ["", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_fp32_parameters_are_streamed_and_copied_in_fp32(ranks: Any, layout: str) -> None:
    full_state = LanguageModel(CONFIG).state_dict()
    for actual in ranks(Layout.parse(layout).world_size, streamed, layout):
        wide = {name for name, tensor in actual.items() if tensor.dtype == torch.float32}
        assert wide == {"layers.0.moe.router.weight", "layers.0.moe.selection_bias"}
        assert torch.equal(actual["layers.0.moe.router.weight"], full_state["layers.0.moe.router.weight"])
        assert (actual["layers.0.moe.selection_bias"] == 1.0 + 2.0**-20).all()
        assert all(torch.equal(actual[name], full_state[name].bfloat16()) for name in actual.keys() - wide)


def test_a_bf16_model_keeps_its_fp32_parameters() -> None:
    model = LanguageModel(CONFIG, value_head=True, dtype=torch.bfloat16)
    wide = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert wide == {*PROMISED, "layers.0.moe.selection_bias"}
    plain = LanguageModel(replace(CONFIG, blocks={**CONFIG.blocks, "E": replace(WIDE, router_fp32=False)}))
    assert all(tensor.dtype == torch.float32 for tensor in plain.state_dict().values())
    assert torch.get_default_dtype() == torch.float32


# --- vectors of one number a head


def vectors_seen(group: Any, layout: str, recompute: Any) -> dict[str, Any]:
    """Returns each vector as used by a bf16 model, and its gradient."""
    place = mesh(Layout.parse(layout))
    with torch.device("meta"):
        model = LanguageModel(RECURRENT, mesh=place, recompute=recompute)
    sharding = shard_stage(model, place, torch.bfloat16)
    model.to_empty(device="cpu")
    model.reset()
    recorded: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, PerHeadVectors):

            def after(module: Any, arguments: Any, output: dict[str, Tensor], name: str = name) -> None:
                for vector_name, vector in output.items():
                    if f"{name}.{vector_name}" not in recorded:  # the first time, not when it is computed again
                        record = recorded[f"{name}.{vector_name}"] = {"used": vector.detach().clone()}
                        vector.register_hook(lambda gradient, record=record: record.update(upstream=gradient))

            module.register_forward_hook(after)
    microbatch = shard_context(small_microbatch(5, 1, 8, 2), place.cp, place.tp)
    with run_last_microbatch(sharding):
        model(microbatch, targets=True).sum().backward()
    for name, record in recorded.items():
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        record |= {
            "stored": local_shard(parameter),
            "gradient": local_shard(parameter.grad),
            "region": region(parameter),
        }
    return recorded


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("", "selective"),
        ("dp_shard=2", "none"),
        pytest.param("tp=2", "selective", marks=pytest.mark.thorough),
        pytest.param("dp_shard=2", "full", marks=pytest.mark.thorough),
    ],
)
def test_per_head_vectors_are_fp32_in_a_bf16_model(ranks: Any, layout: str, recompute: str) -> None:
    parameters = {name: parameter.detach() for name, parameter in LanguageModel(RECURRENT).named_parameters()}
    everyone = ranks(Layout.parse(layout).world_size, vectors_seen, layout, recompute)
    assert {name for name in parameters if "vectors" in name} == everyone[0].keys()
    for name, expected in parameters.items():
        records = [rank_record[name] for rank_record in everyone if name in rank_record]
        for record in records:
            assert record["stored"].dtype == record["used"].dtype == record["gradient"].dtype == torch.float32
            assert torch.equal(record["stored"], expected[record["region"]])
            used = expected[record["region"]] if layout == "tp=2" else expected
            assert torch.equal(record["used"], used)  # not rounded on the way
            learned = (
                record["upstream"] if layout == "tp=2" else sum(other_record["upstream"] for other_record in records)
            )
            assert torch.count_nonzero(learned)
            assert_equal(record["gradient"], learned if layout == "tp=2" else learned[record["region"]], name)


def test_per_head_vectors_of_a_model_created_in_bf16_are_not_rounded() -> None:
    full_state, model = (
        LanguageModel(RECURRENT).state_dict(),
        LanguageModel(RECURRENT, dtype=torch.bfloat16).state_dict(),
    )
    wide = {name for name, tensor in model.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in full_state if "vectors" in name}
    assert all(torch.equal(model[name], full_state[name]) for name in wide)
