"""Start here: `linear_logprobs`, the fused LM head. The contract is in `api.py`
and `logits.py`, the mathematics in `statistics.py`.

`plan.py` decides what part of the logits exists at a time, `sweep.py` walks over it, and the two epilogues
(`torch_epilogue.py`, `triton_epilogue.py`) select the tokens and turn a slab of products into statistics or gradients.
`fused.py` and `coded.py` do product and epilogue in one on Hopper.
"""

from postlude.ops.linear_logprobs.api import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.logits import LogitConfig

__all__ = ["LogitConfig", "TokenStats", "linear_logprobs"]
