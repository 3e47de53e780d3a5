"""Functions that must round alike on every processor."""

from __future__ import annotations

import math

import torch

from gradwire.kernels.rounding import square_root


def test_square_roots_are_those_of_ieee_754() -> None:
    """Python's own takes the processor's instruction, which the standard prescribes to the last bit."""
    x = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    assert square_root(x).tolist() == [math.sqrt(value) for value in x.tolist()]
    single = x.float()
    exact = [math.sqrt(value) for value in single.tolist()]  # in float64, which rounds to float32 without harm
    assert torch.equal(square_root(single), torch.tensor(exact, dtype=torch.float64).float())


def test_shapes_stay_and_meta_tensors_too() -> None:
    assert square_root(torch.tensor(4.0)).shape == ()
    assert square_root(torch.ones(2, 3).T).shape == (3, 2)
    assert square_root(torch.ones(2, 3, device="meta")).shape == (2, 3)
