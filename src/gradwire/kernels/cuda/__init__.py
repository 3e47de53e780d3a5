"""The kernels for GPUs, in Triton: the same functions, with the same bits, in few passes over memory.

Nothing here waits for the device, branches on the host on what a tensor holds, or has a shape that depends on data. The
same code runs without a GPU, on CPU tensors, where `TRITON_INTERPRET=1` is set before triton is imported: that is how
it is tested. Formulas are those of `gradwire.kernels.reference`, one rounding an operation: divisions are IEEE's, ties
go to even, and multiplications are never fused with additions. Sums are taken in float64, in an order of their own.
"""

from __future__ import annotations

from gradwire.kernels.cuda import matrices
from gradwire.kernels.cuda.blocks import (
    block_int_accumulate,
    block_int_decode,
    block_int_encode,
    qsgd_accumulate,
    qsgd_decode,
    qsgd_encode,
    sign_accumulate,
    sign_decode,
    sign_encode,
)
from gradwire.kernels.cuda.packing import pack_bits, unpack_bits
from gradwire.kernels.cuda.random import permuted_indices, stratified_indices, uniform
from gradwire.kernels.cuda.selection import (
    all_finite,
    gather,
    scatter_,
    scatter_add_,
    scatter_add_rows_,
    topk,
    topk_encode_keeping,
    topk_feedback,
    topk_indices,
)
from gradwire.kernels.cuda.two_shot import block_int_reduce

__all__ = [
    "all_finite",
    "block_int_accumulate",
    "block_int_decode",
    "block_int_encode",
    "block_int_reduce",
    "gather",
    "matrices",
    "pack_bits",
    "permuted_indices",
    "qsgd_accumulate",
    "qsgd_decode",
    "qsgd_encode",
    "scatter_",
    "scatter_add_",
    "scatter_add_rows_",
    "sign_accumulate",
    "sign_decode",
    "sign_encode",
    "stratified_indices",
    "topk",
    "topk_encode_keeping",
    "topk_feedback",
    "topk_indices",
    "uniform",
    "unpack_bits",
]
