"""Gossip: ranks come together as fast as the graph says and at the mean, whatever is lost on the way."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import CompositionError, Lockstep, SpecError, StateError, StepError
from gradwire.codecs import Codec, TopK
from gradwire.core.grain import flat_grain
from gradwire.core.key import Key
from gradwire.ranks.supervised import run_function
from gradwire.spec import as_codec
from gradwire.sync import CHOCO, DPSGD, SGP, DriftTriggered, Gossip
from gradwire.sync.gossip import (
    Complete,
    Exponential,
    GossipMethod,
    Graph,
    Neighbours,
    OnePeerExponential,
    OnGraph,
    Ring,
    Torus,
    Weighted,
    graph,
)

CASES = str(Path(__file__).with_name("gossip_cases.py"))
NUMEL = 40
DIRECTED = Neighbours([[1, 2], [2], [0, 3, 1], [0, 4], [0, 1, 2]])
"""Rank 2 is heard by three others, rank 1 by one, and it is not symmetric."""

PATH = Neighbours([[1], [0, 2], [1, 3], [2]])
SYMMETRIC = [Ring(2), Ring(3), Ring(8), Ring(9), Torus(2, 2), Torus(2, 3), Torus(3, 4), Complete(5), PATH]
PUSHING = [*SYMMETRIC, DIRECTED, Exponential(6), Exponential(8), OnePeerExponential(5), OnePeerExponential(8)]


def virtual(on: Graph, method: GossipMethod, dtype: torch.dtype = torch.float64, numel: int = NUMEL) -> Lockstep:
    return Lockstep(OnGraph(on, method), flat_grain(numel, dtype=dtype), on.ranks)


def starts(ranks: int, dtype: torch.dtype = torch.float64, numel: int = NUMEL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def mean(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).double().mean(0)


def apart(xs: Sequence[Tensor]) -> float:
    """The consensus distance."""
    return float((torch.stack(list(xs)).double() - mean(xs)).square().sum(1).mean())


def rounds(ranks: Lockstep, xs: list[Tensor], count: int) -> list[Tensor]:
    for _ in range(count):
        xs = ranks.step(xs)
    return xs


# Graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", SYMMETRIC, ids=str)
def test_weights_of_edges_that_go_both_ways_are_symmetric_and_doubly_stochastic(on: Graph) -> None:
    (matrix,) = on.matrices
    assert torch.equal(matrix, matrix.mT)
    torch.testing.assert_close(matrix.sum(0), torch.ones(on.ranks, dtype=torch.float64), rtol=0, atol=1e-15)
    assert matrix.min() >= 0
    assert matrix.diagonal().min() > 0


@pytest.mark.parametrize("on", [DIRECTED, Exponential(6), OnePeerExponential(5)], ids=str)
def test_weights_of_edges_that_go_one_way_are_dealt_out_by_the_sender(on: Graph) -> None:
    for matrix in on.matrices:
        torch.testing.assert_close(matrix.sum(0), torch.ones(on.ranks, dtype=torch.float64), rtol=0, atol=1e-15)
        assert matrix.diagonal().min() > 0


def test_who_hears_whom() -> None:
    assert [sorted(Torus(3, 4).targets(rank, 0)) for rank in (0, 5)] == [[1, 3, 4, 8], [1, 4, 6, 9]]
    assert sorted(Torus(2, 4).targets(0, 0)) == [1, 3, 4]
    assert sorted(Exponential(8).targets(7, 0)) == [0, 1, 3]
    assert [list(OnePeerExponential(8).targets(7, number)) for number in range(3)] == [[0], [1], [3]]
    assert [to for to, _ in OnePeerExponential(8).links(7, 5).targets] == [3]
    assert Neighbours([[1], [0, 2], [1]]) == Neighbours(((1,), (0, 2), (1,)))


@pytest.mark.parametrize(
    ("on", "gap"),
    [
        (Complete(7), 1.0),
        (Ring(8), 2 / 3 * (1 - math.cos(math.pi / 4))),
        (Ring(1), 1.0),
        (Ring(2), 1.0),
        (Torus(2, 2), 2 / 3),
        (Weighted([[0.9, 0.1], [0.1, 0.9]]), 0.2),
        (OnePeerExponential(16), 1.0),
        (Exponential(8), 0.5),
    ],
    ids=str,
)
def test_spectral_gaps_are_those_of_the_textbook(on: Graph, gap: float) -> None:
    assert on.spectral_gap == pytest.approx(gap, abs=1e-14)


def test_graphs_by_name() -> None:
    made = [graph(name, 12) for name in ("ring", "torus", "exponential", "one-peer", "complete")]
    assert made == [Ring(12), Torus(3, 4), Exponential(12), OnePeerExponential(12), Complete(12)]
    assert graph("torus", 16) == Torus(4, 4)
    with pytest.raises(CompositionError, match="unknown graph 'One_Peer': did you mean 'one-peer'"):
        graph("One_Peer", 4)
    with pytest.raises(CompositionError, match="known are ring, torus, exponential, one-peer, complete, or make one"):
        graph("xyz", 4)
    with pytest.raises(CompositionError, match="torus of 1 x 7 ranks is no more than a ring"):
        graph("torus", 7)


# D-PSGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "wave"), [(3, 1), (8, 1), (8, 3), (8, 4), (9, 2)])
def test_a_wave_around_a_ring_shrinks_by_its_eigenvalue(ranks: int, wave: int) -> None:
    """x_i = a cos(2 pi k i / n) is an eigenvector of the ring, of 1/3 + 2/3 cos(2 pi k / n): exactly that is left."""
    shape = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    xs = [shape * math.cos(2 * math.pi * wave * i / ranks) for i in range(ranks)]
    eigenvalue = 1 / 3 + 2 / 3 * math.cos(2 * math.pi * wave / ranks)
    for count in (1, 9):
        mixed = rounds(virtual(Ring(ranks), DPSGD()), xs, count)
        for x, start in zip(mixed, xs, strict=True):
            torch.testing.assert_close(x, eigenvalue**count * start, rtol=0, atol=4e-15 * count)
    if wave == 1:
        assert Ring(ranks).spectral_gap == pytest.approx(1 - eigenvalue, abs=1e-15)


@pytest.mark.parametrize("on", SYMMETRIC, ids=str)
def test_ranks_come_together_at_the_mean_as_fast_as_the_gap_says(on: Graph) -> None:
    """|x - mean| <= (1 - gap)^t at most, for every start; and the slowest mode is there, so not much faster."""
    ranks, xs = virtual(on, DPSGD()), starts(on.ranks)
    wanted, before, bound = mean(xs), apart(xs), 0.0
    for count in range(1, 15):
        xs = ranks.step(xs)
        bound = (1 - on.spectral_gap) ** (2 * count) * before
        assert apart(xs) <= bound * (1 + 1e-12) + 1e-29
        torch.testing.assert_close(mean(xs), wanted, rtol=0, atol=1e-14)
    assert on.spectral_gap > 0.9 or apart(xs) > 1e-3 * bound


def test_a_complete_graph_averages() -> None:
    xs = starts(5)
    averaged = Lockstep(gradwire.parse("none"), flat_grain(NUMEL, dtype=torch.float64), 5).step(xs)
    for x, wanted in zip(virtual(Complete(5), DPSGD()).step(xs), averaged, strict=True):
        torch.testing.assert_close(x, wanted, rtol=0, atol=4e-16)


@pytest.mark.parametrize("method", [DPSGD(), CHOCO("none", 1.0), CHOCO("topk:0.1", 0.3)], ids=str)
def test_ranks_that_agree_keep_what_they_have_bit_for_bit(method: GossipMethod) -> None:
    start = starts(1, torch.float32)[0]
    xs = rounds(virtual(Ring(5), method, torch.float32), [start] * 5, 50)
    assert all(torch.equal(x, start) for x in xs)


# SGP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", PUSHING, ids=str)
@pytest.mark.draw(4)
def test_pushed_values_come_to_the_exact_mean(on: Graph) -> None:
    xs = starts(on.ranks)
    wanted, ranks = mean(xs), virtual(on, SGP())
    for x in rounds(ranks, xs, 400):
        torch.testing.assert_close(x, wanted, rtol=0, atol=1e-12)
    assert sum(float(state.tensor("weight")[0]) for state in ranks.states) == pytest.approx(on.ranks, abs=1e-13)


def test_without_weights_ranks_end_at_different_multiples_of_the_mean() -> None:
    """Without a division rank i ends at w_i times the mean, so ranks do not come together."""
    xs = starts(DIRECTED.ranks)
    ranks = virtual(DIRECTED, SGP())
    rounds(ranks, xs, 400)
    weights = torch.stack([state.tensor("weight")[0] for state in ranks.states])
    (matrix,) = DIRECTED.matrices
    torch.testing.assert_close(matrix @ weights, weights, rtol=0, atol=1e-13)  # where weights stay as they are
    plain = torch.linalg.matrix_power(matrix, 400) @ torch.stack(xs)
    torch.testing.assert_close(plain, weights.unsqueeze(1) * mean(xs), rtol=0, atol=1e-12)
    assert weights.min() < 0.7
    assert weights.max() > 1.4


def test_one_peer_after_the_other_averages_exactly() -> None:
    """Of whole numbers every sum is exact, so three rounds of eight ranks leave no difference at all."""
    xs = [torch.arange(NUMEL, dtype=torch.float32) * (rank + 1) for rank in range(8)]
    for x in rounds(virtual(OnePeerExponential(8), SGP(), torch.float32), xs, 3):
        assert torch.equal(x, 4.5 * torch.arange(NUMEL))


@pytest.mark.parametrize("on", [DIRECTED, OnePeerExponential(6)], ids=str)
@pytest.mark.draw(1)
def test_local_steps_of_pushing_ranks_count_alike(on: Graph) -> None:
    """Each rank pulls to a point of its own. Where ranks rest, their pulls add up to nothing: at the mean of points."""
    points, ranks = starts(on.ranks), virtual(on, SGP())
    xs = [torch.zeros(NUMEL, dtype=torch.float64)] * on.ranks
    for _ in range(1200 * on.period):
        xs = ranks.step([x - 0.05 * (x - point) for x, point in zip(xs, points, strict=True)])
    assert apart(xs) > 1e-4
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(on.period):
        total += mean(xs) - mean(points)
        xs = ranks.step([x - 0.05 * (x - point) for x, point in zip(xs, points, strict=True)])
    assert float(total.abs().max()) < 1e-12


@pytest.mark.parametrize("on", [DIRECTED, Ring(8)], ids=str)
def test_rounded_weights_neither_make_nor_lose_anything(on: Graph) -> None:
    """A third in 32 bits is 1e-8 too much; by as much a rank's share of itself would let all models grow each round."""
    generator = torch.Generator().manual_seed(0)
    ranks = virtual(on, SGP(), torch.float32, 4000)
    xs, leaks = [torch.rand(4000, generator=generator) + 1 for _ in range(on.ranks)], list[float]()
    for _ in range(40):
        xs = [x + 0.1 * torch.randn(4000, generator=generator) for x in xs]
        before = mean([x + state.tensor("bias") for x, state in zip(xs, ranks.states, strict=True)])
        xs = ranks.step(xs)
        after = mean([x.double() + state.tensor("bias") for x, state in zip(xs, ranks.states, strict=True)])
        leaks.append(float((after / before - 1).mean()))
    assert abs(sum(leaks) / len(leaks)) < 2.5e-9


