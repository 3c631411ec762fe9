"""Triton kernels: the checks of each file, in Triton's interpreter on any machine and compiled on a GPU."""

import pytest

from tests.ops import block_fp8_checks
from tests.ops.kernel_checks import interpret_checks, run_checks

CHECKS = ("adamw", "attention", "block_fp8", "decode_linear", "elementwise", "expert", "fp8", "gated_delta", "paged")
MORE_CHECKS = (
    "decode_experts",
    "invariant",
    "latent",
    "linear_logprobs",
    "recurrent_step",
    "scan",
    "triton",
    "../generate/sampler",
)
# Each selection compiles many kernels: in processes of their own, they can run at the same time.
SELECTIONS = {
    "paged": [
        "pages_equal_packed",
        "test_shared",
        "several_tokens and fp8",
        "several_tokens and not fp8",
        "not (pages_equal_packed or test_shared or several_tokens)",
    ]
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in CHECKS + MORE_CHECKS])
def test_kernels_in_the_interpreter(name: str) -> None:
    interpret_checks(f"{name}_checks.py")


@pytest.mark.slow
def test_some_kernels_in_the_interpreter() -> None:
    interpret_checks("triton_checks.py", "target or shard or scaled_in_place")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "selected"), [(name, selected) for name in CHECKS + MORE_CHECKS for selected in SELECTIONS.get(name, [""])]
)
def test_kernels(name: str, selected: str) -> None:
    run_checks(f"{name}_checks.py", selected)


def test_layers_of_block_scaled_fp8_without_kernels() -> None:
    """The checks that need no interpreter, on any machine."""
    block_fp8_checks.test_fp8_weight_error_is_below_one_sixteenth()
    block_fp8_checks.test_adapters_and_biases_are_added_in_their_own_dtype()
    block_fp8_checks.test_decode_layers_with_fp8_weights_equal_their_parts()
    for case in ("plain", "norm", "residual"):
        block_fp8_checks.check_product("torch", 16, case)
