from __future__ import annotations

import pytest
import torch

from postlude.ops.cpu_matmul import blas_fp32_matmul

ARM = torch.backends.mkldnn.is_acl_available()


@pytest.fixture
def switched_on():
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = before


@pytest.mark.usefixtures("switched_on")
def test_only_fp32_products_on_arm_leave_onednn():
    with blas_fp32_matmul(torch.float32):
        assert torch.backends.mkldnn.enabled is not ARM
        with blas_fp32_matmul(torch.bfloat16):
            assert torch.backends.mkldnn.enabled is not ARM
    assert torch.backends.mkldnn.enabled
    with blas_fp32_matmul(torch.bfloat16):
        assert torch.backends.mkldnn.enabled


@pytest.mark.usefixtures("switched_on")
def test_the_switch_is_put_back_after_an_error():
    def fail() -> None:
        with blas_fp32_matmul(torch.float32):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.backends.mkldnn.enabled
