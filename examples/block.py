"""A block of your own in any layout: python examples/block.py, or torchrun --nproc-per-node 2 examples/block.py tp=2"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from postlude import AdamW, Batch, Engine, Layout, Mesh, ModelConfig, Pattern, ranks
from postlude.model.blocks import BLOCKS, AttentionConfig, Block, BlockConfig, MLPConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import RowLinear, local, sharded_parameter
from postlude.model.pattern import SYMBOLS
from postlude.objectives import SFT
from postlude.ops.collectives import gather_from_sequence


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(BlockConfig):
    width: int = 4

    def flops(self, hidden_size: int) -> float:  # per token; balances pipeline stages
        return 2 * hidden_size * (self.width + hidden_size)

    def check_layout(self, layout: Layout, name: str) -> None:
        if layout.cp > 1:
            raise ValueError(f"{name} reads neighbouring tokens, which cp={layout.cp} puts on other ranks. Use cp=1.")


class Convolution(Block):
    Config = ConvolutionConfig
    roles: ClassVar = {"taps": "matrix"}  # initialised with random values; has weight decay

    def __init__(self, config: ConvolutionConfig, model: ModelConfig, name: str, mesh: Mesh) -> None:
        super().__init__(config, model, name, mesh)
        self.taps = sharded_parameter(config.width, model.hidden_size, axis=mesh.tp, dim=1)  # channels over tp ranks
        self.out = RowLinear(model.hidden_size, model.hidden_size, tp=mesh.tp)

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:  # [T / tp, H] -> [T / tp, H]
        tokens = gather_from_sequence(hidden, self.mesh.tp.group)  # [T, H]
        channels = tokens[:, slice(*self.mesh.tp.block(tokens.shape[1]))]  # [T, H / tp]
        positions, mixed = context.microbatch.positions[:, None], 0.0 * channels
        for back, tap in enumerate(local(self.taps)):
            mixed = mixed + tap * channels.roll(back, 0).where(positions >= back, 0.0)  # never across a border
        return self.out(mixed)


PATTERN = Pattern.parse("[C-]{2}[*-]{2}", symbols={**SYMBOLS, "C": "convolution"})
SIZES = {"*": AttentionConfig(heads=4, kv_heads=2, head_dim=8), "-": MLPConfig(intermediate_size=64)}
CONFIG = ModelConfig(pattern=PATTERN, hidden_size=32, vocab_size=256, blocks={"C": ConvolutionConfig(), **SIZES})
TABLE = {**BLOCKS, "C": Convolution}

if __name__ == "__main__":
    with ranks():
        layout = Layout.parse(sys.argv[1] if len(sys.argv) > 1 else "")
        engine = Engine(CONFIG, blocks=TABLE, layout=layout, optimizer=AdamW(lr=1e-2))
        batch = Batch([list(range(start, start + 20)) for start in range(0, 60, 7)])
        losses = [(engine.forward_backward(batch, SFT()).loss, engine.optimizer_step())[0] for _ in range(20)]
        print(f"{layout}: {losses[0]:.3f} -> {losses[-1]:.3f}")
        assert losses[-1] < losses[0]
