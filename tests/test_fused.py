"""Laws of `kernels.fused` where it is made of other kernels, which is what those in one pass must equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import PayloadError
from gradwire.kernels import fused

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
def test_a_step_of_error_feedback_over_topk(dtype: torch.dtype, k: int) -> None:
    x, residual = gradient(), gradient(1)
    y = residual * 0.5 + x
    values, indices = torch.empty(k, dtype=dtype), torch.empty(k, dtype=torch.int32)
    fused.topk_feedback(x, residual, 0.5, values, indices)
    assert torch.equal(indices, kernels.topk_indices(y, k))
    assert torch.equal(values, y[indices.long()].to(dtype))
    sent = torch.zeros(N).index_add_(0, indices, values.float())
    assert torch.equal(residual, y - sent)


def test_rows_are_added_in_order() -> None:
    indices = torch.tensor([[0, 2], [1, 2], [2, 3]], dtype=torch.int32)
    values = torch.tensor([[1.0, 1e8], [2.0, 1.0], [-1e8, 3.0]])
    into = torch.zeros(4)
    fused.scatter_add_rows_(into, indices, values)
    assert into.tolist() == [1.0, 2.0, 0.0, 3.0]


@pytest.mark.parametrize("owes", [True, False])
def test_the_owner_s_part_of_a_two_shot(owes: bool) -> None:
    rows = [wire(4) for _ in range(3)]
    y = torch.zeros(N)
    for seed, row in enumerate(rows):
        kernels.block_int_encode(gradient(seed), 4, BLOCK, None, *row)
        kernels.block_int_accumulate(*row, 4, BLOCK, y, 1 / 3)
    owner, payload, expected = gradient(7) if owes else None, wire(8), wire(8)
    if owner is not None:
        y += owner
    packed, scales = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    fused.block_int_reduce(packed, scales, 4, BLOCK, owner, 8, None, *payload, N, 1 / 3)
    kernels.block_int_encode(y, 8, BLOCK, None, *expected)
    assert torch.equal(payload[0], expected[0])
    assert torch.equal(payload[1], expected[1])
    if owner is not None:
        kernels.block_int_accumulate(*expected, 8, BLOCK, y, -1.0)
        assert torch.equal(owner, y)


def test_misuse_is_told() -> None:
    x, values, indices = gradient(), torch.empty(2), torch.empty(2, dtype=torch.int32)
    with pytest.raises(PayloadError, match="values has 1"):
        fused.topk_encode_keeping(x, values[:1], indices)
    with pytest.raises(ValueError, match="k 2"):
        fused.topk_encode_keeping(x[:1], values, indices)
    with pytest.raises(PayloadError, match="residual has 3"):
        fused.topk_feedback(x, x[:3].clone(), 1.0, values, indices)
    with pytest.raises(TypeError, match="float32 only"):
        fused.topk_encode_keeping(x.half(), values, indices)
    with pytest.raises(ValueError, match="rows, k"):
        fused.scatter_add_rows_(x, indices, values)
