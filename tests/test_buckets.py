"""How finely DDP hands gradients over, and that its meaning stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bucket_cases import OPTIONS
from gradwire.adapters.buckets import bucket_bytes, caps_by, deliver_in_pieces
from gradwire.drivers.window import Caps
from gradwire.ranks.supervised import run_function
from gradwire.session.overlap_settings import OverlapSettings

CASES = Path(__file__).with_name("bucket_cases.py")


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    return run_function(f"{CASES}:variants", 2, {}, deadline_s=120)


@pytest.mark.parametrize("variant", OPTIONS)
def test_parameters_are_those_of_ddp_alone(found: list[dict[str, dict[str, Any]]], variant: str) -> None:
    """To the bit: two ranks have one order to add up in."""
    assert len({rank[variant][how] for rank in found for how in ("alone", "attached")}) == 1


def test_a_small_model_comes_in_several_buckets(found: list[dict[str, dict[str, Any]]]) -> None:
    """DDP alone would hand its 1.5 MiB over in two; sizes that a user wrote out stay."""
    assert {variant: rows["buckets"] for variant, rows in found[0].items()} == {
        "plain": 6,
        "no_sync": 6,
        "join": 6,
        "as_view": 6,
        "unused": 7,  # never rebuilt in the order in which gradients come
        "static": 6,
        "sizes": 3,
    }


class _Ddp:
    """What is asked of a DDP."""

    bucket_bytes_cap = 1000


def test_smaller_buckets_stay() -> None:
    ddp: Any = _Ddp()
    caps = caps_by(ddp, OverlapSettings(), 1 << 30)
    assert caps == Caps(1000, 1000)
    deliver_in_pieces(ddp, caps)
    assert not vars(ddp)


def test_settings_say_more_than_the_model_does() -> None:
    ddp: Any = _Ddp()
    assert caps_by(ddp, OverlapSettings(bucket_bytes=5000), 1 << 30) == Caps(5000, 5000)
    assert caps_by(ddp, OverlapSettings(first_bucket_bytes=10), 1 << 30) == Caps(10, 1000)


def test_a_bucket_is_a_sixteenth_of_a_model_that_is_not_small() -> None:
    assert bucket_bytes(sum(p.numel() * 4 for p in nn.Linear(1024, 4096).parameters())) == (4096 * 1025 * 4) // 16
