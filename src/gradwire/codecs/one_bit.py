"""1-bit SGD: the sign of each element, and what it stands for on either side of zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gradwire import kernels
from gradwire.codecs.base import Float32Codec, as_float32, check_block
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload


@dataclass(frozen=True)
class OneBit(Float32Codec):
    """One bit an element; decodes to the mean of its block's elements >= 0, or to the mean of those below.

    The two values that minimise the error for the threshold 0 (Seide et al. 2014), so a projection, and a
    contraction with delta = (n+ mu+^2 + n- mu-^2) / ||x||^2 >= 1/block. Biased: error feedback is part of the method.
    Unlike `Sign` it keeps the mean of a block that is all of one sign, or leans to one side.

    Where it deviates: the paper's values are of a column of a weight matrix, here of `block` consecutive elements of
    a flat grain. PyTorch keeps the weights of one output unit side by side, so for a layer whose fan-in is a multiple
    of the block no block mixes two units; elsewhere some do.

    Args:
        block: elements that share two means; a multiple of 8. The default costs 1.125 bits an element.

    Raises:
        CompositionError: a block that is not a positive multiple of 8.

    References:
        Seide, Fu, Droppo, Li & Yu 2014, "1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs".

    >>> codec = OneBit(block=8)
    >>> x = torch.tensor([1.0, 3.0, -4.0, -6.0])
    >>> codec.decode(codec.encode(x), x)
    tensor([ 2.,  2., -5., -5.])
    """

    block: int = 512

    order_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    @override
    def granularity(self) -> int:
        return self.block

    def layout(self, numel: int, dtype: torch.dtype = torch.float32) -> Layout:
        """Two means a block, then bits."""
        blocks = -(-numel // self.block)
        return Layout((Field(torch.float32, 2 * blocks), Field(torch.uint8, kernels.packed_nbytes(numel, 1))))

    @override
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        kernels.one_bit_encode(as_float32(x), self.block, out[1], out[0])

    @override
    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        kernels.one_bit_decode(payload[1], payload[0], self.block, out)

    @override
    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        kernels.one_bit_decode(payload[1], payload[0], self.block, into, alpha)

    def contraction(self, numel: int) -> float | None:
        """1 / block, the worst case: a single positive entry among zeros."""
        return 1.0 / max(1, min(self.block, numel))
