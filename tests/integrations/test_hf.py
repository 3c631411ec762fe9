"""`integrations.hf.logprobs` equals the model's own logits, in every family, padded or packed."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from postlude.integrations.hf import logprobs
from tests.equality import assert_equal
from tests.ops.watch import Watch

VOCABULARY = 61
ROWS = 3
LENGTH = 9
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PHI = {name: value for name, value in SMALL.items() if name != "head_dim"}
MOE = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "eos_token_id": 2}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 2}
VISION = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL,
        num_local_experts=2,
        intermediate_size_mlp=24,
        layer_types=["full_attention"] * 2,
        no_rope_layers=[1, 0],
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**MOE, norm_topk_prob=True),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, final_logit_softcapping=1.5, sliding_window=4),
    "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=0.3),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**SMALL, logits_scaling=0.3),
    "cohere": lambda: transformers.CohereConfig(**SMALL, logit_scale=1.7),
    "cohere_compass_text": lambda: transformers.CohereCompassTextConfig(
        **SMALL,
        logit_scale=1.7,
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi": lambda: transformers.PhiConfig(**PHI),  # its head has a bias
    "gpt2": lambda: transformers.GPT2Config(**GPT2),  # absolute positions
    "bloom": lambda: transformers.BloomConfig(**BLOOM),  # takes no positions
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**PHI),
}


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Returns a model whose every parameter matters; float64 where possible, so that no tolerance hides an error."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), **plain)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.5 if "norm" in name or "ln" in name else 0.0, 0.3, generator=generator)
    return model.eval()


def tokens(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def logprobs_from_logits(
    logits: Tensor, targets: Tensor, mask: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns logprob and entropy [B, S] by token, from logits by predicting position."""
    scale = temperature[:, 1:, None] if isinstance(temperature, Tensor) else temperature
    rates = (logits[:, :-1] / scale).log_softmax(-1)
    rated = rates.gather(-1, targets[:, 1:, None].clamp_min(0))[..., 0]
    entropy = -(rates.exp() * rates).sum(-1)
    first = torch.zeros_like(rated[:, :1])
    return tuple(torch.where(mask, torch.cat([first, row], 1), 0.0) for row in (rated, entropy))


