"""Published multi-token prediction: read, computed as its authors do, and written back bit-exact."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from postlude import LanguageModel, Recast, export_hf, export_model, load_model, pack, unpack
from postlude.cli import main
from postlude.hf.families import FAMILIES
from postlude.hf.load import check_weights
from postlude.hf.read_model import read_model, read_model_with_mtp, read_recast_plan
from postlude.model import OutputInputs
from tests.equality import assert_equal
from tests.hf.families import CONFIGS, saved_model
from tests.hf.published import FILE, publish, save

LENGTHS = (7, 3, 11)
MIXERS = {"nemotron_h": ("linear_attention", "full_attention", "moe")}
thorough = pytest.mark.thorough
CASES = [
    ("deepseek_v3", 2),
    pytest.param("deepseek_v3-whole-queries", 1, marks=thorough),
    ("glm4_moe", 1),
    pytest.param("glm4_moe-biases", 2, marks=thorough),
    ("qwen3_next", 1),
    pytest.param("qwen3_next-dense-first-biases-three-values", 1, marks=thorough),
    pytest.param("qwen3_next-one-head-no-experts", 1, marks=thorough),
    ("qwen3_5_text", 1),
    pytest.param("qwen3_5_moe_text", 1, marks=thorough),
    ("nemotron_h", 2),
    pytest.param("nemotron_h-latent", 1, marks=thorough),
]


def sequences(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]


def depth_logits(model: LanguageModel, batch: list[Tensor]) -> list[list[Tensor]]:
    """Returns logits by sequence and depth at positions with a token that far ahead, from packed sequences."""
    count = len(model.config.pattern.mtp)
    (microbatch,) = pack(batch, budget=64, depths=count)

    def logits(inputs: OutputInputs, context: None) -> list[Tensor]:
        return [depth.head.logits(depth.hidden) for depth in inputs.depths()]

    with torch.no_grad():
        by_depth = [
            unpack([microbatch], [logits_of_depth], shifted=False)
            for logits_of_depth in model(microbatch, output_processor=logits)
        ]
    return [
        [
            depth_logits_of_batch[index][: len(sequence) - depth]
            for depth, depth_logits_of_batch in enumerate(by_depth, start=1)
        ]
        for index, sequence in enumerate(batch)
    ]


@pytest.mark.parametrize(("name", "depths"), CASES)
def test_depths_equal_the_published_computation_and_round_trip_bit_exactly(
    name: str, depths: int, tmp_path: Path
) -> None:
    source = publish(name, tmp_path / "published", depths, mixers=MIXERS.get(name, ("full_attention", "moe")))
    model = load_model(source.directory, mtp=True)
    assert len(model.config.pattern.mtp) == depths
    batch = sequences(model.config.vocab_size)
    for sequence, sequence_logits in zip(batch, depth_logits(model, batch), strict=True):
        for actual, expected in zip(sequence_logits, source.logits(sequence), strict=True):
            assert_equal(actual, expected, "logits of a depth")

    exported = export_hf(model, tmp_path / "exported")
    before, after = load_file(source.directory / FILE), load_file(exported / FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((exported / "config.json").read_text())
    assert config == json.loads((source.directory / "config.json").read_text())


def test_without_mtp_the_depths_are_ignored_with_a_warning(tmp_path: Path) -> None:
    source = publish("deepseek_v3", tmp_path, depths=2)
    with pytest.warns(
        UserWarning, match=r"tensor\(s\) of the source, named model\.layers\.3\.…, model\.layers\.4\.… \(m"
    ):
        model = load_model(source.directory)
    assert model.config.pattern.mtp == read_model(source.directory)[1].pattern.mtp == ()
    assert len(read_model_with_mtp(source.directory)[1].pattern.mtp) == 2
    trunk = load_file(export_hf(model, tmp_path / "trunk") / FILE)
    assert trunk.keys() == load_file(source.directory / FILE).keys() - source.tensors.keys()


@pytest.mark.parametrize(
    ("name", "missing"), [("glm4_moe", "model.layers.3.eh_proj"), ("qwen3_next", "mtp.layers.0.mlp.gate")]
)
def test_an_incomplete_mtp_depth_is_refused(name: str, missing: str, tmp_path: Path) -> None:
    source = publish(name, tmp_path)
    tensors = load_file(source.directory / FILE)
    lacking = {name: tensor for name, tensor in tensors.items() if name != f"{missing}.weight"}
    save(source.directory, lacking)
    depths = Recast(source.directory, read_model_with_mtp(source.directory)[1].pattern)
    for read in (lambda: load_model(source.directory, mtp=True), lambda: check_weights(depths)):
        with pytest.raises(ValueError, match=rf"the source lacks 1 tensor\(s\) of .*/.*: {missing}\.weight"):
            read()
    save(source.directory, {**lacking, f"{missing}.weight": torch.zeros(3, 2)})
    for read in (lambda: load_model(source.directory, mtp=True), lambda: check_weights(depths)):
        with pytest.raises(ValueError, match=rf"{missing}\.weight is \(3, 2\) in the source, but the config needs \("):
            read()
    save(source.directory, {**tensors, f"{missing}.bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=rf"has no place for: {missing}\.bias"):
        load_model(source.directory, mtp=True)
    save(source.directory, tensors)
    assert check_weights(depths) == len(tensors)


def test_incomplete_depth_is_not_replaced_by_random_weights(tmp_path: Path) -> None:
    source = publish("qwen3_next", tmp_path)
    tensors = load_file(source.directory / FILE)
    save(source.directory, {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.layers")})
    with pytest.raises(ValueError, match=r"the source lacks .*: mtp\.layers\.0\.input_layernorm\.weight"):
        load_model(source.directory, mtp=True)
    save(source.directory, {**tensors, "mtp.layers.1.input_layernorm.weight": torch.zeros(48)})
    with pytest.raises(ValueError, match=r"has no place for: mtp\.layers\.1\.input_layernorm"):
        load_model(source.directory, mtp=True)


def test_embedding_and_head_copies_may_be_missing_and_warn_if_different(tmp_path: Path) -> None:
    source = publish("glm4_moe", tmp_path / "published")
    tensors = load_file(source.directory / FILE)
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    save(source.directory, {name: tensor for name, tensor in tensors.items() if name not in copies})  # as GLM-4.6 is
    exported = load_file(export_hf(load_model(source.directory, mtp=True), tmp_path / "exported") / FILE)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    save(source.directory, {**tensors, copies[1]: tensors[copies[1]] + 1.0})
    with pytest.warns(
        UserWarning, match=r"3\.shared_head\.head\.weight differs from the model's own head, which multi"
    ):
        model = load_model(source.directory, mtp=True)
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text", "nemotron_h"])
def test_new_depths_of_the_family_kind_use_its_names(name: str, tmp_path: Path) -> None:
    saved_model(CONFIGS[name](), tmp_path / "plain")
    plain, family = load_model(tmp_path / "plain", mtp=True), FAMILIES[CONFIGS[name]().model_type]
    assert not plain.config.pattern.mtp  # whatever the config says, the files hold none
    source = Recast(tmp_path / "plain", family.with_mtp(plain.config, 1).pattern)
    assert read_recast_plan(source).fresh_parts[0] == "mtp.0"
    model = load_model(source, seed=5)
    assert family.mtp is not None
    assert model.config.family == family.model_type
    exported = export_hf(model, tmp_path / "exported")
    assert json.loads((exported / "config.json").read_text())[family.mtp.config_key] == 1
    reloaded = load_model(exported, mtp=True)
    assert reloaded.config == model.config
    assert all(torch.equal(tensor, reloaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_depths_unknown_to_the_family_use_postlude_names(tmp_path: Path) -> None:
    source = publish("qwen3_next", tmp_path / "published")
    pattern = read_model_with_mtp(source.directory)[1].pattern
    recast = Recast(source.directory, f"{pattern}/[*E]")
    moved = read_recast_plan(recast)
    assert (moved.fresh_parts[0], moved.after.family) == ("mtp.1", None)
    assert moved.old_names["mtp.0.proj.weight"] == "mtp.0.proj.weight"
    model = load_model(recast)
    with pytest.raises(ValueError, match="no Hugging Face family describes this model"):
        export_hf(model, tmp_path / "refused")
    reloaded = load_model(export_model(model, tmp_path / "own"))
    assert torch.equal(reloaded.mtp[0].proj.weight, source.tensors["mtp.fc.weight"])
    trunk = read_recast_plan(Recast(source.directory, read_model(source.directory)[1].pattern))
    assert trunk.dropped_parts == ("mtp.0",)
    assert trunk.after.family == "qwen3_next"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_loads_the_export(name: str, tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    published = publish(name, tmp_path / "published", depths=2)
    exported = export_hf(load_model(published.directory, mtp=True), tmp_path / "exported")
    trunk = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    count = trunk.config.num_hidden_layers
    trunk._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{count}\.", rf"model\.layers\.{count + 1}\."]
    ahead = layers.MtpModel.from_pretrained(trunk)
    (tokens,) = sequences(trunk.config.vocab_size)[-1:]
    with torch.no_grad():
        hidden = trunk.model(tokens[None]).last_hidden_state
        for depth, expected in enumerate(published.logits(tokens), start=1):
            length, positions = len(tokens) - depth, torch.arange(depth, len(tokens))[None]
            hidden = ahead.layers[depth - 1](
                trunk.model.embed_tokens(tokens[None, depth:]),
                hidden[:, :length],
                position_embeddings=trunk.model.rotary_emb(hidden, position_ids=positions),
                attention_mask=torch.full((length, length), float("-inf")).triu(1)[None, None],
                position_ids=positions,
                past_key_values=None,
            )
            assert_equal(trunk.lm_head(hidden)[0], expected, "logits of a depth")


@pytest.mark.filterwarnings("ignore:.*multi-token prediction")
def test_commands_show_and_keep_mtp_depths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = publish("nemotron_h-latent", tmp_path / "published")
    assert main(["info", str(source.directory)]) == 0
    assert "mtp      ME*/*E, where mtp is on" in capsys.readouterr().out
    for options, names in (["--mtp"], set(source.tensors)), ([], set()):
        target = tmp_path / f"converted{len(options)}"
        assert main(["convert", str(source.directory), str(target), *options]) == 0
        assert {name for name in load_file(target / FILE) if name.startswith("mtp.")} == names
    (source.directory / FILE).unlink()
    assert main(["info", str(source.directory)]) == 0  # the config is enough
    assert "mtp " not in capsys.readouterr().out
