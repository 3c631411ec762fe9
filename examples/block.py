"""A block of your own in any layout: python examples/block.py, or torchrun --nproc-per-node 2 examples/block.py tp=2"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from postlude import AdamW, Batch, Engine, Layout, ModelConfig, Pattern, ranks
from postlude.model.blocks import BLOCKS, AttentionConfig, Block, BlockConfig, MLPConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import RowLinear, local, sharded_parameter
from postlude.model.pattern import SYMBOLS
from postlude.objectives import SFT
from postlude.ops.collectives import gather_from_sequence
from postlude.world.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(BlockConfig):
    width: int = 4

    def flops(self, hidden_size: int) -> float:  # per token; balances pipeline stages
        return 2 * hidden_size * (self.width + hidden_size)

    def check_layout(self, layout: Layout, name: str) -> None:
        if layout.cp > 1:
            raise ValueError(f"{name} looks at neighbours, which cp={layout.cp} cuts apart. Use cp=1.")


class Convolution(Block):
    Config = ConvolutionConfig
    roles: ClassVar = {"taps": "matrix"}  # starts from random values, and has weight decay

    def __init__(self, config: ConvolutionConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.taps = sharded_parameter(
            config.width, model.hidden_size, axis=mesh.tp, dim=1
        )  # each rank has channels of its own
        self.out = RowLinear(model.hidden_size, model.hidden_size, tp=mesh.tp)

    def work(self, hidden: Tensor, context: ForwardContext) -> Tensor:  # [T / tp, H] -> [T / tp, H]
        tokens = gather_from_sequence(hidden, self.mesh.tp.group)  # [T, H]
        channels = tokens[:, slice(*self.mesh.tp.block(tokens.shape[1]))]  # [T, H / tp]
        position = context.microbatch.positions[:, None]
        mixed = torch.zeros_like(channels)
        for back, tap in enumerate(local(self.taps)):
            mixed = mixed + tap * channels.roll(back, 0).where(position >= back, 0.0)
        return self.out(mixed)  # sums what ranks have, and gives each its tokens back


CONFIG = ModelConfig(
    pattern=Pattern.parse("[C-]{2}[*-]{2}", symbols={**SYMBOLS, "C": "convolution"}),
    hidden_size=32,
    vocab_size=256,
    blocks={
        "C": ConvolutionConfig(),
        "*": AttentionConfig(heads=4, kv_heads=2, head_dim=8),
        "-": MLPConfig(intermediate_size=64),
    },
)
TABLE = {**BLOCKS, "C": Convolution}

if __name__ == "__main__":
    with ranks():
        layout = Layout.parse(sys.argv[1] if len(sys.argv) > 1 else "")
        engine = Engine(CONFIG, blocks=TABLE, layout=layout, optimizer=AdamW(lr=1e-2))
        batch = Batch([torch.arange(start, start + 20) % 256 for start in range(0, 60, 7)])
        losses = []
        for _ in range(20):
            losses.append(engine.forward_backward(batch, SFT()).loss)
            engine.optimizer_step()
        print(f"{layout}: {losses[0]:.3f} -> {losses[-1]:.3f}")
        assert losses[-1] < losses[0]