def upstream(seed: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: PreTrainedModel, logprob: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    ((logprob * upstream(3)).sum() + (entropy * upstream(4)).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equals_logits(model: PreTrainedModel, inputs: dict[str, Any], mask: Tensor, **options: Any) -> None:
    """Compares results and every parameter's gradient. `kept` [B, S] marks the tokens that have a result."""
    ids, labels = inputs["input_ids"], options.get("labels")
    stats = logprobs(model, **inputs, **options, entropy=True)
    actual = gradients(model, stats.logprob, stats.entropy)
    targets = ids if labels is None else labels
    exact = logprobs_from_logits(model(**inputs).logits, targets, mask, options.get("temperature", 1.0))
    expected = gradients(model, *exact)
    assert stats.logprob[mask].all()
    assert_equal(stats.logprob, exact[0], "logprob")
    assert_equal(stats.entropy, exact[1], "entropy")
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient.abs().max() < 1e-12:  # mathematically 0, as of a key's bias: rounding alone is left to compare
            assert actual[name].abs().max() < 1e-12, name
        else:
            assert_equal(actual[name], gradient, f"gradient of {name}")


def all_but_first() -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("family", CONFIGS)
def test_equals_the_logits_path(family: str) -> None:
    assert_equals_logits(model_of(family), {"input_ids": tokens()}, all_but_first())


@pytest.mark.parametrize("family", ["llama-tied", "gemma2", "granite", "phi"])
def test_labels_select_targets_and_temperature_divides_last(family: str) -> None:
    labels = tokens(seed=1)  # not the inputs: any token may be rated
    labels[0, :5] = labels[1, 2] = labels[2] = -100
    temperature = torch.linspace(0.5, 2.0, ROWS * LENGTH, dtype=torch.float64).view(ROWS, LENGTH)
    options = {"labels": labels, "temperature": temperature}
    assert_equals_logits(model_of(family), {"input_ids": tokens()}, all_but_first() & (labels != -100), **options)


def test_training_mode_has_the_same_dropout() -> None:
    model, ids = model_of("gpt2").train(), tokens()
    torch.manual_seed(7)
    stats = logprobs(model, ids)
    torch.manual_seed(7)
    assert_equal(stats.logprob, logprobs_from_logits(model(ids).logits, ids, all_but_first())[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "bloom"])
def test_padded_equals_each_sequence_alone(family: str, side: str) -> None:
    # float32: in float64 transformers' masks overflow its float32 softmax where a whole row is padding.
    model, lengths = model_of(family, torch.float32), (9, 4, 1)
    ids, mask = torch.zeros(ROWS, LENGTH, dtype=torch.int64), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    alone = [tokens(1, length, seed=length) for length in lengths]
    places = [slice(LENGTH - length, None) if side == "left" else slice(0, length) for length in lengths]
    for row, (place, sequence) in enumerate(zip(places, alone, strict=True)):
        ids[row, place], mask[row, place] = sequence[0], 1
    stats = logprobs(model, ids, attention_mask=mask, entropy=True)
    assert not stats.logprob[mask == 0].any()
    assert not stats.entropy[mask == 0].any()
    for row, (place, sequence) in enumerate(zip(places, alone, strict=True)):
        expected = logprobs(model, sequence, entropy=True)
        assert_equal(stats.logprob[row, place], expected.logprob[0], f"logprob of row {row}")
        assert_equal(stats.entropy[row, place], expected.entropy[0], f"entropy of row {row}")


def test_packed_equals_each_sequence_alone() -> None:
    model, parts = model_of("llama"), [tokens(1, length, seed=length) for length in (5, 1, 4)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = logprobs(model, torch.cat(parts, 1), position_ids=positions)
    assert_equal(packed.logprob, torch.cat([logprobs(model, part).logprob for part in parts], 1))


def test_every_result_is_by_token() -> None:
    model, ids = model_of("cohere"), tokens()
    stats = logprobs(model, ids, topk=3, lse=True, top1=True)
    logits = model(ids).logits[:, :-1]
    best, places = logits.log_softmax(-1).topk(3)
    assert_equal(stats.topk_logprobs[:, 1:], best)
    assert torch.equal(stats.topk_ids[:, 1:], places)
    assert_equal(stats.lse[:, 1:], logits.logsumexp(-1))
    assert torch.equal(stats.top1[:, 1:], places[..., 0] == ids[:, 1:])
    assert not any(row[:, 0].any() for row in (stats.topk_logprobs, stats.topk_ids, stats.lse, stats.top1))


def test_base_model_runs_once_and_the_head_never() -> None:
    model, calls = model_of("qwen3"), Counter()
    for name in ("", "model", "model.layers.0", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    logprobs(model, tokens()).logprob.sum().backward()
    assert calls == {"model": 1, "model.layers.0": 1}


def test_no_logits_and_no_cache_without_gradient() -> None:
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": 4096, "pad_token_id": None})
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(4096, (4, 32))
    with torch.no_grad(), Watch() as watch:
        stats = logprobs(model, ids, memory_budget=100_000)
    assert not stats.logprob.requires_grad
    assert watch.largest < ids.numel() * 4096 // 2


def test_without_targets_nothing_is_projected() -> None:
    model, ids = model_of("llama"), tokens()
    with Watch() as watch:
        stats = logprobs(model, ids, labels=torch.full_like(ids, -100))
    assert not stats.logprob.any()
    assert all(columns != VOCABULARY for _, _, columns in watch.products)


def test_images_go_to_the_base_model() -> None:
    vision = transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=32)
    text = transformers.LlamaConfig(**{**SMALL, "pad_token_id": None})
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=60, image_seq_length=4, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = tokens().clamp_max(59)
    ids[:, 2:6] = 60
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(ROWS, 3, 8, 8)}
    stats = logprobs(model, **inputs)
    assert_equal(stats.logprob, logprobs_from_logits(model(**inputs).logits, ids, all_but_first() & mask.bool())[0])


class TwoStep(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).square()


def test_unsupported_models_and_arguments_are_refused() -> None:
    ids = tokens()
    with pytest.raises(TypeError, match=r"PreTrainedModel, but got a Linear"):
        logprobs(nn.Linear(2, 2), ids)
    with pytest.raises(TypeError, match=r"BertLMHeadModel has bert, cls besides its head"):
        logprobs(transformers.BertLMHeadModel(transformers.BertConfig(**PHI)), ids)
    with pytest.raises(TypeError, match=r"XLNetLMHeadModel: it lets tokens see"):
        logprobs(transformers.XLNetLMHeadModel(transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4)), ids)
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"attention_mask \[3, 1, 9, 9\] must be \[3, 9\]"):
        logprobs(model, ids, attention_mask=torch.ones(3, 1, 9, 9))
    model.lm_head = TwoStep(32, VOCABULARY)
    with pytest.raises(TypeError, match=r"that of LlamaForCausalLM is a TwoStep"):
        logprobs(model, ids)


@pytest.mark.parametrize("key", ["logit_scale", "logits_scaling", "final_logit_softcapping", "lm_head_multiplier"])
def test_config_key_that_may_change_the_logits_is_refused(key: str) -> None:
    model = model_of("llama")
    setattr(model.config, key, 2.0)
    with pytest.raises(ValueError, match=rf"config key '{key}' = 2.0 of a 'llama' model"):
        logprobs(model, tokens())