# CHOCO ------------------------------------------------------------------------------------------------------------

CODECS = [
    ("topk:0.1", 0.2, 60),
    ("int4", 1.0, 12),  # as many as without any loss
    ("topk:0.2+int4", 0.3, 40),
    ("qsgd:7", 0.5, 20),
    ("sign:8", 0.3, 42),
]
"""Codecs, a gossip step size, and in how many rounds ranks on a ring of 8 come ten times nearer to each other."""


def test_choco_without_loss_is_d_psgd() -> None:
    xs = starts(8)
    plain, choco = virtual(Ring(8), DPSGD()), virtual(Ring(8), CHOCO("none", 1.0))
    for _ in range(20):
        for x, wanted in zip(choco.step(xs), xs := plain.step(xs), strict=True):
            torch.testing.assert_close(x, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("on", [Ring(5), PATH], ids=str)
def test_choco_is_the_papers_with_a_copy_of_every_neighbour(on: Graph) -> None:
    """x_hat of all ranks, kept by all, and the sum over them: what two tensors a rank must come to."""
    codec, gamma, (matrix,) = TopK(0.3), 0.4, on.matrices
    ranks, xs = virtual(on, CHOCO(codec, gamma)), starts(on.ranks)
    hats = torch.zeros(on.ranks, NUMEL, dtype=torch.float64)
    for step in range(40):
        moved = [x - 0.1 * torch.sin(x + rank) for rank, x in enumerate(xs)]
        for rank, x in enumerate(moved):
            hats[rank] += _coded(codec, x - hats[rank], Key(step=step, rank=rank))
        wanted = torch.stack(moved) + gamma * (matrix @ hats - hats)
        xs = ranks.step(moved)
        torch.testing.assert_close(torch.stack(xs), wanted, rtol=0, atol=1e-13)


def _coded(codec: Codec, x: Tensor, key: Key) -> Tensor:
    return codec.decode(codec.encode(x, key), like=x, key=key)


@pytest.mark.parametrize(("spec", "gamma", "tenfold"), CODECS)
@pytest.mark.draw(3)
def test_choco_comes_to_the_mean_at_a_linear_rate(spec: str, gamma: float, tenfold: int) -> None:
    """In every `tenfold` rounds ranks come ten times nearer to each other: five times over, and at the mean."""
    ranks, xs = virtual(Ring(8), CHOCO(spec, gamma)), starts(8)
    wanted, xs = mean(xs), rounds(ranks, xs, 40)
    for _ in range(5):
        before, xs = apart(xs), rounds(ranks, xs, tenfold)
        assert apart(xs) < before / 100
    torch.testing.assert_close(mean(xs), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("spec", "gamma", "tenfold"), CODECS)
@pytest.mark.draw(3)
def test_mixing_compressed_models_without_memory_does_not(spec: str, gamma: float, tenfold: int) -> None:
    """x_i += gamma sum_j W[i, j] (C(x_j) - C(x_i)), for as many rounds: it stops at what the codec loses."""
    codec, (matrix,), xs = as_codec(CHOCO(spec, gamma).codec), Ring(8).matrices, torch.stack(starts(8))
    for step in range(40 + 5 * tenfold):
        coded = torch.stack([_coded(codec, x, Key(step=step, rank=rank)) for rank, x in enumerate(xs)])
        xs = xs + gamma * (matrix @ coded - coded)
    assert apart(list(xs)) > 1e-3


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(("spec", "gamma"), [("topk:0.1", 0.2), ("int4", 1.0)])
def test_choco_trains_quadratics_to_their_mean(spec: str, gamma: float) -> None:
    """Of f_i = |x - c_i|^2 / 2 the mean follows gradient descent on the mean exactly, and ranks stay near it."""
    rate, points = 0.02, starts(8, torch.float32)
    ranks, xs = virtual(Ring(8), CHOCO(spec, gamma), torch.float32), [torch.zeros(NUMEL)] * 8
    distances: list[float] = []
    for count in range(1, 201):
        xs = ranks.step([x - rate * (x - point) for x, point in zip(xs, points, strict=True)])
        torch.testing.assert_close(mean(xs), (1 - (1 - rate) ** count) * mean(points), rtol=0, atol=1e-5)
        distances.append(apart(xs))
    assert max(distances[100:]) < 0.05 * apart(points)


def test_what_ranks_know_of_each_other_adds_up() -> None:
    """d_i is the sum over neighbours of W[i, j] (x_hat_j - x_hat_i), though nobody keeps their x_hat."""
    ranks, xs = virtual(Torus(2, 3), CHOCO("topk:0.2+int8", 0.3)), starts(6)
    for _ in range(30):
        xs = ranks.step([x - 0.1 * torch.sin(x + rank) for rank, x in enumerate(xs)])
        hats = torch.stack([state.tensor("known") for state in ranks.states])
        kept = torch.stack([state.tensor("apart") for state in ranks.states])
        (matrix,) = Torus(2, 3).matrices
        torch.testing.assert_close(kept, matrix @ hats - hats, rtol=0, atol=1e-13)


@pytest.mark.one_draw_in(3)
def test_rounding_of_what_ranks_know_does_not_move_the_mean() -> None:
    """The sum of neighbours' x_hat is as large as the model; d, which is kept, as small as the differences."""
    generator = torch.Generator().manual_seed(0)
    ranks, xs = virtual(Ring(8), CHOCO("none", 1.0), torch.float32, 500), starts(8, torch.float32, 500)
    wanted = mean(xs)
    for _ in range(1000):
        noise = 1e-3 * torch.randn(8, 500, generator=generator)
        xs = ranks.step([x + its for x, its in zip(xs, noise - noise.mean(0), strict=True)])
    assert float((mean(xs) - wanted).abs().mean()) < 2e-5  # 1.2e-4 with the sum in its place


# State and bytes ------------------------------------------------------------------------------------------------------

EVERY_KIND: list[tuple[Graph, GossipMethod]] = [
    (Ring(4), DPSGD()),
    (Neighbours([[1, 2], [2], [3], [0]]), SGP()),
    (OnePeerExponential(4), SGP()),
    (Ring(4), CHOCO("topk:0.2+int8", 0.3)),
    (Ring(4), CHOCO("qsgd:7", 0.5)),
]


@pytest.mark.parametrize(("on", "method"), EVERY_KIND, ids=str)
def test_virtual_ranks_go_on_exactly(on: Graph, method: GossipMethod) -> None:
    ranks, xs = virtual(on, method, torch.float32), starts(on.ranks, torch.float32)
    xs = rounds(ranks, xs, 5)
    other = virtual(on, method, torch.float32)
    other.load_state_dicts(ranks.state_dicts())
    for x, wanted in zip(rounds(other, xs, 5), rounds(ranks, xs, 5), strict=True):
        assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    ("on", "method", "nbytes"),
    [
        (Ring(8), DPSGD(), 2 * 4 * 1010),
        (Torus(3, 4), DPSGD(), 4 * 4 * 1010),
        (Complete(8), DPSGD(), 7 * 4 * 1010),
        (OnePeerExponential(8), SGP(), 4 * 1011),  # the weight is one element more
        (Exponential(8), SGP(), 3 * 4 * 1011),
        (Ring(8), CHOCO("int4", 0.5), 2 * (4 * 4 + 504 + 1 + 7)),  # scales, nibbles, padding to 8 bytes
        (Ring(1), DPSGD(), 0),
    ],
    ids=str,
)
def test_what_a_rank_sends_is_known_beforehand(on: Graph, method: GossipMethod, nbytes: int) -> None:
    assert gradwire.cost(OnGraph(on, method), nn.Linear(100, 10), on.ranks).wire_bytes == nbytes


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ring(0), "a graph of 0 ranks: there must be at least 1"),
        (lambda: Torus(1, 4), "a torus of 1 x 4 ranks is no more than a ring"),
        (lambda: Neighbours([]), "a graph of 0 ranks"),
        (lambda: Neighbours([[1], [2]]), "rank 1 is said to send to rank 2: name other ranks, from 0 to 1"),
        (lambda: Neighbours([[0], [0]]), "rank 0 is said to send to rank 0"),
        (lambda: Weighted([[1.0, 0.0]]), "row 0 of the matrix has 2 weights: give 1"),
        (lambda: Weighted([[1.5, -0.5], [0, 1]]), "row 0 of the matrix has a weight that is negative"),
        (
            lambda: Weighted([[1, 0], [0, float("nan")]]),
            "row 1 of the matrix has a weight that is negative or not finite",
        ),
    ],
)
def test_graphs_that_make_no_sense_are_refused(make: Callable[[], Graph], said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        make()


@pytest.mark.parametrize("method", [DPSGD(), CHOCO("int4", 0.5)], ids=str)
@pytest.mark.parametrize(
    ("on", "said"),
    [
        (
            Exponential(8),
            "rank 0 gives rank 1 the weight 0 and gets 0.25 from it, and .* needs a symmetric matrix",
        ),
        (OnePeerExponential(8), "changes from round to round, and .* needs a fixed graph: take SGP"),
        (Weighted([[0.6, 0.3], [0.3, 0.7]]), "row 0 of the matrix sums to 0.9, and .* needs rows that sum to 1"),
        (Weighted([[0.5, 0.5], [0.4, 0.6]]), "rank 0 gives rank 1 the weight 0.5 and gets 0.4 from it"),
        (Neighbours([[1], [0], [3], [2]]), "rank 2 never hears of rank 0, however many rounds pass"),
        (Weighted([[0, 1], [1, 0]]), "keep nothing of what they have"),
        (Weighted([[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]]), "keep nothing"),
    ],
    ids=str,
)
def test_graphs_on_which_averages_go_wrong_are_refused(on: Graph, said: str, method: GossipMethod) -> None:
    with pytest.raises(CompositionError, match=said):
        OnGraph(on, method)


@pytest.mark.parametrize(
    ("on", "said"),
    [
        (
            Weighted([[0.5, 0.5], [0.4, 0.5]]),
            "column 0 of the matrix, what rank 0 sends and keeps, sums to 0.9, and SGP",
        ),
        (Weighted([[0.0, 0.5], [1.0, 0.5]]), "rank 0 keeps nothing of what it has: give it a weight for itself"),
        (Neighbours([[1], [2], []]), "rank 0 never hears of rank 1, however many rounds pass"),
        (Neighbours([[], [0]]), "rank 1 never hears of rank 0"),
    ],
    ids=str,
)
def test_graphs_on_which_pushing_goes_wrong_are_refused(on: Graph, said: str) -> None:
    with pytest.raises(CompositionError, match=said):
        OnGraph(on, SGP())


def test_a_zero_diagonal_is_no_error_where_ranks_come_together() -> None:
    """Of three ranks that only listen to others no two groups swap their models for ever."""
    on = Weighted([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    assert apart(rounds(virtual(on, DPSGD()), starts(3), 60)) < 1e-30


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: CHOCO("int4", 0.0), CompositionError, "gamma=0.0: a gossip step size is above 0 and at most 1"),
        (lambda: CHOCO("int4", 1.5), CompositionError, "gamma=1.5"),
        (lambda: CHOCO("powersgd:4", 0.5), SpecError, "'powersgd' in 'powersgd:4' is no codec: write one"),
        (lambda: CHOCO("int4,exchange=ring", 0.5), SpecError, "exchange in .* is an option of exchanges"),
        (lambda: CHOCO("tpk:0.1", 0.5), SpecError, "did you mean 'topk'"),
        (lambda: CHOCO(gradwire.parse("int4"), 0.5), CompositionError, "is no codec: give one, such as TopK"),  # type: ignore[arg-type]
        (lambda: CHOCO("terngrad", 0.5), CompositionError, "is no contraction: take D-PSGD"),
    ],
)
def test_codecs_that_fit_nothing_are_refused(
    make: Callable[[], GossipMethod], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make()


def test_codecs_are_read_from_specs() -> None:
    assert CHOCO("topk:0.01", 0.1) == CHOCO(TopK(0.01), 0.1)
    assert as_codec("topk:0.01,values=bf16") == TopK(0.01, values="bf16")


# One rank, in this process ----------------------------------------------------------------------------------------


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def test_a_graph_of_other_ranks_is_refused(one_rank: None) -> None:
    with pytest.raises(CompositionError, match=r"Ring\(ranks=4\) is a graph of 4 ranks, and this run has 1: make one"):
        Gossip(model(), Ring(4))
    with pytest.raises(CompositionError, match="unknown gossip method 'chocho'"):
        Gossip(model(), "ring", "chocho")
    with pytest.raises(CompositionError, match="which gossip never does: give every= a number"):
        Gossip(model(), every=DriftTriggered(0.1, 8))
    with pytest.raises(CompositionError, match="give one of 'average', 'rank0', 'own'"):
        Gossip(model(), buffers="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"version": None}, "has no 'version'"),
        ({"settings": "graph=Ring(ranks=2)"}, "make it with the settings it was saved with"),
        ({"rank": 1}, "each rank loads what the same rank saved"),
        ({"world_size": 4}, "begin anew from that model"),
        ({"steps": -1}, "steps should be a whole number from 0, not -1"),
        ({"session": {}}, "saved state"),
        ({"buffers": {"x": torch.ones(1)}}, "was saved with another model"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(other: dict[str, Any], said: str, one_rank: None) -> None:
    with Gossip(model(), "ring", CHOCO("int4", 0.5), every=2) as gossip:
        gossip.step()
        saved = gossip.state_dict()
        changed = {key: value for key, value in {**saved, **other}.items() if value is not None}
        gossip.step()
        before = gossip.state_dict()
        with pytest.raises(StateError, match=said):
            gossip.load_state_dict(changed)
        assert str(gossip.state_dict()) == str(before)


def test_a_checkpoint_of_another_model_is_refused(one_rank: None) -> None:
    with Gossip(model(), "ring", "sgp") as small:
        saved = small.state_dict()
    with Gossip(model(width=5), "ring", "sgp") as gossip, pytest.raises(StateError, match="saved by another model"):
        gossip.load_state_dict(saved)


def test_after_closing_nothing_is_done(one_rank: None) -> None:
    gossip = Gossip(model(), "complete", "sgp")
    gossip.close()
    gossip.close()
    for act in (gossip.step, gossip.sync, gossip.consensus_distance, lambda: gossip.evaluating().__enter__()):
        with pytest.raises(StepError, match="this gossip is closed: make a new one"):
            act()


@pytest.mark.parametrize("method", ["dpsgd", "sgp", CHOCO("none", 1.0)], ids=str)
def test_parameters_may_lie_in_memory_in_any_order(method: GossipMethod | str, one_rank: None) -> None:
    network = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    before = network.weight.detach().clone()
    with Gossip(network, "ring", method) as gossip:
        gossip.step()
        gossip.sync()
        assert gossip.consensus_distance() == 0
        assert "no round measured yet" in str(gossip.session.report())
    assert torch.equal(network.weight, before)


def test_the_page_runs(one_rank: None) -> None:
    page = (Path(__file__).parents[1] / "docs" / "gossip.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    exec("".join(blocks), {})


# Processes --------------------------------------------------------------------------------------------------------


@functools.cache
def run(case: str) -> list[Any]:
    return run_function(f"{CASES}:{case}", 3, {}, 120)


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("method", ["dpsgd", "sgp", "one-peer"])
def test_ranks_do_what_the_papers_say(method: str) -> None:
    assert all(found[method] < 1e-13 for found in run("by_hand"))


def test_compressed_gossip_keeps_the_mean_and_ends_in_one_model() -> None:
    first, *others = run("compressed")
    for found in (first, *others):
        assert found["mean"] < 1e-15
        assert found["rounds"] == [False, True] * 6
        assert found["apart"] == first["apart"] > 1e-6
        assert found["moved"] > 0.01
        assert found["steps"] == 7
    assert len({digest for found in (first, *others) for digest in found["digests"]}) == 1


@pytest.mark.one_draw_in(2)
def test_a_run_goes_on_exactly_between_two_rounds(tmp_path: Path) -> None:
    everywhere = run_function(f"{CASES}:resumed", 3, {"folder": str(tmp_path)}, 240)
    for method in everywhere[0]:
        for found in everywhere:
            whole, broken = found[method]
            assert whole == broken
        assert len({found[method][0].split()[0] for found in everywhere}) == 3  # models of ranks differ
        assert len({found[method][0].split()[1] for found in everywhere}) == 1  # until they are made one


def test_counted_bytes_are_those_that_were_predicted() -> None:
    for found in run("sent"):
        assert all(counted == predicted > 0 for counted, predicted in found.values())
    path = [found["dpsgd"][0] for found in run("sent")]
    assert path[1] == 2 * path[0] == 2 * path[2]  # rank 1 has two neighbours


def test_buffers_are_left_alone_until_ranks_are_made_one() -> None:
    everywhere = run("buffers")
    assert all(found[policy]["kept"] for found in everywhere for policy in found)
    for policy, models in (("average", 1), ("rank0", 1), ("own", 3)):
        assert len({found[policy]["digest"] for found in everywhere}) == models
    assert all(found["average"]["far"] < 1e-15 for found in everywhere)


def test_ranks_are_told_what_is_wrong() -> None:
    *others, last = run("differing")
    for found in (*others, last):
        assert found["model"].startswith("AttachError: '3.bias' differs between rank 0 and rank 2")
        assert "AttachError: ranks disagree on the settings: rank 2 has" in found["every"]
        assert "AttachError: ranks disagree on the method: rank 2 has OnGraph(graph=Complete" in found["graph"]
        assert found["closed"] == "StepError: this gossip is closed: make a new one"
        assert found["kept"] == "True"
    assert last["nan"].startswith("StepError: '0.weight' is not finite on rank 2 after step 1")
    for found in others:
        assert found["nan"].startswith("CommunicationError: rank 2 failed with StepError: '0.weight' is not finite")
