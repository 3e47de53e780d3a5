"""The same functions at several speeds: selection, packing and rounding, each in a few passes over memory.

`reference` says what each does, in plain torch, on any device (`meta` too). Tensors on the CPU take `cpu`,
written in numba, and those on a GPU `cuda`, written in Triton, where these are installed and the environment does
not say `GRADWIRE_KERNELS=reference`. All give the same bits, but for scales that are sums (`sign`'s mean, `qsgd`'s
norm): those may differ in the last place.

Tensors called `x`, `into` or `out` are 1-d, contiguous and float32: callers convert other dtypes. Tensors
that are written to are preallocated and written in full. A `block` is a positive multiple of 8, so that each
block starts at a byte, and the last one may be short. Packed streams are little-endian: code i has bits [i *
bits, (i + 1) * bits).
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor

from gradwire.core.errors import PayloadError
from gradwire.kernels import choice, pool, reference

__all__ = [
    "SlowKernelsWarning",
    "all_finite",
    "block_int_accumulate",
    "block_int_decode",
    "block_int_encode",
    "check_indices",
    "gather",
    "pack_bits",
    "packed_nbytes",
    "permuted_indices",
    "qsgd_accumulate",
    "qsgd_bits",
    "qsgd_decode",
    "qsgd_encode",
    "scatter_",
    "scatter_add_",
    "sign_accumulate",
    "sign_decode",
    "sign_encode",
    "stratified_indices",
    "topk",
    "topk_indices",
    "uniform",
    "unpack_bits",
    "warm_up",
]

CODE_DTYPES = {8: torch.uint8, 16: torch.int32}


class SlowKernelsWarning(UserWarning):
    """numba or triton is missing, and a tensor came by that is large enough for it to matter."""


# Dispatch ---------------------------------------------------------------------------------------------------


@functools.cache
def _cpu_kernels() -> ModuleType | None:
    """The numba kernels, imported at first use since that takes a second; None where there are none."""
    if choice.reference_only():
        return None
    try:
        from gradwire.kernels import cpu
    except ImportError:
        return None
    return cpu


@functools.cache
def _warn_slow() -> None:
    if not choice.reference_only():
        warnings.warn(
            "numba is not installed, so compression runs in plain torch, many times slower on the CPU: "
            "`pip install numba`, or set GRADWIRE_KERNELS=reference to say that this is meant",
            SlowKernelsWarning,
            stacklevel=4,
        )


@functools.cache
def _cuda_kernels() -> ModuleType | None:
    """The Triton kernels, imported at first use; None where there are none."""
    if choice.reference_only():
        return None
    try:
        from gradwire.kernels import cuda
    except ImportError:
        return None
    return cuda


@functools.cache
def _warn_without_triton() -> None:
    if not choice.reference_only():
        warnings.warn(
            "triton is not installed, so compression on the GPU runs in plain torch, several times slower: "
            "`pip install triton`, or set GRADWIRE_KERNELS=reference to say that this is meant",
            SlowKernelsWarning,
            stacklevel=5,
        )


def _gpu_kernels(numel: int) -> ModuleType:
    kernels = _cuda_kernels()
    if kernels is None and numel > pool.SERIAL_NUMEL:
        _warn_without_triton()
    return kernels or reference


def _kernels(device: torch.device, numel: int) -> ModuleType:
    if device.type == "cuda":
        return _gpu_kernels(numel)
    if device.type != "cpu":
        return reference
    kernels = _cpu_kernels()
    if kernels is None and numel > pool.SERIAL_NUMEL:
        _warn_slow()
    return kernels or reference


def warm_up() -> None:
    """Call every kernel once, so that compiling is done, and kept on disk, before the first training step."""
    from gradwire.kernels import indices as places
    from gradwire.kernels import lowrank, quantise, robust

    for module in (places, lowrank, quantise, robust):
        module.warm_up()
    x = torch.arange(24, dtype=torch.float32) - 12.0
    cpu = x.device
    all_finite(x)
    indices, _ = topk(x, 3)
    scatter_(x.clone(), indices, x[:3])
    check_indices(indices, x.numel())
    scatter_add_(x, permuted_indices(1, x.numel(), 3, cpu), gather(x, indices))
    stratified_indices(1, x.numel(), 3, cpu)
    uniform(1, 8, cpu)
    for bits in (8, 16):
        packed = torch.empty(packed_nbytes(24, bits), dtype=torch.uint8)
        pack_bits(x.to(CODE_DTYPES[bits]).abs(), bits, packed)
        unpack_bits(packed, bits, 24)
    packed, scales = torch.empty(packed_nbytes(24, 8), dtype=torch.uint8), torch.empty(3, dtype=torch.float32)
    block_int_encode(x, 8, 8, None, packed, scales)
    block_int_accumulate(packed, scales, 8, 8, x)
    block_int_decode(packed, scales, 8, 8, x)
    sign_encode(x, 8, packed[:3], scales)
    sign_accumulate(packed[:3], scales, 8, x)
    sign_decode(packed[:3], scales, 8, x)
    for levels in (15, 255):
        packed = torch.empty(packed_nbytes(24, qsgd_bits(levels)), dtype=torch.uint8)
        qsgd_encode(x, levels, 8, 1, packed, scales)
        qsgd_accumulate(packed, scales, levels, 8, x)
        qsgd_decode(packed, scales, levels, 8, x)


# Checks -----------------------------------------------------------------------------------------------------


def _require(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse what a kernel would misread.

    Raises:
        TypeError: another dtype.
        ValueError: not 1-d and contiguous.
    """
    if tensor.dtype != dtype:
        hint = "; convert float16, bfloat16 and float64 with .float() first" if dtype == torch.float32 else ""
        raise TypeError(f"{name} is {tensor.dtype}, and kernels take {dtype} only{hint}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; kernels take 1-d "
            "contiguous tensors, so pass .contiguous().view(-1)"
        )


