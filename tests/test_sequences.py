"""Attention over sequences that are spread over ranks: every output and gradient is that of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.parallel.sequences import (
    AttentionDropout,
    AttentionMask,
    Contiguous,
    ExchangeAxis,
    SequenceLayout,
    Zigzag,
    ulysses_attention,
)
from gradwire.parallel.sequences.blocks import block_attention, merged
from gradwire.planning.messages import hop_of_keys
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("sequence_cases.py"))


@st.composite
def masks(draw: st.DrawFn, length: int) -> dict[str, Any]:
    ends = sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {length})
    return {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, length)),
        "lengths": draw(st.none() | st.just(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)))),
    }


@st.composite
def attentions(draw: st.DrawFn) -> dict[str, Any]:
    """Attention of a small size, in which some ranks may have no position and some no head."""
    length, key_heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    return {
        "way": draw(st.sampled_from(["ring", "ulysses"])),
        "layout": draw(st.sampled_from(["contiguous", "zigzag"])),
        "length": length,
        "batch": draw(st.integers(1, 2)),
        "key_heads": key_heads,
        "heads": key_heads * draw(st.integers(1, 3)),
        "size": (size := draw(st.integers(1, 9))),
        "value_size": draw(st.sampled_from([size, size, 3])),
        "mask": draw(masks(length)),
        "dropout": draw(st.sampled_from([None, None, 0.0, 0.3])),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("ranks", [2, 4, 8, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.draw(1)
def test_outputs_and_gradients_are_those_of_one_process(ranks: int) -> None:
    @given(cases=st.lists(attentions(), min_size=8, max_size=12))
    @settings(max_examples=3, phases=[Phase.generate])  # to shrink a case would start ranks again and again
    def check(cases: list[dict[str, Any]]) -> None:
        for errors in run_function(f"{CASES}:twin_errors", ranks, {"cases": cases}, 120):
            assert max(errors) < 1e-12, list(zip(errors, cases, strict=True))

    check()


CASE = {"way": "ring", "layout": "zigzag", "length": 48, "batch": 2, "heads": 4, "key_heads": 2, "size": 8, "seed": 3}
CAUSAL = {"causal": True}


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_float32_is_that_of_one_process_to_rounding(way: str) -> None:
    cases = [CASE | {"way": way, "mask": CAUSAL}]
    for errors in run_function(f"{CASES}:twin_errors", 2, {"cases": cases, "dtype": "float32"}, 120):
        assert max(errors) < 1e-5


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.draw(1)
def test_bfloat16_is_no_worse_on_a_ring_than_in_one_process(ranks: int) -> None:
    """At most 1.5 times the error of one process, whose sums are float32 too."""
    told = {"cases": [CASE | {"mask": CAUSAL, "length": 128}], "dtype": "bfloat16"}
    ((alone,),) = run_function(f"{CASES}:twin_errors", 1, told, 120)
    for (error,) in run_function(f"{CASES}:twin_errors", ranks, told, 120):
        assert error <= 1.5 * alone


def test_keys_and_values_in_eight_bits_are_what_every_rank_attends_to() -> None:
    case = CASE | {"mask": CAUSAL, "codec": "int8:8"}
    for errors in run_function(f"{CASES}:through_codec", 2, {"case": case}, 120):
        assert max(errors) < 1e-5


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(None, "float32"), (None, "bfloat16"), (None, "float64"), ("int8:64", "bfloat16"), ("int8:128", "bfloat16")],
)
def test_a_ring_sends_what_its_docstring_says(codec: str | None, dtype: str) -> None:
    case = CASE | {"size": 128, "codec": codec}
    ranks, w, a = 4, getattr(torch, dtype).itemsize, 8 if dtype == "float64" else 4
    n = 2 * 2 * 12 * (128 + 128)
    block = n * w if codec is None else n + n // int(codec.removeprefix("int8:")) * 4
    for forward, backward in run_function(f"{CASES}:sent", ranks, {"case": case, "dtype": dtype}, 120):
        assert forward == (ranks - 1) * (block + 48)
        assert backward == (ranks - 1) * block + ranks * n * a
    if codec is not None:
        assert n * w >= (1.9 if codec == "int8:128" else 1.85) * block
    elif dtype == "bfloat16":
        assert [request.nbytes for request in hop_of_keys(n // 2, ranks, 1)] == [block]


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 4), (6, 3), (2, 1)])
def test_ulysses_sends_what_its_docstring_says(heads: int, key_heads: int) -> None:
    case = CASE | {"way": "ulysses", "heads": heads, "key_heads": key_heads, "value_size": 4}
    ranks, batch, d, e, positions, whole = 4, 2, 8, 4, 12, 48
    mine = [len(range(heads)[place * heads // ranks : (place + 1) * heads // ranks]) for place in range(ranks)]
    # even pieces are longer at the front
    mine.sort(reverse=True)
    begins = [sum(mine[:place]) for place in range(ranks)]
    group = heads // key_heads
    keys = [len({head // group for head in range(b, b + h)}) for b, h in zip(begins, mine, strict=True)]
    found = run_function(f"{CASES}:sent", ranks, {"case": case, "dtype": "float32"}, 120)
    for place, (forward, backward) in enumerate(found):
        h, others = mine[place], sum(keys) - keys[place]
        there = positions * ((heads - h) * d + others * (d + e)) + (whole - positions) * h * e
        back = (whole - positions) * (h * d + keys[place] * (d + e)) + positions * (heads - h) * e
        assert (forward, backward) == (4 * batch * there + 48 * (ranks - 1), 4 * batch * back)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize(
    ("mask", "dropout"), [({}, None), (CAUSAL, None), (CAUSAL, 0.2), ({"causal": True, "lengths": (30, 18)}, None)]
)
def test_two_dimensions_are_one_process_too(mask: dict[str, Any], dropout: float | None) -> None:
    case = CASE | {"mask": mask, "dropout": dropout}
    for errors in run_function(f"{CASES}:two_dimensions", 4, {"case": case}, 120):
        assert max(errors) < 1e-12


def test_dropout_drops_at_its_rate_and_each_weight_by_itself() -> None:
    """Shares of what stays, of neighbours of each kind that both stay, and of equal masks of other keys."""
    key, shape = Key(seed=5, step=2), (4, 4, range(64), range(128))
    factors = AttentionDropout(0.3, key).factors(*shape)
    stays = (factors > 0).double()
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert float(stays.mean()) == pytest.approx(0.7, abs=0.005)
    for dim in range(4):
        both = stays.narrow(dim, 1, stays.shape[dim] - 1) * stays.narrow(dim, 0, stays.shape[dim] - 1)
        assert float(both.mean()) == pytest.approx(0.49, abs=0.007)
    other = AttentionDropout(0.3, key.with_(step=3)).factors(*shape)
    assert float((stays * (other > 0)).mean()) == pytest.approx(0.49, abs=0.007)
    assert torch.equal(AttentionDropout(0.3, key, first_head=1).factors(4, 3, *shape[2:]), factors[:, 1:])


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_dropout_that_is_no_chance_is_refused(rate: float) -> None:
    with pytest.raises(CompositionError, match="from 0 up to but not including 1"):
        AttentionDropout(rate)


def test_ulysses_refuses_dropout_beside_an_attention_that_has_its_own() -> None:
    axis, x = ExchangeAxis(), torch.randn(1, 2, 4, 3)
    with pytest.raises(CompositionError, match="give it to that function"):
        ulysses_attention(x, x, x, axis, Contiguous(4, 1), lambda q, k, v: v, dropout=AttentionDropout(0.1))


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("way", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("fault", "of_one", "of_the_other"),
    [
        ("size", "different sizes of a head; give the same on all ranks", None),
        ("mask", "different layouts, masks or codecs; give the same", None),
        (
            "heads",
            "ranks 1 and 0 of the axis have different numbers of faulty",
            "6 query heads do not divide among 4 key heads: take 3",
        ),
        ("ranks", "different numbers of faulty", "the layout is of 3 ranks, and the axis has 2: make it with ranks=2"),
        ("lengths", "different numbers of faulty", "packed sequences of 7 positions in all, and a layout of 8"),
        ("rows", "different numbers of faulty", "rank 1 has 3 positions, and 4 of the layout's 8"),
    ],
)
def test_all_ranks_are_told_what_one_does_wrong(way: str, fault: str, of_one: str, of_the_other: str | None) -> None:
    first, second = run_function(f"{CASES}:faulty", 2, {"fault": fault, "way": way}, 120)
    assert first.startswith("CompositionError")
    assert of_one in first
    assert (of_the_other or of_one) in second


# In this process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("equal_sizes", [True, False])
def test_blocks_merge_to_the_whole_with_scores_of_any_size(seed: int, equal_sizes: bool) -> None:
    """Scores of up to 1e4 in both signs, and queries that see no key of a block: PyTorch's kernel and our own."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (100 * torch.randn(1, 2, 7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 2, 7, 5 if equal_sizes else 3, generator=generator, dtype=torch.float64)
    table = torch.rand(7, 7, generator=generator) < 0.4
    table |= torch.eye(7, dtype=torch.bool)
    scores = q.matmul(k.mT)
    assert scores.abs().max() > 1e4
    out, lse = torch.zeros_like(v), torch.full((1, 2, 7), -math.inf, dtype=torch.float64)
    for columns in (slice(0, 3), slice(3, 4), slice(4, 7)):
        seen = table[:, columns]
        out, lse = merged(out, lse, *block_attention(q, k[:, :, columns], v[:, :, columns], 1.0, seen))
    scores = scores.masked_fill(~table, -math.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-10)
    assert torch.allclose(out, scores.softmax(-1).matmul(v), rtol=1e-10, atol=1e-10)


