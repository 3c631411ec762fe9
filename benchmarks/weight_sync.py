"""Measures how long an engine's weights take to reach the sampler, by each method of Postlude.

    PYTHONPATH=src python benchmarks/weight_sync.py --shape 0.6b 8b --json benchmarks/results/weight_sync_h200.json
    PYTHONPATH=src python benchmarks/weight_sync.py --shape 8b-whole --weights rounded --transfers disk --directory DIR
    PYTHONPATH=src python benchmarks/weight_sync.py --smoke          # tiny, on any machine

"stream" takes `Engine.stream_weights()` bucket by bucket and frees each; every method begins with it. "native"
copies them into the generator on the same ranks. "disk" writes safetensors to `--directory`, as `rollout:
server` does before it notifies its servers, as fast as the page cache takes them. "bytes" writes as many from one
small buffer in host memory: the fastest way to that directory. "read" is the minimum that a server then does: each
tensor is read from that cache to its device. "renew" is what `postlude serve` does, into a model and with a checksum.
Weights are random, of a published model's shape, in bf16 (fp32 on the CPU), from one rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from workloads import GIB, SHAPES, Clock, Results, free_memory, peak_gib, result_or_failure

from postlude import Engine, ranks
from postlude.generate.distributed import SyncedGenerator
from postlude.hf.load import reload_weights
from postlude.safetensors_file import STAGING_BYTES

TRANSFERS = ("stream", "native", "bytes", "disk", "read", "renew")
Transfer = tuple[str, str, Callable[[], Any]]
"""A name, what it is, and what is timed."""


def read(directory: Path, device: str) -> None:
    """Every tensor of a directory of safetensors, to the device and gone again."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                file.get_tensor(name)


def write_bytes(path: Path, count: int) -> None:
    """A file of so many bytes, and gone again."""
    with path.open("wb", buffering=0) as file:
        buffer = memoryview(b"x" * min(count, STAGING_BYTES))
        while count:
            count -= file.write(buffer[:count])
    path.unlink()


def transfers(engine: Engine, directory: Path, device: str, bytes_moved: int) -> Iterator[Transfer]:
    """In this order: the last ones read what "disk" wrote."""
    generator = SyncedGenerator(engine, None)
    yield "stream", "stream_weights, bucket by bucket", lambda: deque(engine.stream_weights(), maxlen=0)
    yield "native", "into the native generator", lambda: engine.copy_weights(generator.model)
    yield "bytes", "as many bytes written from host memory", lambda: write_bytes(directory / "bytes", bytes_moved)
    yield "disk", "safetensors written", lambda: engine.export_hf(directory, overwrite=True)
    yield "read", "safetensors read to the device", lambda: read(directory, device)
    yield "renew", "safetensors read into a model", lambda: reload_weights(generator.model, directory)


def measured(step: Callable[[], Any], bytes_moved: int, clock: Clock) -> dict[str, Any]:
    """Seconds after one to warm up, and the memory that it takes above what is held."""
    free_memory(clock.device)
    allocated = torch.cuda.memory_allocated() / GIB if clock.device == "cuda" else 0.0
    seconds = [clock.once(step) for _ in range(clock.repeats + 1)]
    median = statistics.median(seconds[1:])
    peak = peak_gib(clock.device)
    return {
        "seconds": round(median, 4),
        "first_s": round(seconds[0], 4),
        "gib_per_second": round(bytes_moved / GIB / median, 2),
        "extra_gib": None if peak is None else round(peak - allocated, 2),
    }


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.6b"])
    parser.add_argument("--weights", choices=["fp32", "split", "rounded"], default="fp32", help="how they are stored")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where safetensors go")
    parser.add_argument(
        "--transfers", nargs="+", choices=TRANSFERS, default=TRANSFERS, help="those that read need disk before them"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each transfer")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.shape, arguments.repeats = ["smoke", "smoke-moe"], 1
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    clock = Clock(arguments.device, arguments.repeats)
    with ranks(device=arguments.device):
        for shape in arguments.shape:
            free_memory(arguments.device)
            engine = Engine(SHAPES[shape](), device=arguments.device, weights=arguments.weights)
            moved = sum(tensor.nbytes for _, tensor in engine.stream_weights())
            print(f"{shape}: {moved / GIB:.2f} GiB")
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                for name, description, step in transfers(engine, Path(directory), arguments.device, moved):
                    if name not in arguments.transfers:
                        continue
                    result = result_or_failure(lambda step=step, moved=moved: measured(step, moved, clock))
                    labels = {"case": name, "description": description, "shape": shape, "weights": arguments.weights}
                    results.add({**labels, "gib": round(moved / GIB, 3), **result})
                    print(f"  {name:<12} {result}", flush=True)
            del engine, step
    return results.cases


if __name__ == "__main__":
    main()
