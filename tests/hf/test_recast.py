"""One model under several patterns: kept tensors are bit-exact, new ones are listed, and round trips restore files."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from postlude import LanguageModel, ModelConfig, Pattern, Recast, export_hf, export_model, load_model, load_tokenizer
from postlude.hf.load import check_weights
from postlude.hf.postlude_format import PostludeConfig
from postlude.hf.read_model import read_generation_config, read_model, read_recast_plan
from postlude.model.blocks import (
    BLOCKS,
    BlockConfig,
    GatedDeltaConfig,
    MambaConfig,
    MLPConfig,
    MoEConfig,
    SlidingAttentionConfig,
)
from postlude.model.config_json import config_from_json, config_to_json
from postlude.model.pattern import TERMINAL
from tests.hf.families import CONFIGS
from tests.model.small import VOCABULARY, small_config, small_microbatch

LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    initializer_range=0.3,
    dtype="float32",
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=2,
)
MOE = MoEConfig(experts=5, top_k=2, intermediate_size=12, selection_bias=True)
MAMBA = MambaConfig(heads=4, head_dim=3, state_size=6, groups=2)
DELTA = GatedDeltaConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=5)
WINDOW = SlidingAttentionConfig(heads=4, kv_heads=2, head_dim=4, sliding_window=3)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return export_hf(load_model(LLAMA, seed=4), tmp_path / "llama")


def by_block_position(model: LanguageModel) -> dict[str, Tensor]:
    """Returns a model's tensors; those of the trunk by their block's position: layers.3.q_proj.weight."""
    names = {}
    for name, tensor in model.state_dict().items():
        room, *name_parts = name.split(".")
        if room == "layers":
            pattern, index = model.config.pattern, int(name_parts[0])
            first_block = sum(map(len, pattern.layers[:index]))
            name_parts = [str(first_block + pattern.layer(index).names.index(name_parts[1])), *name_parts[2:]]
        names[".".join((room, *name_parts))] = tensor
    return names


def bitwise_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("pattern", "names_stay"),
    [("[*-]{2}", True), ("[*-]|[*-]", True), ("*-*-", False), ("[*-]*-", False), ("*-[*-]", False), ("*|-*-", False)],
)
def test_regrouped_pattern_has_the_same_tensors_at_the_same_positions(
    llama: Path, pattern: str, names_stay: bool
) -> None:
    transformer, regrouped = load_model(llama), load_model(Recast(llama, pattern))
    assert regrouped.config.pattern == Pattern.parse(pattern)
    assert bitwise_equal(by_block_position(regrouped), by_block_position(transformer))
    microbatch = small_microbatch()
    assert torch.equal(regrouped(microbatch), transformer(microbatch))
    moved = read_recast_plan(Recast(llama, pattern))
    assert (moved.new_tensors, moved.dropped) == ((), ())
    assert all(new_name == before for new_name, before in moved.old_names.items()) == names_stay


@pytest.mark.parametrize("pattern", ["*-*-", "[*-]*-", "[S-][*E]/[*-]"])
def test_a_model_in_postludes_format_round_trips_bit_exactly(llama: Path, tmp_path: Path, pattern: str) -> None:
    blocks = {symbol: config for symbol, config in {"S": WINDOW, "E": MOE}.items() if symbol in pattern}
    model = load_model(Recast(llama, pattern, blocks), dtype=torch.bfloat16)
    directory = export_model(model, tmp_path / "own", max_shard_bytes=4000)
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert not (directory / "config.json").exists()
    reloaded = load_model(directory)
    assert reloaded.config == model.config
    assert {parameter.dtype for parameter in reloaded.parameters()} == {torch.bfloat16}
    assert bitwise_equal(reloaded.state_dict(), model.state_dict())
    assert check_weights(directory) == len(model.state_dict())
    assert read_generation_config(directory) == {"eos_token_id": 2}


def test_ungrouping_and_regrouping_restores_the_directory(llama: Path, tmp_path: Path) -> None:
    """Ungrouped it is no Llama; grouped again it is."""
    own_export = export_model(load_model(Recast(llama, "*-*-")), tmp_path / "own")
    assert read_model(own_export)[0] is None
    source = Recast(own_export, "[*-]{2}")
    family, config = read_model(source)
    assert family is not None
    assert family.model_type == "llama"
    assert config == read_model(llama)[1]
    back = export_hf(load_model(source), tmp_path / "back")
    first, second = (load_file(directory / "model.safetensors") for directory in (llama, back))
    assert bitwise_equal(second, first)
    assert json.loads((back / "config.json").read_text()) == json.loads((llama / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no Hugging Face family describes this model, \*-\*-, so"):
        export_hf(load_model(own_export), tmp_path / "none")


def test_source_without_weights_initialises_by_its_own_names() -> None:
    assert bitwise_equal(
        by_block_position(load_model(Recast(LLAMA, "*-*-"), seed=3)), by_block_position(load_model(LLAMA, seed=3))
    )


def regrouped(pattern: Pattern) -> Pattern:
    """Returns each block as a layer, or merges the first two that can be merged."""
    blocks = list(pattern.blocks)
    if tuple(blocks) == pattern.layers:
        first = next(place for place, block in enumerate(blocks) if block not in TERMINAL)
        blocks[first : first + 2] = ["".join(blocks[first : first + 2])]
    return Pattern(segments=(tuple(blocks),))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_every_family_round_trips_through_another_grouping(name: str, tmp_path: Path) -> None:
    family, config = read_model(CONFIGS[name]())
    other_pattern = regrouped(config.pattern)
    assert other_pattern != config.pattern
    own_export = export_model(load_model(Recast(CONFIGS[name](), other_pattern), seed=1), tmp_path / "own")
    assert read_model(own_export) == (None, dataclasses.replace(config, pattern=other_pattern, family=None))
    source = Recast(own_export, config.pattern)
    assert read_model(source) == (family, config)
    assert bitwise_equal(load_model(source).state_dict(), load_model(CONFIGS[name](), seed=1).state_dict())


class TestReplaced:
    @pytest.mark.parametrize(
        ("pattern", "blocks", "fresh", "dropped"),
        [
            (
                "[*E][S-]",
                {"E": MOE, "S": dataclasses.replace(WINDOW, heads=2)},
                ("layers.0.moe", "layers.1.attention"),
                ("layers.0.mlp", "layers.1.attention"),
            ),
            (
                "M[-][G-]",
                {"M": MAMBA, "G": DELTA},
                ("layers.0.mamba", "layers.2.gated_delta"),
                ("layers.0.attention", "layers.1.attention"),
            ),
        ],
    )
    def test_kept_blocks_are_equal_and_new_ones_are_listed_and_initialised(
        self, llama: Path, pattern: str, blocks: dict, fresh: tuple, dropped: tuple
    ) -> None:
        source = Recast(llama, pattern, blocks)
        moved = read_recast_plan(source)
        assert (moved.fresh_parts, moved.dropped_parts) == (fresh, dropped)
        first_seed, same_seed, other_seed = (load_model(source, seed=seed).state_dict() for seed in (1, 1, 2))
        before = load_model(llama).state_dict()
        assert set(first_seed) == set(moved.old_names) | set(moved.new_tensors)
        assert set(before) == set(moved.old_names.values()) | set(moved.dropped)
        for name in moved.old_names:
            assert torch.equal(first_seed[name], before[moved.old_names[name]])
            assert torch.equal(first_seed[name], other_seed[name])
        assert bitwise_equal(first_seed, same_seed)
        drawn = [name for name in moved.new_tensors if name.endswith("_proj.weight")]
        assert len(drawn) > 5
        for name in drawn:
            assert not torch.equal(first_seed[name], other_seed[name])
            assert 0.2 < first_seed[name].std() < 0.4
        anew = load_model(read_model(source)[1], seed=1).state_dict()
        assert all(torch.equal(first_seed[name], anew[name]) for name in moved.new_tensors), "as a fresh model has them"

    def test_changing_the_window_changes_no_tensor(self, llama: Path) -> None:
        source = Recast(llama, "[S-][*-]", {"S": WINDOW})
        moved = read_recast_plan(source)
        assert (moved.new_tensors, moved.dropped) == ((), ())
        assert bitwise_equal(load_model(source).state_dict(), load_model(llama).state_dict())

    def test_mtp_depths_are_added_and_dropped(self, llama: Path, tmp_path: Path) -> None:
        source = Recast(llama, "[*-]{2}/[*-]")
        moved = read_recast_plan(source)
        assert (moved.fresh_parts, moved.dropped_parts) == (("mtp.0",), ())
        ahead = load_model(source)
        assert {name for name in ahead.state_dict() if name.startswith("mtp.")} == set(moved.new_tensors)
        assert torch.equal(ahead(small_microbatch()), load_model(llama)(small_microbatch()))
        own_export = export_model(ahead, tmp_path / "own")

        plan = read_recast_plan(Recast(own_export, "*-[*-]/*-/*-"))
        assert (plan.fresh_parts, plan.dropped_parts) == (("mtp.1",), ())
        assert plan.old_names["mtp.0.layers.1.mlp.norm.weight"] == "mtp.0.layers.0.mlp.norm.weight"
        two = load_model(Recast(own_export, "*-[*-]/*-/*-"))
        assert torch.equal(two.state_dict()["mtp.0.proj.weight"], ahead.state_dict()["mtp.0.proj.weight"])

        other_plan = read_recast_plan(Recast(own_export, "[*-]{2}/[*E]", {"E": MOE}))
        assert (other_plan.fresh_parts, other_plan.dropped_parts) == (("mtp.0.layers.0.moe",), ("mtp.0.layers.0.mlp",))

        none = read_recast_plan(Recast(own_export, "[*-]{2}"))
        assert (none.fresh_parts, none.dropped_parts) == ((), ("mtp.0",))
        assert none.after.family == "llama"
        assert bitwise_equal(load_model(Recast(own_export, "[*-]{2}")).state_dict(), load_model(llama).state_dict())

    def test_repeated_depths_share_weights(self) -> None:
        config = small_config("[*-]{2}/[*-]/[*-]", mtp_repeated=True)
        moved = read_recast_plan(Recast(config, "*-*-/*-"))
        assert (moved.new_tensors, moved.dropped) == ((), ())
        assert read_recast_plan(Recast(config, "[*-]{2}")).dropped_parts == ("mtp.0",)


@pytest.mark.parametrize(
    ("pattern", "blocks", "sentence"),
    [
        ("[*-", {}, r"'\[' is never closed"),
        (
            "[*-]{3}",
            {},
            r"the trunk has 4 blocks in \[\*-\]\{2\}, but 6 in \[\*-\]\{3\}: blocks are matched by position",
        ),
        ("[*E][*-]", {}, "uses 'E', but `blocks` has configs for '\\*', '-' only"),
        ("[*-]{2}", {"E": MOE}, "`blocks` has a config for 'E', but the pattern .* has no such block"),
        ("[*-]{2}", {"-": MLPConfig(intermediate_size=24)}, "layers.0.mlp has other tensors than layers.0.mlp of the"),
        ("[*E]*-", {"E": MLPConfig(intermediate_size=24)}, "blocks\\['E'\\] of the config is a MLPConfig"),
    ],
)
def test_an_impossible_recast_is_refused(llama: Path, pattern: str, blocks: dict, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        load_model(Recast(llama, pattern, blocks))


def test_a_source_that_lacks_a_tensor_or_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Recast of a Recast"):
        Recast(Recast(llama, "*-*-"), "[*-]{2}")  # type: ignore[arg-type]
    own_export = export_model(load_model(Recast(llama, "*-*-")), tmp_path / "own")
    described = json.loads((own_export / "postlude.json").read_text())
    described["config"]["pattern"] = "*-*"
    (own_export / "postlude.json").write_text(json.dumps(described))
    for source in (own_export, Recast(own_export, "[*-]*")):
        with pytest.raises(ValueError, match=r"the source holds 4 tensor\(s\) \*-\* has no place for: layers.3.mlp"):
            load_model(source)
    (own_export / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        load_model(Recast(own_export, "[*-]*"))


class TestDirectory:
    def test_export_of_another_format_replaces_the_directory_completely(self, llama: Path) -> None:
        recast_model = load_model(Recast(llama, "*-*-"))
        with pytest.raises(FileExistsError, match=r"holds a model already \(config.json\)"):
            export_model(recast_model, llama)
        export_model(recast_model, llama, overwrite=True)
        assert not (llama / "config.json").exists()
        with pytest.raises(FileExistsError, match=r"holds a model already \(model.safetensors\)"):
            export_model(recast_model, llama)
        export_model(load_model(LLAMA), llama, overwrite=True)
        assert not (llama / "postlude.json").exists()
        (llama / "postlude.json").touch()
        with pytest.raises(ValueError, match=r"has both config\.json and postlude\.json; remove the one"):
            load_model(llama)

    def test_an_export_has_a_model_card_a_tokenizer_and_the_umask(self, llama: Path, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            tokenizer = load_tokenizer("tiny-hybrid")
            own_export = export_model(load_model(Recast(llama, "*-*-")), tmp_path / "own", tokenizer=tokenizer)
        finally:
            os.umask(before)
        assert {oct(path.stat().st_mode & 0o777) for path in own_export.iterdir()} == {"0o640"}
        card = (own_export / "README.md").read_text().splitlines()
        assert "library_name: postlude" in card
        assert "| architecture | Postlude's own, `*-*-` |" in card
        assert load_tokenizer(own_export).decode([72, 105]) == "Hi"

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"format": 2}, "its format is 2, but this version of postlude reads format 1"),
            ({"dtype": "int8"}, "its dtype is 'int8', but it must be one of floating point"),
            ({"extra": 1}, "it has 'extra', but its entries are format, dtype, config, hf_config"),
            ({"hf_config": []}, "its hf_config is \\[\\]"),
            (
                {"config": {"hiden_size": 3}},
                "the config has 'hiden_size', which is not one of its fields; did you mean 'h",
            ),
            ({"config": {"tied_head": 1}}, "tied_head is 1, but it must be true or false"),
            ({"config": {"hidden_size": True}}, "hidden_size is True, but it must be a whole number"),
            ({"config": {"norm_eps": "small"}}, "norm_eps is 'small', but it must be a number"),
            ({"config": {"pattern": "[*-"}}, "'\\[' is never closed"),
            ({"config": {"pattern": 3}}, "pattern is 3, but it must be text"),
            ({"config": {"pattern": "*Q"}}, "'Q' is not a block symbol"),
            ({"config": {"family": "llama"}}, "the config has 'family', which is not one of its fields"),
            ({"config": {"blocks": {"Q": {}}}}, "blocks has 'Q', which is not a block; there are '\\*', "),
            ({"config": {"blocks": {"*": 3}}}, "blocks\\['\\*'\\] is 3, but it must be an object"),
            ({"config": {"blocks": {"-": {}}}}, "blocks\\['-'\\] lacks 'intermediate_size'"),
            (
                {"config": {"blocks": {"-": {"intermediate_size": 2.0}}}},
                "intermediate_size is 2.0, but it must be a wh",
            ),
            (
                {"config": {"blocks": {"-": {"intermediate_size": 2, "activation": "tanh"}}}},
                "blocks\\['-'\\].activation is 'tanh', but the choices are 'silu', ",
            ),
            (
                {"config": {"blocks": {"*": {"heads": 3, "kv_heads": 2, "head_dim": 2}}}},
                "blocks\\['\\*'\\]: attention with heads=3",
            ),
            ({"config": {"symbols": {"C": 3}}}, "symbols\\['C'\\] is 3, but it must be text"),
        ],
    )
    def test_invalid_model_description_gives_clear_error(self, tmp_path: Path, change: dict, sentence: str) -> None:
        described = PostludeConfig(read_model(Recast(LLAMA, "*-*-"))[1], torch.float32, BLOCKS).to_json()
        changed = {**described, **change, "config": {**described["config"], **change.get("config", {})}}
        (tmp_path / "postlude.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"postlude.json describes no model: .*{sentence}"):
            load_model(tmp_path)

    @pytest.mark.parametrize("text", ["{", "NaN", '{"format": NaN}'])
    def test_invalid_json_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "postlude.json").write_text(text)
        with pytest.raises(ValueError, match=r"postlude\.json is not JSON that can be read"):
            read_model(tmp_path)

    def test_missing_field_gives_clear_error_or_its_default(self, llama: Path, tmp_path: Path) -> None:
        own_export = export_model(load_model(Recast(llama, "*-*-")), tmp_path / "own")
        described = json.loads((own_export / "postlude.json").read_text())
        del described["config"]["logit_scale"]
        (own_export / "postlude.json").write_text(json.dumps(described))
        assert read_model(own_export)[1].logit_scale == 1.0
        del described["config"]["vocab_size"]
        (own_export / "postlude.json").write_text(json.dumps(described))
        with pytest.raises(ValueError, match="the config lacks 'vocab_size'"):
            read_model(own_export)


@pytest.mark.parametrize("width", [6, 16, 48, 100, 128, 2048])
def test_every_block_has_default_sizes_for_any_width(width: int) -> None:
    """In a model with transformer blocks, and in one with state-space blocks only."""
    for other_configs in ([MLPConfig(intermediate_size=3 * width, norm="post")], [MambaConfig.default_for(width, ())]):
        configs = {symbol: block.Config.default_for(width, other_configs) for symbol, block in BLOCKS.items()}
        assert {config.norm for config in configs.values()} == {other_configs[0].norm}
        pattern = Pattern.parse("".join(f"[{symbol}-]" for symbol in BLOCKS if symbol not in TERMINAL) + "E")
        with torch.device("meta"):
            LanguageModel(ModelConfig(pattern=pattern, hidden_size=width, vocab_size=9, blocks=configs))


def test_block_without_default_sizes_gives_clear_error() -> None:
    with pytest.raises(ValueError, match="BlockConfig does not say which sizes go with hidden_size=8"):
        BlockConfig.default_for(8, ())


def test_an_infinite_number_round_trips() -> None:
    config = small_config("[M-]")
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == dataclasses.replace(
        config, blocks={symbol: config.blocks[symbol] for symbol in "M-"}
    )
    assert config_to_json(config)["blocks"]["M"]["time_step_limit"] == [0.0, "inf"]


@dataclass(frozen=True, kw_only=True)
class UnboundedConfig(MLPConfig):
    """A config with a number of any value."""

    offset: float = 0.0


def test_config_that_json_cannot_store_is_refused_before_writing(tmp_path: Path) -> None:
    config = small_config("[*-]", blocks={"-": UnboundedConfig(intermediate_size=20, offset=float("nan"))})
    with pytest.raises(ValueError, match="a config holds nan, a float, which JSON cannot represent"):
        export_model(LanguageModel(config), tmp_path / "own")
    assert not list(tmp_path.iterdir())