def _require_size(name: str, tensor: Tensor, numel: int) -> None:
    """Refuse a wire of another size, which would be read or written out of bounds.

    Raises:
        PayloadError: naming both sizes.
    """
    if tensor.numel() != numel:
        raise PayloadError(f"{name} has {tensor.numel()} elements where {numel} are needed")


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} {value} is outside {low} to {high}")


def _check_blocks(x: Tensor, packed: Tensor, scales: Tensor, bits: int, block: int) -> None:
    if block < 8 or block % 8:
        raise ValueError(f"block {block} is not a positive multiple of 8")
    _require("the tensor", x, torch.float32)
    _require("packed", packed, torch.uint8)
    _require("scales", scales, torch.float32)
    _require_size("packed", packed, packed_nbytes(x.numel(), bits))
    _require_size("scales", scales, -(-x.numel() // block))


# Selection --------------------------------------------------------------------------------------------------


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, as a 0-d bool. Any shape, any floating dtype; one reading pass.

    >>> all_finite(torch.tensor([1.0, float("inf")]))
    tensor(False)
    """
    simple = x.dtype == torch.float32 and x.is_contiguous()
    return (_kernels(x.device, x.numel()) if simple else reference).all_finite(x)


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices of the k elements of largest |x|, int32, increasing. Ties go to the lowest index; NaN is largest.

    Args:
        x: (numel,), numel < 2^31.
        k: 0 to numel.

    Raises:
        ValueError: k out of range.

    >>> topk_indices(torch.tensor([1.0, -3.0, 0.5, 3.0, 3.0]), 2)
    tensor([1, 3], dtype=torch.int32)
    """
    _require("x", x, torch.float32)
    _require_range("numel", x.numel(), 0, 2**31 - 1)
    _require_range("k", k, 0, x.numel())
    return _kernels(x.device, x.numel()).topk_indices(x, k)


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`topk_indices(x, k)` and x there, (k,) float32; all NaN may come as one.

    Args:
        x: (numel,), numel < 2^31.
        k: 0 to numel.
        values: (k,) of any floating dtype: written, rounded, and returned, where it is given.

    Raises:
        ValueError: k out of range, or `values` of another size.

    >>> topk(torch.tensor([1.0, -3.0, 0.5, 3.0, 3.0]), 2)
    (tensor([1, 3], dtype=torch.int32), tensor([-3.,  3.]))
    """
    _require("x", x, torch.float32)
    _require_range("numel", x.numel(), 0, 2**31 - 1)
    _require_range("k", k, 0, x.numel())
    if values is not None:
        _require_size("values", values, k)
    return _kernels(x.device, x.numel()).topk(x, k, values)


def gather(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """x[indices], (k,) float32, in `out` where that is given.

    That the int32 indices lie within `x` is the caller's duty: `check_indices`.

    >>> gather(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, 0], dtype=torch.int32))
    tensor([7., 5.])
    """
    _require("x", x, torch.float32)
    _require("indices", indices, torch.int32)
    if out is None:
        out = torch.empty(indices.numel(), dtype=torch.float32, device=x.device)
    _require("out", out, torch.float32)
    _require_size("out", out, indices.numel())
    _kernels(x.device, indices.numel()).gather(x, indices, out)
    return out


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """into[indices] += alpha * values, in order of `indices`, which may repeat.

    Args:
        into: (numel,), changed in place.
        indices: (k,) int32; that they lie within `into` is the caller's duty: see `check_indices`.
        values: (k,) of any floating dtype, taken to float32.
        alpha: rounded to float32.
        distinct: no index repeats, whatever came over the wire, so that any order will do, and several at once.

    >>> x = torch.zeros(3)
    >>> scatter_add_(x, torch.tensor([2, 2], dtype=torch.int32), torch.tensor([1.0, 2.0]), alpha=0.5)
    >>> x
    tensor([0.0000, 0.0000, 1.5000])
    """
    _require("into", into, torch.float32)
    _require("indices", indices, torch.int32)
    _require_size("values", values, indices.numel())
    _kernels(into.device, indices.numel()).scatter_add_(into, indices, values.contiguous(), alpha, distinct)


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """out = 0, and out[indices] += values, in order of `indices`. One pass where these increase, and a CPU does it.

    Args:
        out: (numel,), overwritten.
        indices: (k,) int32 in [0, numel], where numel is none; that they are is the caller's duty: see `check_indices`.
        values: (k,) of any floating dtype, taken to float32; 0 for those that are none.

    >>> x = torch.ones(3)
    >>> scatter_(x, torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2.0, 0.0]))
    >>> x
    tensor([0., 2., 0.])
    """
    _require("out", out, torch.float32)
    _require("indices", indices, torch.int32)
    _require_size("values", values, indices.numel())
    _kernels(out.device, out.numel()).scatter_(out, indices, values.contiguous())


def check_indices(indices: Tensor, numel: int) -> None:
    """Refuse indices from the wire that point outside. On other devices than the CPU nothing is read.

    Raises:
        PayloadError: an index outside [0, numel).

    >>> check_indices(torch.tensor([0, 2], dtype=torch.int32), 3)
    """
    _require("indices", indices, torch.int32)
    if indices.device.type != "cpu":
        return
    kernels = _cpu_kernels()
    if kernels is not None:
        within = kernels.indices_within(indices, numel)
    else:
        within = bool(((indices >= 0) & (indices < numel)).all())
    if not within:
        raise PayloadError(
            f"an index of the payload lies outside [0, {numel}): it was damaged, or is of another tensor"
        )


# Random bits ------------------------------------------------------------------------------------------------


def uniform(bits: int, numel: int, device: torch.device, start: int = 0) -> Tensor:
    """Draw (numel,) float32 uniform in [0, 1): element i depends on `bits` and start + i alone.

    Counter-based, and the same on every device. With c = start + i:

        z_j = splitmix64's j-th output from seed `bits`;  k0, k1 = low and high half of z_1
        mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16   (mod 2^32)
        u = (mix(mix(c ^ k0) ^ k1) >> 8) * 2^-24

    Raises:
        ValueError: start + numel beyond 2^32, where the counter would repeat.

    References:
        `mix` is lowbias32 of Wellons, "Prospecting for hash functions" (2018); splitmix64 is of Steele, Lea &
        Flood 2014, "Fast splittable pseudorandom number generators".

    >>> cpu = torch.device("cpu")
    >>> bool((uniform(7, 5, cpu)[2:] == uniform(7, 3, cpu, start=2)).all())
    True
    """
    _require_range("start", start, 0, 2**32)
    _require_range("numel", numel, 0, 2**32 - start)
    return _kernels(device, numel).uniform(bits, numel, device, start)


def permuted_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """The first k values of a keyed permutation of range(numel): k distinct indices, int32, in O(k) memory.

    A Feistel network of six rounds on a grid of a by b points, a = ceil(sqrt(numel)), b = ceil(numel / a).
    Index x
    stands for (l, r) = (x // b, x % b), and rounds take turns:

        l = (l + (mix(r ^ w_0) * a >> 32)) mod a;   r = (r + (mix(l ^ w_1) * b >> 32)) mod b;   ...

    with `mix` as in `uniform` and w the 32-bit halves, low first, of z_2, z_3, z_4. Where x comes out at
    numel or beyond (fewer than a points are) it goes through again, up to min(a * b - numel, ceil(128 / log2
    numel)) times, so that nothing is read back from a device to count. What is outside then, with chance
    2^-64 at most, is x - numel.

    Args:
        bits: the key, 64 bits.
        numel: size of the range, below 2^31.
        k: 0 to numel.
        device: where to.

    Raises:
        ValueError: numel or k out of range.

    >>> sorted(permuted_indices(1, 5, 5, torch.device("cpu")).tolist())
    [0, 1, 2, 3, 4]
    """
    _require_range("numel", numel, 0, 2**31 - 1)
    _require_range("k", k, 0, numel)
    return _kernels(device, k).permuted_indices(bits, numel, k, device)


def stratified_indices(bits: int, numel: int, k: int, device: torch.device) -> Tensor:
    """One index of each of k strata of a turned circle of numel: (k,) int32, increasing, and each is as likely.

    The first numel mod k strata have ceil(numel / k) neighbours each, the others floor(numel / k). Of stratum j it is

        base_j + (mix(mix(j ^ w_0) ^ w_1) * size_j >> 32) + turn   (mod numel),   turn = w * numel >> 64

    with `mix` as in `uniform`, w_0 and w_1 the halves of z_5, low first, and w = z_6. The turn makes each index come
    with probability k / numel exactly, whatever k is; strata make neighbours rarely come together, and all be found
    in one pass over memory.

    Args:
        bits: the key, 64 bits.
        numel: size of the range, below 2^31.
        k: 0 to numel.
        device: where to.

    Raises:
        ValueError: numel or k out of range.

    >>> stratified_indices(1, 5, 5, torch.device("cpu"))
    tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    """
    _require_range("numel", numel, 0, 2**31 - 1)
    _require_range("k", k, 0, numel)
    return _kernels(device, k).stratified_indices(bits, numel, k, device)


# Packing ----------------------------------------------------------------------------------------------------


def packed_nbytes(numel: int, bits: int) -> int:
    """Bytes that `numel` codes of `bits` bits take: ceil(numel * bits / 8).

    >>> packed_nbytes(3, 5)
    2
    """
    return -(-numel * bits // 8)


def _code_dtype(bits: int) -> torch.dtype:
    return CODE_DTYPES[8 if bits <= 8 else 16]


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes side by side, the first in the lowest bits of the first byte; bits to spare are zero.

    Args:
        codes: (numel,) below 2^bits; uint8, or int32 for more than 8 bits.
        bits: 1 to 16.
        out: (packed_nbytes(numel, bits),) uint8.

    Raises:
        ValueError: bits out of range, or an `out` of another size.
        TypeError: codes of another dtype.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), 4, out)
    >>> out.tolist() == [0x21, 0x03]
    True
    """
    _require_range("bits", bits, 1, 16)
    _require("codes", codes, _code_dtype(bits))
    _require("out", out, torch.uint8)
    _require_size("out", out, packed_nbytes(codes.numel(), bits))
    _kernels(codes.device, codes.numel()).pack_bits(codes, bits, out)


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes `pack_bits` was given: (numel,) uint8, or int32 for more than 8 bits.

    Raises:
        ValueError: bits out of range.
        PayloadError: `packed` of another size than packed_nbytes(numel, bits).

    >>> unpack_bits(torch.tensor([0x21, 0x03], dtype=torch.uint8), 4, 3)
    tensor([1, 2, 3], dtype=torch.uint8)
    """
    _require_range("bits", bits, 1, 16)
    _require("packed", packed, torch.uint8)
    _require_size("packed", packed, packed_nbytes(numel, bits))
    return _kernels(packed.device, numel).unpack_bits(packed, bits, numel)


# Blocks -----------------------------------------------------------------------------------------------------


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    """Round to 2L + 1 levels of the block's largest magnitude, L = 2^(bits-1) - 1; one pass.

        scale = max |x| over the block
        q = rint(x * (L / scale)), ties to even, with key None
        q = clamp(floor(x * (L / scale) + u_i), -L, L) with a key

    with u = `uniform(key, numel)`; the code is q + L. Where L / scale overflows (a block of zeros, or nearly)
    q and the stored scale are 0. Where a block holds NaN or infinity its scale is that and q is 0: it decodes
    to NaN.

    Args:
        x: (numel,).
        bits: 2 to 8.
        block: elements that share a scale, a multiple of 8.
        key: of stochastic rounding, or None for rounding to nearest.
        packed: (packed_nbytes(numel, bits),) uint8, written.
        scales: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded, in the same pass.

    Raises:
        ValueError: bits, block or a size that does not fit.
        TypeError: x is not float32.

    >>> packed, scales = torch.empty(2, dtype=torch.uint8), torch.empty(1)
    >>> block_int_encode(torch.tensor([0.0, 7.0, -3.0, 1.4]), 4, 8, None, packed, scales)
    >>> unpack_bits(packed, 4, 4), scales
    (tensor([ 7, 14,  4,  8], dtype=torch.uint8), tensor([7.]))
    """
    _require_range("bits", bits, 2, 8)
    _check_blocks(x, packed, scales, bits, block)
    _kernels(x.device, x.numel()).block_int_encode(x, bits, block, key, packed, scales, keep)


def block_int_accumulate(
    packed: Tensor, scales: Tensor, bits: int, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """into += alpha * (q * (scale / L)), the inverse of `block_int_encode`; one pass.

    Raises:
        ValueError: bits or block out of range.
        PayloadError: a size that does not fit.
    """
    _require_range("bits", bits, 2, 8)
    _check_blocks(into, packed, scales, bits, block)
    _kernels(into.device, into.numel()).block_int_accumulate(packed, scales, bits, block, into, alpha)


def block_int_decode(packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor) -> None:
    """out = q * (scale / L). Raises as `block_int_accumulate`."""
    _require_range("bits", bits, 2, 8)
    _check_blocks(out, packed, scales, bits, block)
    _kernels(out.device, out.numel()).block_int_decode(packed, scales, bits, block, out)


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    """One bit an element, 1 where x >= 0 (so for -0.0, and not for NaN), and scale = mean |x| over the block.

    The mean is taken in float64 and rounded once; its order of summation is not specified.

    Args:
        x: (numel,).
        block: elements that share a scale, a multiple of 8.
        packed: (packed_nbytes(numel, 1),) uint8, written.
        scales: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded, in the same pass.

    Raises:
        ValueError: block or a size that does not fit.
        TypeError: x is not float32.

    >>> packed, scales = torch.empty(1, dtype=torch.uint8), torch.empty(1)
    >>> sign_encode(torch.tensor([1.0, -2.0, 3.0]), 8, packed, scales)
    >>> packed.tolist(), scales.tolist()
    ([5], [2.0])
    """
    _check_blocks(x, packed, scales, 1, block)
    _kernels(x.device, x.numel()).sign_encode(x, block, packed, scales, keep)


def sign_accumulate(packed: Tensor, scales: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * (scale where the bit is 1, else -scale); one pass.

    Raises:
        ValueError: block out of range.
        PayloadError: a size that does not fit.
    """
    _check_blocks(into, packed, scales, 1, block)
    _kernels(into.device, into.numel()).sign_accumulate(packed, scales, block, into, alpha)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """out = scale where the bit is 1, else -scale. Raises as `sign_accumulate`."""
    _check_blocks(out, packed, scales, 1, block)
    _kernels(out.device, out.numel()).sign_decode(packed, scales, block, out)


def qsgd_bits(levels: int) -> int:
    """Bits of a code of `qsgd_encode`: ceil(log2(levels + 1)) and a sign.

    >>> qsgd_bits(1), qsgd_bits(15), qsgd_bits(16)
    (2, 5, 6)
    """
    return levels.bit_length() + 1


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    """Round |x| at random to `levels` levels of the block's Euclidean norm.

        norm = ||x||_2 over the block
        level = min(levels, floor(|x| * (levels / norm) + u_i)),  u = uniform(key, numel)
        code = level | (x < 0) << (qsgd_bits(levels) - 1)

    The norm is taken in float64 and rounded once; its order of summation is not specified. Where levels /
    norm overflows codes and norm are 0. Where the norm is NaN or beyond float32 it is kept and codes are 0:
    the block decodes to NaN.

    Args:
        x: (numel,).
        levels: 1 to 32767.
        block: elements that share a norm, a multiple of 8.
        key: of the rounding.
        packed: (packed_nbytes(numel, qsgd_bits(levels)),) uint8, written.
        norms: (ceil(numel / block),) float32, written.
        keep: leave in `x` what was not encoded, x - decoded.

    Raises:
        ValueError: levels, block or a size that does not fit.
        TypeError: x is not float32.

    References:
        Alistarh et al. 2017, "QSGD", section 3.1.

    >>> packed, norms = torch.empty(1, dtype=torch.uint8), torch.empty(1)
    >>> qsgd_encode(torch.tensor([-2.0, 0.0]), 4, 8, 0, packed, norms)
    >>> unpack_bits(packed, 4, 2).tolist(), norms.tolist()  # level 4, negative
    ([12, 0], [2.0])
    """
    _require_range("levels", levels, 1, 32767)
    _check_blocks(x, packed, norms, qsgd_bits(levels), block)
    _kernels(x.device, x.numel()).qsgd_encode(x, levels, block, key, packed, norms, keep)


def qsgd_accumulate(packed: Tensor, norms: Tensor, levels: int, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """into += alpha * sign * level * (norm / levels); one pass.

    Raises:
        ValueError: levels or block out of range.
        PayloadError: a size that does not fit.
    """
    _require_range("levels", levels, 1, 32767)
    _check_blocks(into, packed, norms, qsgd_bits(levels), block)
    _kernels(into.device, into.numel()).qsgd_accumulate(packed, norms, levels, block, into, alpha)


def qsgd_decode(packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor) -> None:
    """out = sign * level * (norm / levels). Raises as `qsgd_accumulate`."""
    _require_range("levels", levels, 1, 32767)
    _check_blocks(out, packed, norms, qsgd_bits(levels), block)
    _kernels(out.device, out.numel()).qsgd_decode(packed, norms, levels, block, out)
