import pytest
import torch

from postlude.ops.linear import blas_fp32_matmul

ARM = torch.backends.mkldnn.is_acl_available()


@pytest.fixture
def onednn_enabled():
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield
    torch.backends.mkldnn.enabled = before


@pytest.mark.usefixtures("onednn_enabled")
def test_onednn_is_disabled_only_for_fp32_on_arm():
    with blas_fp32_matmul(torch.float32):
        assert torch.backends.mkldnn.enabled is not ARM
        with blas_fp32_matmul(torch.bfloat16):
            assert torch.backends.mkldnn.enabled is not ARM
    assert torch.backends.mkldnn.enabled
    with blas_fp32_matmul(torch.bfloat16):
        assert torch.backends.mkldnn.enabled


@pytest.mark.usefixtures("onednn_enabled")
def test_onednn_flag_is_restored_after_an_error():
    def fail() -> None:
        with blas_fp32_matmul(torch.float32):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.backends.mkldnn.enabled
