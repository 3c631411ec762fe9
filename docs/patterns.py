"""Draws docs/images/patterns.svg: one strip per family, one column per logical layer, one square per block.

PYTHONPATH=src python docs/patterns.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from transformers import AutoConfig

from postlude.hf.families import FAMILIES
from postlude.model import ModelConfig
from postlude.model.pattern import SYMBOLS

TARGET = Path(__file__).parent / "images" / "patterns.svg"
COLOURS = {
    "*": "#2f6fde",
    "S": "#7fb0ff",
    "+": "#0b2f73",
    "M": "#e0702d",
    "G": "#c8a400",
    "-": "#9aa5b1",
    "E": "#2c9c69",
}
WORDS = {"S": "sliding-window attention", "M": "Mamba-2", "-": "MLP", "E": "mixture of experts", "G": "gated delta net"}
SIZES: dict[str, dict[str, object]] = {
    "glm4_moe": {"head_dim": 128},
    "nemotron_h": {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},  # the 8B's
}
SQUARE, GAP, LEFT, TOP, ROW = 9, 2, 190, 58, 40


def families() -> dict[str, ModelConfig]:
    """Each family as transformers' own defaults size it, or as `SIZES` says."""
    return {
        name: FAMILIES[name].to_model(AutoConfig.for_model(name, **SIZES.get(name, {}))) for name in sorted(FAMILIES)
    }


def drawing(models: dict[str, ModelConfig]) -> str:
    """The picture as text."""
    longest = max(len(model.pattern) for model in models.values())
    words = {symbol: f"{symbol} {WORDS.get(symbol, SYMBOLS[symbol].replace('_', ' '))}" for symbol in COLOURS}
    legend = 24 + sum(34 + 7 * len(word) for word in words.values())
    width, height = max(LEFT + longest * (SQUARE + GAP) + 24, legend), TOP + len(models) * ROW + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, monospace" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    x = 12
    for symbol, colour in COLOURS.items():
        lines.append(f'<rect x="{x}" y="14" width="{SQUARE}" height="{SQUARE}" fill="{colour}"/>')
        lines.append(f'<text x="{x + 14}" y="23" fill="#222222">{escape(words[symbol])}</text>')
        x += 34 + 7 * len(words[symbol])
    for row, (name, model) in enumerate(models.items()):
        y = TOP + row * ROW
        text = str(model.pattern)
        lines.append(f'<text x="12" y="{y + 9}" fill="#222222" font-weight="bold">{escape(name)}</text>')
        lines.append(f'<text x="12" y="{y + 23}" fill="#666666" font-size="9">{escape(_short(text))}</text>')
        for column, layer in enumerate(model.pattern.layers):
            for place, symbol in enumerate(layer):
                left, upper = LEFT + column * (SQUARE + GAP), y + place * (SQUARE + 1)
                lines.append(
                    f'<rect x="{left}" y="{upper}" width="{SQUARE}" height="{SQUARE}" fill="{COLOURS[symbol]}"/>'
                )
    return "\n".join([*lines, "</svg>", ""])


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:29]}…"


if __name__ == "__main__":
    TARGET.write_text(drawing(families()), encoding="utf-8")
