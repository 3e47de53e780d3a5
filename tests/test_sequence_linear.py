"""Linear layers that are split over the ranks of a sequence: every output and gradient is that of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from gradwire.core.errors import AttachError, CompositionError
from gradwire.parallel.sequences import (
    Contiguous,
    ExchangeAxis,
    OverlappedColwiseParallel,
    gathered_linear,
    scattered_linear,
)
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("sequence_linear_cases.py"))
CASE = {"batch": 2, "length": 24, "width": 16, "inner": 32, "seed": 3}


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """A feed-forward layer of a small size, in which some ranks may have no position."""
    return {
        "batch": draw(st.integers(1, 3)),
        "length": draw(st.integers(1, 30)),
        "width": draw(st.integers(1, 9)),
        "inner": draw(st.integers(8, 20)),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("ranks", [2, 4, 8, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.draw(1)
def test_outputs_and_gradients_are_those_of_one_process(ranks: int) -> None:
    @given(cases=st.lists(layers(), min_size=8, max_size=12))
    @settings(max_examples=3, phases=[Phase.generate])  # to shrink a case would start ranks again and again
    def check(cases: list[dict[str, Any]]) -> None:
        for errors in run_function(f"{CASES}:twin_errors", ranks, {"cases": cases}, 120):
            assert max(errors) < 1e-12, list(zip(errors, cases, strict=True))

    check()


def test_float32_is_that_of_one_process_to_rounding() -> None:
    for errors in run_function(f"{CASES}:twin_errors", 4, {"cases": [CASE], "dtype": "float32"}, 120):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("ranks", [2, 8])
def test_bfloat16_is_no_worse_than_in_one_process(ranks: int) -> None:
    (alone,) = run_function(f"{CASES}:alone_in_bfloat16", 1, {"case": CASE}, 120)
    for (error,) in run_function(f"{CASES}:twin_errors", ranks, {"cases": [CASE], "dtype": "bfloat16"}, 120):
        assert error <= 1.5 * alone


def test_positions_in_eight_bits_are_what_every_rank_multiplies() -> None:
    told = {"case": CASE | {"codec": "int8:16", "length": 23}}
    assert max(run_function(f"{CASES}:through_codec", 4, told, 120)) < 1e-4


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize(
    ("dtype", "codec", "length"),
    [("float32", None, 26), ("float64", None, 24), ("bfloat16", None, 3), ("bfloat16", "int8:128", 26)],
)
def test_what_is_sent_is_what_the_docstrings_say(dtype: str, codec: str | None, length: int) -> None:
    ranks, width, batch = 4, 128, 2
    case = CASE | {"width": width, "length": length, "codec": codec, "gradient_codec": codec}
    w, a = {"float32": (4, 4), "float64": (8, 8), "bfloat16": (2, 4)}[dtype]
    row = width * w if codec is None else width + 4
    layout = Contiguous(length, ranks)
    found = run_function(f"{CASES}:sent", ranks, {"case": case, "dtype": dtype}, 120)
    for place, sent in enumerate(found):
        gathered = batch * row * (length - layout.count((place + 1) % ranks))
        sums = batch * width * a * (length - layout.count(place))
        compared = 56 * (ranks - 1)
        assert tuple(sent) == (gathered + compared, gathered + sums, sums + compared, gathered)
    if codec is not None:
        assert width * w >= 1.9 * row


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_block_under_sequence_parallelism_is_that_of_one_process(ranks: int, overlapped: bool) -> None:
    assert max(run_function(f"{CASES}:recipe", ranks, {"overlapped": overlapped}, 120)) < 1e-12


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("way", ["gathered", "scattered"])
@pytest.mark.parametrize(
    ("fault", "of_the_others", "of_the_one"),
    [
        ("columns", "different numbers of faulty inputs", "do not fit each other"),
        ("width", "different widths; give the same on all ranks", None),
        ("positions", "different numbers of faulty inputs", "positions on rank 1, where the layout wants"),
        ("ranks", "different numbers of faulty inputs", "the layout is of 3 ranks, and the axis has 2: make it with"),
        ("dtype", "different dtypes; give the same on all ranks", None),
        ("codec", "different layouts or codecs; give the same on all ranks", None),
    ],
)
def test_what_one_rank_gives_wrong_is_told_on_all(
    way: str, fault: str, of_the_others: str, of_the_one: str | None
) -> None:
    first, second = run_function(f"{CASES}:faulty", 2, {"fault": fault, "way": way}, 120)
    assert of_the_others in first
    assert (of_the_one or of_the_others) in second


def test_a_codec_whose_blocks_do_not_divide_is_refused_before_anything_travels() -> None:
    axis, x, weight = ExchangeAxis(), torch.randn(1, 4, 12), torch.randn(12, 12)
    with pytest.raises(CompositionError, match="does not divide rows of 12"):
        gathered_linear(x, weight, None, axis, Contiguous(4, 1), codec="int8:8")
    with pytest.raises(CompositionError, match="does not divide rows of 12"):
        scattered_linear(x, weight, None, axis, Contiguous(4, 1), gradient_codec="int8:8")


def test_what_is_frozen_has_no_gradient() -> None:
    axis, x = ExchangeAxis(), torch.randn(1, 4, 6, requires_grad=True)
    up, down = torch.randn(8, 6), torch.randn(6, 8)
    hidden = gathered_linear(x, up, None, axis, Contiguous(4, 1))
    scattered_linear(hidden, down, None, axis, Contiguous(4, 1)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, (torch.ones(1, 4, 6) @ down @ up), atol=1e-5)
    assert up.grad is down.grad is None


def test_a_style_refuses_other_modules_and_other_ranks() -> None:
    style = OverlappedColwiseParallel(ExchangeAxis(), Contiguous(4, 1))
    with pytest.raises(AttachError, match="GELU is no torch"):
        style._apply(nn.GELU(), None)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="the mesh has 2 ranks, and the axis of the style 1"):
        style._apply(nn.Linear(2, 2), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
