"""What is compiled before the first step: each reducer once, on the largest grain it has."""

from __future__ import annotations

import torch

from gradwire import parse
from gradwire.core.grain import flat_grain, matrix_grain
from gradwire.drivers import dry_run
from gradwire.drivers.plan import Unit


def test_each_reducer_runs_once_a_dtype_on_its_largest_grain() -> None:
    small, large = flat_grain(10), flat_grain(30)
    int4, power = parse("int4"), parse("powersgd:2")
    units = [Unit(small, int4), Unit(large, int4), Unit(small, int4), Unit(matrix_grain(6, 5), power)]
    units.append(Unit(flat_grain(20, dtype=torch.float64), int4))
    found = list(dry_run._distinct(units, 2))  # pyright: ignore[reportPrivateUsage]
    assert [(unit.reducer, unit.grain.dtype, unit.grain.numel) for unit in found] == [
        (int4, torch.float32, 30),
        (power, torch.float32, 30),
        (int4, torch.float64, 20),
    ]
