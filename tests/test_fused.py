"""What an encoder leaves in its input is what its payload does not say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import PayloadError

N, BLOCK = 1031, 24


def gradient(seed: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def wire(bits: int) -> tuple[Tensor, Tensor]:
    return torch.empty(kernels.packed_nbytes(N, bits), dtype=torch.uint8), torch.empty(-(-N // BLOCK))


@pytest.mark.parametrize("key", [None, 3])
def test_block_int_leaves_what_it_does_not_say(key: int | None) -> None:
    x, y, payload, decoded = gradient(), gradient(), wire(5), torch.empty(N)
    kernels.block_int_encode(y, 5, BLOCK, key, *payload, keep=True)
    kernels.block_int_decode(*payload, 5, BLOCK, decoded)
    assert torch.equal(y, x - decoded)


def test_sign_and_qsgd_leave_what_they_do_not_say() -> None:
    x, decoded = gradient(), torch.empty(N)
    y, payload = gradient(), wire(1)
    kernels.sign_encode(y, BLOCK, *payload, keep=True)
    kernels.sign_decode(*payload, BLOCK, decoded)
    assert torch.equal(y, x - decoded)
    y, payload = gradient(), wire(5)
    kernels.qsgd_encode(y, 15, BLOCK, 3, *payload, keep=True)
    kernels.qsgd_decode(*payload, 15, BLOCK, decoded)
    assert torch.equal(y, x - decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 10, N])
def test_topk_leaves_what_it_does_not_send(dtype: torch.dtype, k: int) -> None:
    x, y = gradient(), gradient()
    values, indices = torch.empty(k, dtype=dtype), torch.empty(k, dtype=torch.int32)
    kernels.topk_encode_keeping(y, values, indices)
    assert torch.equal(indices, kernels.topk_indices(x, k))
    assert torch.equal(values, x[indices.long()].to(dtype))
    assert torch.equal(y, x - torch.zeros(N).index_add_(0, indices, values.float()))


def test_misuse_is_told() -> None:
    x, values, indices = gradient(), torch.empty(2), torch.empty(2, dtype=torch.int32)
    with pytest.raises(PayloadError, match="values has 1"):
        kernels.topk_encode_keeping(x, values[:1], indices)
    with pytest.raises(ValueError, match="k 2"):
        kernels.topk_encode_keeping(x[:1], values, indices)
    with pytest.raises(TypeError, match="float32 only"):
        kernels.topk_encode_keeping(x.half(), values, indices)
