"""Weights streamed from any layout have transformers' names and order, bit-exactly; so do exports."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from postlude import Engine, Layout, export_hf, ranks
from postlude.engine.streaming import InterruptibleStream, plan_buckets, plan_tensors
from postlude.hf.export import hf_tensors
from postlude.hf.load import check_weights, load_model, load_tokenizer
from postlude.hf.read_model import model_from_hf
from postlude.verify.choices import GRID
from tests.engine.training import batch, bitwise_equal, build, config, error_text, policy, train, weights
from tests.equality import assert_equal

TIED, MOE = config("tiny-dense"), config("tiny-moe", num_experts=4)
ODD = Qwen3Config(  # bf16 tensors of an odd number of elements, uneven blocks
    vocab_size=259,
    hidden_size=21,
    intermediate_size=15,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=2,
)
ODD_MOE = config("tiny-moe", num_experts=5)


def label(layout: Layout) -> str:
    return str(layout)[7:-1].replace(" ", "")


def unstacked(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Returns a transformers state dict with the names in files."""
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, matrix in enumerate(tensor):
                yield f"{stem}.{expert}.gate_proj.weight", matrix[: len(matrix) // 2]
                yield f"{stem}.{expert}.up_proj.weight", matrix[len(matrix) // 2 :]
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            yield from ((f"{stem}.{expert}.down_proj.weight", matrix) for expert, matrix in enumerate(tensor))
        else:
            yield name, tensor


def transformers_tensors(hf: PretrainedConfig, directory: Path) -> dict[str, Tensor]:
    """Returns transformers' state dict of the loaded model, without a head that is tied to the embedding."""
    export_hf(load_model(hf), directory)
    state = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict())
    if hf.tie_word_embeddings:
        del state["lm_head.weight"]
    with safe_open(directory / "model.safetensors", "pt") as file:
        actual = dict(unstacked(state))
        assert set(actual) == set(file.keys())
    return actual


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("transformers")
    return {name: transformers_tensors(hf, directory / name) for name, hf in SOURCES.items()}


SOURCES = {"tied": TIED, "moe": MOE, "odd": ODD, "odd moe": ODD_MOE}


def streams(group: Any, hf: PretrainedConfig, layout: str) -> list[dict[str, Tensor]]:
    engine = build(layout, hf)
    return [
        {name: tensor.clone() for name, tensor in engine.stream_weights(**options)}
        for options in ({}, {"bucket_bytes": 10_000}, {"bucket_bytes": 10_000, "dtype": torch.bfloat16})
    ]


QUICK = [("tp=2", "tied"), ("pp=2", "tied"), ("pp=2,vpp=2", "moe"), ("dp_shard=2,ep=2", "moe"), ("dp_shard=2", "odd")]
ODD_CASES = [("dp_shard=4", "odd moe"), ("tp=2,cp=2", "odd moe"), ("tp=2,dp_shard=2", "odd"), ("pp=2,cp=2", "odd")]


def cases() -> list[Any]:
    """Every layout, with a model that is difficult for it."""
    thorough = [*ODD_CASES, *((label(layout), "moe") for layout in GRID)]
    return [*QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in thorough if case not in QUICK)]


@pytest.mark.parametrize(("layout", "model"), cases())
@pytest.mark.slow
def test_streamed_weights_are_bit_identical_to_transformers(
    ranks: Any, expected: dict[str, dict[str, Tensor]], layout: str, model: str
) -> None:
    expected_tensors = expected[model]
    in_half = {name: tensor.to(torch.bfloat16) for name, tensor in expected_tensors.items()}
    for full_stream, bucketed, half in ranks(Layout.parse(layout).world_size, streams, SOURCES[model], layout):
        assert bitwise_equal(full_stream, expected_tensors)
        assert bitwise_equal(bucketed, expected_tensors)
        assert bitwise_equal(half, in_half)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1, 1000, 10_000, 1 << 30])
def test_a_bucket_has_at_most_bucket_bytes_or_one_tensor(name: str, dtype: torch.dtype, limit: int) -> None:
    family, model = model_from_hf(SOURCES[name])
    pieces = plan_tensors(model, family)
    buckets = plan_buckets(pieces, dtype, limit)
    assert [piece for bucket in buckets for piece in bucket] == pieces
    for bucket in buckets:
        assert sum(piece.size for piece in bucket) * dtype.itemsize <= limit or len(bucket) == 1
    for bucket, following in itertools.pairwise(buckets):  # and never smaller than need be
        assert sum(piece.size for piece in (*bucket, following[0])) * dtype.itemsize > limit


def gradients_before_and_after(group: Any) -> tuple[dict[str, Tensor], bool]:
    engine = build("pp=2", MOE)
    before = {name: tensor.clone() for name, tensor in engine.gradients()}
    engine.forward_backward(batch(1), policy)
    after = {name: tensor.clone() for name, tensor in engine.gradients()}
    engine.zero_grad()
    return before, all(bool(tensor.any()) for tensor in after.values()) and list(before) == list(after)


def test_gradients_are_zero_before_the_first_backward(ranks: Any) -> None:
    for before, learning in ranks(2, gradients_before_and_after):
        assert learning
        assert not any(tensor.any() for tensor in before.values())


