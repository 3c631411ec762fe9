from __future__ import annotations

import pytest
import torch

from postlude.ops.products import plain_products

ARM = torch.backends.mkldnn.is_acl_available()


@pytest.fixture
def switched_on():
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = before


@pytest.mark.usefixtures("switched_on")
def test_only_fp32_products_on_arm_leave_onednn():
    with plain_products(torch.float32):
        assert torch.backends.mkldnn.enabled is not ARM
        with plain_products(torch.bfloat16):
            assert torch.backends.mkldnn.enabled is not ARM
    assert torch.backends.mkldnn.enabled
    with plain_products(torch.bfloat16):
        assert torch.backends.mkldnn.enabled


@pytest.mark.usefixtures("switched_on")
def test_the_switch_is_put_back_after_an_error():
    def fail() -> None:
        with plain_products(torch.float32):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.backends.mkldnn.enabled
