"""What several references share, in plain torch: blocks as rows, the bits of floats, sums in a fixed order.

References hold for any device, `meta` included: no shape depends on data and nothing is read back to the host. Formulas
are spelled so that each float operation is one correctly rounded float32 operation; kernels in other languages repeat
them and agree bit for bit. Divisors are tensors on purpose: torch divides by a Python number on CUDA as a
multiplication by its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CANONICAL_NAN = 0x7F800001
"""All NaNs rank alike, above infinity, when magnitudes are compared as integers."""


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as int32, which orders as |x| does with NaN on top."""
    return x.view(torch.int32) & 0x7FFFFFFF


def rows_of_blocks(x: Tensor, block: int) -> Tensor:
    """A row for each block, the last one filled up with zeros."""
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def for_each_element(scales: Tensor, block: int, numel: int) -> Tensor:
    """The scale of its block, for each element."""
    return scales.repeat_interleave(block, output_size=scales.numel() * block)[:numel]


def inverse_of(scale: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels / scale, whether it can be used, and the scale to store.

    A block of zeros, or so near to it that the inverse overflows, is stored as zero. A scale that is not
    finite is kept, so that its block decodes to NaN and whoever looks for overflow finds it.
    """
    inverse = torch.full_like(scale, levels) / scale
    usable = torch.isfinite(inverse) & torch.isfinite(scale)
    return inverse, usable, torch.where(usable | ~torch.isfinite(scale), scale, 0.0)


def block_numels(numel: int, scales: Tensor, block: int) -> Tensor:
    """How many elements each block has, in float64: the last may be short."""
    numels = torch.full_like(scales, block, dtype=torch.float64)
    numels[-1:] = numel - (scales.numel() - 1) * block
    return numels


def floats_of_bits(bits: Tensor) -> Tensor:
    """float32 of the low 32 bits of int64 values."""
    return bits.to(torch.int32).view(torch.float32)


LANES = 32
SEGMENT = 1024
"""Elements whose sum is complete before the next segment's is added to it."""


def add_segments(total: Tensor, products: Tensor) -> Tensor:
    """`total` and the sums of `products` along the last dimension, float64, one segment after the other."""
    missing = -products.shape[-1] % SEGMENT
    whole = pad(products, (0, missing)) if missing else products
    steps = whole.unflatten(-1, (-1, SEGMENT // LANES, LANES))
    lanes = torch.zeros_like(steps[..., 0, :])
    for step in steps.unbind(-2):
        lanes = lanes + step
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    for segment in lanes[..., 0].unbind(-1):
        total = total + segment
    return total


def write_or_add(values: Tensor, out: Tensor, weight: float | None) -> None:
    """out = values; with a weight out += weight * values, where the product is rounded, then the sum."""
    if weight is None:
        out.copy_(values)
    else:
        out.add_(values * weight)