def stop_early(group: Any, taken_count: int) -> int:
    """Returns the number of tensors that a rank gets of a stream that rank 0 stops early."""
    engine = build("tp=2", TIED)
    pieces = plan_tensors(engine.config, engine.family)
    buckets = plan_buckets(pieces, torch.float32, 300_000)
    assert len(buckets) > 3
    stream = InterruptibleStream(buckets, engine, torch.float32)
    count = len(list(itertools.islice(stream, taken_count if dist.get_rank() == 0 else None)))
    stream.end()
    dist.barrier()  # nobody is left in the stream
    return count


@pytest.mark.parametrize("taken_count", [0, 5, 1000])
def test_stream_stopped_on_rank_0_ends_on_all_ranks(ranks: Any, taken_count: int) -> None:
    count = len(plan_tensors(model_from_hf(TIED)[1], model_from_hf(TIED)[0]))
    first, second = ranks(2, stop_early, taken_count)
    assert first == min(taken_count, count)
    assert first <= second < count if taken_count < 1000 else second == count


def export_to_unwritable_path(group: Any, directory: str) -> tuple[str, str]:
    engine = build("dp_shard=2", TIED)
    refused = error_text(lambda: engine.export_hf(directory))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("os.pwrite", disk_full)
        return refused, error_text(lambda: engine.export_hf(directory, overwrite=True))


def disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_export_that_rank_0_cannot_write_fails_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    export_hf(load_model(TIED), tmp_path / "model")
    for refused, failed in ranks(2, export_to_unwritable_path, str(tmp_path / "model")):
        assert refused.startswith(f"FileExistsError: {tmp_path / 'model'} holds a model already (config.json);")
        assert failed.startswith("OSError: ")
        assert failed.endswith("model.safetensors could not be written: No space left on device (os error 28).")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def save_as_a_model(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], bool]:
    engine = build(layout, MOE, critic=True)
    train(engine, [1])
    engine.save(directory, tokenizer=load_tokenizer("tiny-moe"))
    return weights(engine), bitwise_equal(weights(build(layout, directory)), weights(engine))


@pytest.mark.slow
def test_checkpoint_can_be_saved_as_a_model_with_config_and_tokenizer(ranks: Any, tmp_path: Path) -> None:
    directory = tmp_path / "step-000001"
    (expected, reloaded_logprobs), *_ = ranks(2, save_as_a_model, "dp_shard=2,ep=2", str(directory))
    assert reloaded_logprobs
    model = load_model(directory)
    family, expected = model_from_hf(MOE)[0], dict(sorted(expected.items()))
    assert bitwise_equal(dict(sorted(hf_tensors(model, family))), expected)
    assert load_tokenizer(directory).decode([72, 105]) == "Hi"
    assert check_weights(directory) == len(expected)
    export_hf(model, tmp_path / "model")  # whose files others read
    assert bitwise_equal(dict(sorted(hf_tensors(load_model(tmp_path / "model"), family))), expected)


def export(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    engine = build(layout, MOE)
    train(engine, [1, 2])
    engine.export_hf(directory)
    scores = engine.logprobs(batch(3)).logprob
    second_engine = build(layout, directory)
    assert bitwise_equal(weights(second_engine), weights(engine))
    assert torch.equal(torch.cat(second_engine.logprobs(batch(3)).logprob), torch.cat(scores))
    return weights(engine), scores


@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", pytest.param("pp=2,tp=2,ep=2", marks=pytest.mark.thorough)])
@pytest.mark.slow
def test_an_export_gives_the_engines_logprobs_in_transformers_and_reloads(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    outputs = ranks(Layout.parse(layout).world_size, export, layout, str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    assert model.config.dtype == torch.float32
    for tensors, scores in outputs:
        assert bitwise_equal(dict(unstacked(dict(model.state_dict()))), tensors)
        for sequence, score in zip(batch(3).sequences, scores, strict=True):
            tokens = torch.as_tensor(sequence)
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            assert_equal(score[1:], logprobs, "log-probs")


def export_untied(group: Any, layout: str, directory: str) -> None:
    engine = build(layout, TIED)
    train(engine, [1])
    engine.export_hf(f"{directory}/tied")
    engine.export_hf(f"{directory}/untied", untied=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "pp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.thorough)])
def test_tied_head_can_be_exported_as_a_separate_tensor(ranks: Any, tmp_path: Path, layout: str) -> None:
    ranks(Layout.parse(layout).world_size, export_untied, layout, str(tmp_path))
    tied, untied = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("tied", "untied"))
    assert (tied.config.tie_word_embeddings, untied.config.tie_word_embeddings) == (True, False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(tied(tokens).logits, untied(tokens).logits)


def test_export_without_a_tokenizer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ranks():
        engine = Engine("tiny-dense", budget=16)
        directory = engine.export_hf(tmp_path / "export")
        assert caplog.messages == [
            f"{directory} has no tokenizer: give the export one, tokenizer=load_tokenizer(MODEL)."
        ]
        engine.export_hf(directory, tokenizer=load_tokenizer("tiny-dense"), overwrite=True)
        engine.export_hf(directory, overwrite=True)  # the tokenizer stays
    assert len(caplog.messages) == 1