@given(data=st.data(), length=st.integers(1, 60))
def test_what_a_block_sees_is_what_the_table_says(data: st.DataObject, length: int) -> None:
    mask = AttentionMask(**data.draw(masks(length)))
    a, b, c, d = (data.draw(st.integers(0, length - 1)) for _ in range(4))
    queries = range(min(a, b), max(a, b) + 1)
    keys = queries if data.draw(st.booleans()) else range(min(c, d), max(c, d) + 1)
    seen, table = mask.seen(queries, keys), mask.table(queries, keys)
    if isinstance(seen, torch.Tensor):
        assert torch.equal(seen, table)
    else:
        expected = {
            "all": torch.ones_like(table),
            "none": torch.zeros_like(table),
            "causal": torch.ones_like(table).tril(),
        }
        assert torch.equal(expected[seen], table)


@pytest.mark.parametrize("kind", [Contiguous, Zigzag])
@given(length=st.integers(1, 100), ranks=st.integers(1, 9))
def test_layouts_share_out_every_position_once(kind: type[SequenceLayout], length: int, ranks: int) -> None:
    layout = kind(length, ranks)
    parts = [layout.positions(place) for place in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= (1 if kind is Contiguous else 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_causal_mask_gives_ranks_of_a_zigzag_equal_work(ranks: int) -> None:
    table = AttentionMask(causal=True).table(range(1024), range(1024))
    layout = Zigzag(1024, ranks)
    work = [int(table[layout.positions(place)].sum()) for place in range(ranks)]
    assert max(work) <= 1.05 * min(work)


def test_wrong_masks_and_layouts_are_refused() -> None:
    with pytest.raises(CompositionError, match="a window of 0 positions"):
        AttentionMask(window=0)
    with pytest.raises(CompositionError, match="do not add up"):
        AttentionMask(lengths=(3, 0))
    with pytest.raises(CompositionError, match="at least one of each"):
        Zigzag(0, 2)
    with pytest.raises(CompositionError, match="dimension 1 is 7 long, and the layout is of 8"):
        Zigzag(8, 2).shard(torch.zeros(1, 7), 0)
