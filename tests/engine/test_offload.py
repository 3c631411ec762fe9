"""offload and onload: device memory is freed, state is restored bit-exactly, and training continues unchanged."""

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from postlude import SGD, AdamW, Engine, Layout
from postlude import ranks as started
from postlude.engine.failure_state import OFFLOADED
from postlude.model.blocks import MoEConfig
from postlude.model.parallel import local_shard
from postlude.objectives import SFT
from tests.engine.live_tensors import live_tensors, storage_bytes
from tests.engine.training import ADAMW, batch, build, error_text
from tests.meshes import mesh
from tests.model.small import VOCABULARY, small_config

CONFIG = small_config(
    "[*-][M-][*E]",
    blocks={"E": MoEConfig(experts=4, top_k=2, intermediate_size=12, selection_bias=True, selection_bias_rate=1e-3)},
)
MOMENTUM = SGD(lr=1e-2, momentum=0.9)
REFUSED = f"RuntimeError: {OFFLOADED}"


def host_bytes(engine: Engine) -> int:
    return sum(chunk.numel() for chunk in engine._state_offload.chunks)


def state(engine: Engine) -> dict[str, Tensor]:
    """Returns every tensor of this rank: parameters, buffers, gradients and optimizer state."""
    tensors: dict[str, Tensor] = {}
    for index, model in engine.stage_models.items():
        tensors |= {f"{index} {name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, parameter in engine.parameters.items():
        tensors |= {f"{name} gradient": parameter.grad} if parameter.grad is not None else {}
        moments = engine.optimizer.state.get(parameter, {})
        tensors |= {f"{name} {key}": value for key, value in moments.items() if isinstance(value, Tensor)}
    return {name: local_shard(tensor) for name, tensor in tensors.items()}


def state_bytes(engine: Engine) -> int:
    return storage_bytes(state(engine).values())


def digests(engine: Engine) -> dict[str, str]:
    as_bytes = {name: tensor.clone().reshape(-1).view(torch.uint8) for name, tensor in state(engine).items()}
    return {name: hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for name, tensor in as_bytes.items()}


def step(engine: Engine, seed: int) -> float:
    return engine.forward_backward(batch(seed, vocab_size=VOCABULARY), SFT()).loss


def train_with_offloads(
    group: Any, layout: str, options: dict[str, Any], offloads: bool
) -> tuple[list[float], dict[str, str]]:
    """Returns losses and the final state of two steps, the second with two batches, with `offloads` between calls."""
    engine = build(layout, CONFIG, **options)
    losses = []
    for seed in (0, None, 1, 2, None, 3):
        if offloads:
            move(engine)
        if seed is None:
            losses.append(engine.optimizer_step().grad_norm)
        else:
            losses.append(step(engine, seed))
    return losses, digests(engine)


def move(engine: Engine) -> None:
    before, size, host_size = digests(engine), state_bytes(engine), host_bytes(engine)
    gc.collect()
    tensors = live_tensors()
    known, used_bytes = {id(tensor) for tensor in tensors}, storage_bytes(tensors)
    engine.offload()
    engine.offload()
    assert state_bytes(engine) == 0
    assert used_bytes - storage_bytes(tensors) == size > 0
    new_tensors = [tensor for tensor in live_tensors() if id(tensor) not in known]
    assert storage_bytes(new_tensors) == host_bytes(engine) - host_size
    del tensors, new_tensors
    chunks = list(engine._state_offload.chunks)
    engine.onload()
    engine.onload()
    assert digests(engine) == before
    assert all(
        old_chunk is new_chunk for old_chunk, new_chunk in zip(chunks, engine._state_offload.chunks, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp=2", {"critic": True}),
        ("pp=2", {"optimizer": AdamW(lr=1e-3, moments="8bit"), "weights": "split", "overlap": True}),
        pytest.param("dp_shard=2,ep=2", {"overlap": True, "critic": True}, marks=pytest.mark.thorough),
        pytest.param("dp_shard=2", {"optimizer": MOMENTUM, "gather_once": True}, marks=pytest.mark.thorough),
        pytest.param("", {"compute_dtype": torch.bfloat16, "weights": "rounded"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_after_offload_and_onload_is_unchanged(ranks: Any, layout: str, options: dict[str, Any]) -> None:
    size = Layout.parse(layout).world_size
    for moved, stayed in zip(
        ranks(size, train_with_offloads, layout, options, True),
        ranks(size, train_with_offloads, layout, options, False),
        strict=True,
    ):
        assert moved == stayed


def refusals(group: Any, directory: Path) -> None:
    engine = Engine(CONFIG, mesh=mesh(Layout()), budget=32, optimizer=ADAMW)
    step(engine, 0)
    reference, stream, rows = engine.reference(), engine.stream_weights(), batch(1, vocab_size=VOCABULARY)
    engine.offload()
    calls: dict[str, Callable[[], Any]] = {
        "forward_backward": lambda: step(engine, 1),
        "optimizer_step": engine.optimizer_step,
        "zero_grad": engine.zero_grad,
        "set_optimizer": lambda: engine.set_optimizer(MOMENTUM),
        "grad_norm": engine.grad_norm,
        "weight_norm": engine.weight_norm,
        "evaluate_loss": lambda: engine.evaluate_loss(rows, SFT()),
        "count": lambda: engine.count(rows),
        "logprobs": lambda: engine.logprobs(rows),
        "topk": lambda: engine.topk(rows, 2),
        "reference": engine.reference,
        "an earlier reference": lambda: reference.logprobs(rows),
        "stream_weights": engine.stream_weights,
        "an earlier stream": lambda: list(stream),
        "gradients": engine.gradients,
        "tensors": lambda: engine.tensors,
        "low_bits": lambda: engine.low_bits,
        "save": lambda: engine.save(directory / "saved"),
        "load": lambda: engine.load(directory / "saved"),
        "export_model": lambda: engine.export_model(directory / "exported"),
    }
    assert {name: answer for name, call in calls.items() if (answer := error_text(call)) != REFUSED} == {}
    engine.onload()
    step(engine, 1)
    engine.optimizer_step()


def test_other_calls_are_refused_while_offloaded(ranks: Any, tmp_path: Path) -> None:
    ranks(1, refusals, tmp_path)
    assert list(tmp_path.iterdir()) == []


def failures(group: Any) -> None:
    engine = Engine(CONFIG, mesh=mesh(Layout()), budget=32, optimizer=ADAMW)
    step(engine, 0)
    before = digests(engine)
    with mock.patch.object(torch, "empty", side_effect=RuntimeError("no host memory")):
        assert error_text(engine.offload) == "RuntimeError: no host memory"
    engine.grad_norm()
    engine.offload()
    resize, calls_left = torch.UntypedStorage.resize_, [3]

    def exhausted(storage: torch.UntypedStorage, size: int) -> Any:
        calls_left[0] -= size > 0
        if size and calls_left[0] < 0:
            raise torch.OutOfMemoryError("no device memory")
        return resize(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", exhausted):
        onload = error_text(engine.onload)
    assert onload.startswith("RuntimeError: onload needs 0.00 GiB on cpu, which it does not have (no device memory): ")
    assert onload.endswith("free the memory of the generator there, and call onload again.")
    assert error_text(engine.grad_norm) == REFUSED
    assert all(storage.nbytes() == 0 for storage, _ in engine._state_offload.moved)
    engine.onload()
    assert digests(engine) == before


def test_failed_offload_keeps_everything_on_the_device_or_refuses_calls(ranks: Any) -> None:
    ranks(1, failures)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"weights": "split"}], ids=str)
def test_offloaded_memory_is_available_on_the_gpu(options: dict[str, Any]) -> None:
    """A tensor as large as the offloaded state does not increase the peak memory."""
    large = small_config("[*-]{4}", hidden_size=1024, vocab_size=32_000)
    with started(device="cuda"):
        allocated_before = torch.cuda.memory_allocated()  # by tests before this one: a cuBLAS workspace for each stream
        engine = Engine(large, budget=64, optimizer=ADAMW, **options)
        for seed in range(2):
            step(engine, seed)
            engine.optimizer_step()
        step(engine, 2)
        torch.cuda.synchronize()
        before, bits, size = torch.cuda.memory_allocated(), digests(engine), state_bytes(engine)
        reserved = torch.cuda.memory_reserved()
        engine.offload()
        freed = before - torch.cuda.memory_allocated()
        assert freed >= size
        assert before - freed - allocated_before < 80 << 20, "cuBLAS keeps two workspaces of 32 MiB; the rest is small"
        assert reserved - torch.cuda.memory_reserved() > 0.8 * freed, "other processes get it too"
        assert all(chunk.is_pinned() for chunk in engine._state_offload.chunks)
        torch.cuda.reset_peak_memory_stats()
        cache = torch.empty(freed, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_allocated() <= before + (1 << 20)
        del cache
        engine.onload()
        assert digests(engine) == bits
        step(engine, 3)
