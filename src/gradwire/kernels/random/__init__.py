"""Random numbers that depend on a key and a place alone, the same on every device: normal ones, and indices."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.checks import require_range
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.random import reference

__all__ = [
    "gaussian",
    "permuted_indices",
    "stratified_indices",
]

_gaussian = Kernel(reference.gaussian, "cpu")
_permuted_indices = Kernel(reference.permuted_indices, "cpu", "cuda")
_stratified_indices = Kernel(reference.stratified_indices, "cpu", "cuda")


def permuted_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
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
        seed: the key, 64 bits.
        numel: size of the range, below 2^31.
        k: 0 to numel.
        device: where to.

    Raises:
        ValueError: numel or k out of range.

    >>> sorted(permuted_indices(1, 5, 5, torch.device("cpu")).tolist())
    [0, 1, 2, 3, 4]
    """
    require_range("numel", numel, 0, 2**31 - 1)
    require_range("k", k, 0, numel)
    return _permuted_indices.on(device, k)(seed, numel, k, device)


def stratified_indices(seed: int, numel: int, k: int, device: torch.device) -> Tensor:
    """One index of each of k strata of a turned circle of numel: (k,) int32, increasing, and each is as likely.

    The first numel mod k strata have ceil(numel / k) neighbours each, the others floor(numel / k). Of stratum j it is

        base_j + (mix(mix(j ^ w_0) ^ w_1) * size_j >> 32) + turn   (mod numel),   turn = w * numel >> 64

    with `mix` as in `uniform`, w_0 and w_1 the halves of z_5, low first, and w = z_6. The turn makes each index come
    with probability k / numel exactly, whatever k is; strata make neighbours rarely come together, and all be found
    in one pass over memory.

    Args:
        seed: the key, 64 bits.
        numel: size of the range, below 2^31.
        k: 0 to numel.
        device: where to.

    Raises:
        ValueError: numel or k out of range.

    >>> stratified_indices(1, 5, 5, torch.device("cpu"))
    tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    """
    require_range("numel", numel, 0, 2**31 - 1)
    require_range("k", k, 0, numel)
    return _stratified_indices.on(device, k)(seed, numel, k, device)


def gaussian(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers that depend on `seed` and their places alone, the same bits on every processor.

        x_i = Phi^-1(u_i + 2^-25),   u_i = uniform(seed)_i

    The inverse of the normal distribution function is that of Wichura 1988 (PPND7, relative error below 1e-7), with
    additions, multiplications, divisions, square roots and a logarithm made of these, all in float64. Magnitudes end
    at 5.4. Drawn on the CPU, so that every device gets the same; a device of `meta` gets no numbers.

    Args:
        seed: the key, 64 bits.
        shape: of the result.
        device: where to.

    References:
        Wichura 1988, "Algorithm AS 241: the percentage points of the normal distribution".

    >>> gaussian(1, (2, 2), torch.device("cpu")).shape
    torch.Size([2, 2])
    """
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.float32, device=device)
    numel = torch.Size(shape).numel()
    drawn = _gaussian.on(torch.device("cpu"), numel)(seed, numel)
    return drawn.view(shape).to(device)
