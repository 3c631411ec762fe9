"""Draws docs/images/overlap.svg: a step on two ranks of this machine, plain and overlapped, experts on both.

OMP_NUM_THREADS=1 PYTHONPATH=src python docs/overlap.py

The exchange is through this machine's memory, with many small experts a token, so that it is long enough to be seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from postlude import Layout, ModelConfig, Pattern
from postlude.commands.trace import Traced, record_all
from postlude.model.blocks import AttentionConfig, MoEConfig
from postlude.trace.svg import Timeline, render_svg
from postlude.world.launcher import run_on_ranks

TARGET = Path(__file__).parent / "images" / "overlap.svg"
MODEL = ModelConfig(
    pattern=Pattern.parse("[*E]{3}"),
    blocks={
        "*": AttentionConfig(heads=8, kv_heads=2, head_dim=32),
        "E": MoEConfig(experts=16, top_k=8, intermediate_size=64),
    },
    hidden_size=256,
    vocab_size=256,
)
PLAIN = Traced(MODEL, layout=Layout.parse("dp_shard=2,ep=2"), microbatches=5, budget=256)


if __name__ == "__main__":
    both = run_on_ranks(record_all, [PLAIN, replace(PLAIN, overlap=True)], "cpu", nproc=2, device="cpu")
    timelines = [Timeline(title, spans) for title, spans in zip(("plain", "overlapped"), both, strict=True)]
    TARGET.write_text(render_svg(timelines), encoding="utf-8")
    print(*(timeline.summary for timeline in timelines), sep="\n")
