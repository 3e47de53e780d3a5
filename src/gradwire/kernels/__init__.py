"""The same functions at several speeds, a folder for each theme.

| families | what they do |
|---|---|
| `selection`, `sparse`, `indices` | which elements are sent, what stands at them, and how their places are coded |
| `packing`, `block_int`, `sign`, `qsgd`, `ternary`, `floats`, `affine` | short codes of elements |
| `low_rank`, `transforms`, `sketch` | products with thin factors, transforms, count sketches |
| `robust` | what rows of several ranks have in common |
| `random`, `memory` | keyed random numbers, scaled additions |

A family says in its `__init__` what each kernel computes, and refuses what kernels would misread. Its `reference` is
the same in plain torch, on any device (`meta` too). Tensors on the CPU take `cpu`, written in numba, and those on a GPU
`cuda`, written in Triton, where the family has them, they are installed and the environment does not say
`GRADWIRE_KERNELS=reference`: `dispatch` chooses, and `gradwire methods --kernels` prints what there is. `runtime` and
`triton` hold what implementations share. All give the same bits, but for scales that are sums (`sign`'s mean, `qsgd`'s
norm): those may differ in the last place.

Callers say `kernels.NAME`. Three families are imported by name, since their functions mean something only together with
it: `from gradwire.kernels import indices, low_rank, robust`.

Tensors called `x`, `into` or `out` are 1-d, contiguous and float32: callers convert other dtypes. Tensors
that are written to are preallocated and written in full. A `block` is a positive multiple of 8, so that each
block starts at a byte, and the last one may be short.
"""

from __future__ import annotations

from gradwire.kernels import indices, low_rank, robust
from gradwire.kernels.affine import affine_decode, affine_encode
from gradwire.kernels.block_int import block_int_decode, block_int_encode
from gradwire.kernels.dispatch import SlowKernelsWarning
from gradwire.kernels.floats import (
    FLOAT8,
    bfloat16_encode,
    float8_decode,
    float8_encode,
    natural_decode,
    natural_encode,
)
from gradwire.kernels.memory import add_bf16_, add_scaled_, round_bf16
from gradwire.kernels.packing import pack_bits, packed_nbytes, unpack_bits
from gradwire.kernels.qsgd import qsgd_bits, qsgd_decode, qsgd_encode
from gradwire.kernels.random import gaussian, permuted_indices, stratified_indices
from gradwire.kernels.selection import all_finite, at_least, topk, topk_encode_keeping, topk_indices
from gradwire.kernels.sign import (
    majority,
    one_bit_decode,
    one_bit_encode,
    sign_decode,
    sign_encode,
)
from gradwire.kernels.sketch import count_sketch, count_unsketch
from gradwire.kernels.sparse import check_indices, gather, scatter_, scatter_add_
from gradwire.kernels.ternary import ternary_decode, ternary_encode, ternary_scales
from gradwire.kernels.transforms import combine_rows, hadamard_accumulate, hadamard_encode, topk_rows
from gradwire.kernels.warm import warm_up

__all__ = [
    "FLOAT8",
    "SlowKernelsWarning",
    "add_bf16_",
    "add_scaled_",
    "affine_decode",
    "affine_encode",
    "all_finite",
    "at_least",
    "bfloat16_encode",
    "block_int_decode",
    "block_int_encode",
    "check_indices",
    "combine_rows",
    "count_sketch",
    "count_unsketch",
    "float8_decode",
    "float8_encode",
    "gather",
    "gaussian",
    "hadamard_accumulate",
    "hadamard_encode",
    "indices",
    "low_rank",
    "majority",
    "natural_decode",
    "natural_encode",
    "one_bit_decode",
    "one_bit_encode",
    "pack_bits",
    "packed_nbytes",
    "permuted_indices",
    "qsgd_bits",
    "qsgd_decode",
    "qsgd_encode",
    "robust",
    "round_bf16",
    "scatter_",
    "scatter_add_",
    "sign_decode",
    "sign_encode",
    "stratified_indices",
    "ternary_decode",
    "ternary_encode",
    "ternary_scales",
    "topk",
    "topk_encode_keeping",
    "topk_indices",
    "topk_rows",
    "unpack_bits",
    "warm_up",
]
