"""Trains a hybrid and a transformer of equal size on the same bytes, and compares loss curves and speed.

    PYTHONPATH=src python benchmarks/hybrid.py --json benchmarks/results/hybrid_h200.json

The text is the Python standard library of this machine, cut into packed sequences of uneven lengths. Both see the same
batches in the same order; sizes are chosen so that parameters agree to a few per cent.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from postlude import AdamW, Batch, Engine, ModelConfig, Pattern, ranks
from postlude.model.blocks import AttentionConfig, BlockConfig, GatedDeltaConfig, MambaConfig, MLPConfig
from postlude.objectives import SFT
from postlude.optimizer import LRSchedule

HIDDEN, VOCABULARY = 512, 256
BLOCKS: dict[str, BlockConfig] = {
    "*": AttentionConfig(heads=8, kv_heads=8, head_dim=64),
    "M": MambaConfig(heads=10, head_dim=64, state_size=64, groups=2, norm_groups=2),
    "G": GatedDeltaConfig(key_heads=3, value_heads=6, key_dim=96, value_dim=96),
    "-": MLPConfig(intermediate_size=1536),
}
PATTERNS = {"transformer": "[*-]{8}", "hybrid": "([M-][G-][G-][*-]){2}"}


def text() -> bytes:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(path.read_bytes() for path in files)


def batches(steps: int, tokens: int) -> list[Batch]:
    numbers, written, all_batches = random.Random(0), text(), []
    for _ in range(steps):
        sequences: list[list[int]] = []
        tokens_left = tokens
        while tokens_left > 1:
            length = min(tokens_left, numbers.randrange(64, 2048))
            start = numbers.randrange(len(written) - length)
            sequences.append(list(written[start : start + length]))
            tokens_left -= length
        all_batches.append(Batch([torch.tensor(sequence) for sequence in sequences]))
    return all_batches


def learn(pattern: str, data: list[Batch], tokens: int) -> dict[str, Any]:
    config = ModelConfig(
        pattern=Pattern.parse(pattern), hidden_size=HIDDEN, vocab_size=VOCABULARY, blocks=BLOCKS, tied_head=True
    )
    schedule = LRSchedule(shape="cosine", warmup=20, steps=len(data), floor=0.1)
    engine = Engine(config, optimizer=AdamW(lr=1e-3, betas=(0.9, 0.95), schedule=schedule), budget=tokens)
    losses, began = [], time.perf_counter()
    for number, batch in enumerate(data):
        if number == len(data) // 4:  # kernels are compiled by then
            began = time.perf_counter()
        losses.append(engine.forward_backward(batch, SFT()).loss)
        engine.optimizer_step()
    seconds = time.perf_counter() - began
    timed = len(data) - len(data) // 4
    size = sum(parameter.numel() for parameter in engine.parameters.values())
    return {
        "pattern": pattern,
        "parameters": size,
        "losses": [round(loss, 4) for loss in losses],
        "tokens_per_second": round(timed * tokens / seconds),
    }


def drawn(results: dict[str, Any]) -> str:
    """Loss by step, each the mean of ten around it, as an SVG."""
    width, height, x_start, top, colours = 640, 300, 46, 16, {"transformer": "#2f6fde", "hybrid": "#e0702d"}
    steps = max(len(results[name]["losses"]) for name in PATTERNS)
    x, y = (width - x_start - 12) / steps, (height - top - 34) / 5.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for value in range(6):
        at = top + (5 - value) * y
        lines.append(f'<line x1="{x_start}" x2="{width - 12}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e6ea"/>')
        lines.append(f'<text x="{x_start - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#555555">{value}</text>')
    for place, (name, colour) in enumerate(colours.items()):
        losses = results[name]["losses"]
        smooth = [sum(losses[max(0, i - 5) : i + 5]) / len(losses[max(0, i - 5) : i + 5]) for i in range(len(losses))]
        points = " ".join(f"{x_start + i * x:.1f},{top + (5 - loss) * y:.1f}" for i, loss in enumerate(smooth))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        label = f"{name} {results[name]['pattern']}, {results[name]['parameters'] / 1e6:.1f} M"
        lines.append(f'<text x="{x_start + 250}" y="{top + 14 + 16 * place}" fill="{colour}">{label}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle" fill="#555555">step (of {steps})</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="draw an earlier result instead")
    arguments = parser.parse_args()
    if arguments.draw:
        arguments.draw[1].write_text(drawn(json.loads(arguments.draw[0].read_text())))
        return
    with ranks():
        data = batches(arguments.steps, arguments.tokens)
        results = {name: learn(pattern, data, arguments.tokens) for name, pattern in PATTERNS.items()}
    for name, result in results.items():
        last = result["losses"][-20:]
        print(
            name,
            result["pattern"],
            f"{result['parameters']:,}",
            f"{sum(last) / len(last):.4f}",
            result["tokens_per_second"],
        )
    if arguments.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        arguments.json.write_text(json.dumps({"machine": machine, "tokens": arguments.tokens, **results}) + "\n")


if __name__ == "__main__":
    main()
