"""Start here: `linear_logprobs`, the fused LM head. `api.py` and `logits.py` have the contract, `statistics.py` the
mathematics.

`plan.py` divides the logits into slabs, of which one exists at a time, `sweep.py` runs them in order, and an epilogue
selects the tokens to project and turns a slab of products into statistics or gradients: `torch_epilogue.py`, or
`kernels/linear_logprobs_rows.py`. On Hopper, `kernels/linear_logprobs_fused.py` and `linear_logprobs_quantized.py`
compute product and epilogue in one kernel.
"""

from postlude.ops.linear_logprobs.api import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.logits import LogitConfig

__all__ = ["LogitConfig", "TokenStats", "linear_logprobs"]
