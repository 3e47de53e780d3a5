"""Laws of routes: the reference's mean on any number of ranks, on a mesh too, for the bytes and rounds they promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gradwire import parse
from gradwire.codecs import BF16, BlockInt, Identity, TopK
from gradwire.compare.engines import Replicated
from gradwire.core.axis import Axis, NodeSize
from gradwire.core.collective import AllGather as Gather
from gradwire.core.collective import AllReduce as Sum
from gradwire.core.collective import AllToAll
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import Grain, ParameterSpec, flat_grain
from gradwire.core.link import Curve, Link, TimedSize
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.core.state import State, walk
from gradwire.drivers.cost import cost
from gradwire.drivers.interpreter import sent_bytes
from gradwire.drivers.lockstep import Lockstep, perform, run_lockstep
from gradwire.drivers.timing import Links, step_s
from gradwire.reducers import (
    AllGatherExchange,
    AllReduceExchange,
    Auto,
    CompressionWarmUp,
    Direct,
    ErrorFeedback,
    Guard,
    Hierarchical,
    Partition,
    Program,
    RecursiveHalvingDoubling,
    Reduced,
    Reducer,
    Ring,
    Step,
    Tree,
    TwoShot,
)
from gradwire.reducers.hierarchical import in_levels
from gradwire.reducers.routes import Route, direct_scatter, power_of_two, ring_scatter, shards
from gradwire.reducers.sent import SentAll
from gradwire.reducers.tree_route import double_tree

from . import checks
from .subjects import CPU, DTYPES, sample

ROUTES: list[Route] = [
    Direct(Identity()),
    Ring(Identity()),
    RecursiveHalvingDoubling(Identity()),
    Tree(Identity()),
    Tree(Identity(), chunk_bytes=64),
]
each_route = pytest.mark.parametrize("route", ROUTES, ids=repr)


def xs_of(grain: Grain, ranks: int, seed: int = 0) -> list[Tensor]:
    return [sample("heavy", grain.shape, grain.dtype, 100 * seed + rank) for rank in range(ranks)]


def check_is_mean(reducer: Reducer, ranks: int, grain: Grain) -> None:
    """One mean on all ranks, off the reference by a rounding for each of n sums and a division or two."""
    xs = xs_of(grain, ranks)
    results = Lockstep(reducer, grain, ranks).reduce(xs)
    checks.check_means(results, xs)
    want = sum(x.double() for x in xs) / ranks
    sizes = sum(x.double().abs() for x in xs) / ranks
    u, tiny = checks.unit_roundoff(grain.dtype), torch.finfo(grain.dtype).tiny
    assert bool(((results[0].value.double() - want).abs() <= (ranks + 2) * u * sizes + ranks * tiny).all())


@each_route
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17])
@pytest.mark.parametrize("numel", [0, 1, 5, 300])
def test_any_number_of_ranks(route: Route, ranks: int, numel: int) -> None:
    check_is_mean(route, ranks, flat_grain(numel))


@each_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(route: Route, dtype: torch.dtype) -> None:
    check_is_mean(route, 5, flat_grain(257, dtype=dtype))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("scatter", [direct_scatter, ring_scatter])
def test_a_scatter_leaves_each_rank_its_shard_of_the_sum(scatter: type, ranks: int) -> None:
    xs = xs_of(flat_grain(37), ranks)

    def program(rank: int) -> Program:
        shard = yield from scatter(xs[rank].clone(), Step(0, rank, ranks))
        return Reduced(shard, SentAll(), State())

    found = torch.cat([reduced.value for reduced in run_lockstep([program(rank) for rank in range(ranks)])])
    sizes = sum(x.abs() for x in xs)
    assert bool(((found.double() - sum(x.double() for x in xs)).abs() <= ranks * checks.unit_roundoff() * sizes).all())


# Bytes and time ------------------------------------------------------------------------------------------------------


def wire(reducer: Reducer, ranks: int, numel: int, rank: int = 0) -> int:
    spec = ParameterSpec("w", (numel,), torch.float32, CPU)
    return cost(reducer, [spec], ranks, grain_numel=numel, rank=rank).wire_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_bytes_of_exchanges(ranks: int) -> None:
    """Two-shot sends 2 (n - 1)/n payloads whatever n is, an all-gather n - 1 (within 3%: rows are padded)."""
    numel = 1 << 20
    for codec in (BlockInt(4), Identity()):
        payload = codec.payload_bytes(numel)
        assert wire(TwoShot(codec), ranks, numel) == pytest.approx(2 * (ranks - 1) / ranks * payload, rel=0.03)
        assert wire(AllGatherExchange(codec), ranks, numel) == (ranks - 1) * payload


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("exchange", [TwoShot, AllGatherExchange])
def test_bytes_that_virtual_ranks_send(exchange: type[TwoShot | AllGatherExchange], ranks: int) -> None:
    """The same from what programs really hand over in lockstep."""
    numel, codec = 1 << 18, BlockInt(4)
    spied = checks.Spied(exchange(codec))
    Lockstep(spied, flat_grain(numel), ranks).step([torch.zeros(numel)] * ranks)
    payloads = sum(sent_bytes(request, 0, ranks) for request in spied.seen) / ranks / codec.payload_bytes(numel)
    want = 2 * (ranks - 1) / ranks if exchange is TwoShot else ranks - 1
    assert payloads == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_routes_send_the_least_bytes(ranks: int) -> None:
    numel = 1 << 14
    for route in (Direct(Identity()), Ring(Identity()), RecursiveHalvingDoubling(Identity())):
        assert {wire(route, ranks, numel, rank) for rank in range(ranks)} == {8 * numel * (ranks - 1) // ranks}
    tree = [wire(Tree(Identity()), ranks, numel, rank) for rank in range(ranks)]
    assert max(tree) <= 2 * 4 * numel
    assert sum(tree) == 2 * (ranks - 1) * 4 * numel  # every edge carries its half up and down


def grain_s(reducer: Reducer, numel: int, ranks: int, link: Link, links: Links | None = None) -> float:
    """Seconds of a step of one grain."""
    spec = ParameterSpec("x", (numel,), torch.float32, torch.device("meta"))
    return step_s(reducer, [spec], ranks, link, links, grain_numel=numel)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("route", ROUTES[:3], ids=repr)
def test_formulas_are_what_programs_take(route: Route, ranks: int) -> None:
    numel, link = 1 << 12, Link(1e-4, 1e-8)
    simulated = grain_s(route, numel, ranks, link)
    assert simulated == pytest.approx(route.time_s(4 * numel, ranks, link), rel=1e-9)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 11])
@pytest.mark.parametrize("route", ROUTES, ids=repr)
def test_formulas_bound_what_programs_take(route: Route, ranks: int) -> None:
    """Where ranks are no power of two, some have less to do; shards differ by one element."""
    numel, link = 1 << 12, Link(1e-4, 1e-8)
    simulated = grain_s(route, numel, ranks, link)
    assert 0 < simulated <= route.time_s(4 * numel, ranks, link) * (1 + 2 * ranks / numel)


def test_latency_of_a_tree_grows_with_the_logarithm() -> None:
    link, numel = Link(1.0, 0.0), 100
    times = {ranks: grain_s(Tree(Identity()), numel, ranks, link) for ranks in (4, 16, 64)}
    assert times[64] - times[16] == times[16] - times[4] <= 4
    assert grain_s(Ring(Identity()), numel, 64, link) == 126


def test_a_fast_axis_inside_nodes_pays() -> None:
    slow, fast, numel = Link(1e-3, 1e-7), Link(1e-5, 1e-10), 1 << 16
    flat = grain_s(TwoShot(BlockInt(4)), numel, 8, slow)
    nodes = Hierarchical(TwoShot(BlockInt(4)), node_size=4)
    assert grain_s(nodes, numel, 8, slow, {nodes.axes(8)[0]: fast}) < 0.6 * flat


@pytest.mark.parametrize(
    ("spec", "own", "shared"),
    [
        ("signsgd_mv", 1 + 7, 2 * 7),  # votes to their owners, majorities around a ring; then one all-reduce of flags
        ("randomk:0.1", 2 * 7, 2 * 7),
        ("krum:1", 1 + 7, 7),  # one all-gather of distances
        ("dgc:0.1,clip=1", 7, 2 * 7),  # a norm over grains alone costs nothing
    ],
)
def test_what_grains_share_is_charged_once_a_step(spec: str, own: int, shared: int) -> None:
    specs = [ParameterSpec(f"p{i}", (100,), torch.float32, CPU) for i in range(5)]
    for count in (1, 5):
        seconds = step_s(parse(spec), specs[:count], 8, Link(1.0, 0.0), grain_numel=100)
        assert seconds == count * own + shared


@pytest.mark.parametrize("n", range(1, 40))
def test_no_rank_has_children_in_both_trees(n: int) -> None:
    trees = double_tree(n)
    for tree in trees:
        assert sum(node.parent is None for node in tree) == 1
        for rank, node in enumerate(tree):
            assert all(tree[child].parent == rank and tree[child].depth == node.depth + 1 for child in node.children)
            assert len(node.children) <= 2
        assert max(node.depth for node in tree) <= power_of_two(n).bit_length()
    assert not any(first.children and second.children for first, second in zip(*trees, strict=True)) or n == 2


def test_shards_are_even() -> None:
    for numel in (0, 1, 7, 100):
        for count in (1, 2, 3, 7, 9):
            sizes = [shard.numel() for shard in shards(torch.arange(numel), count)]
            assert sum(sizes) == numel
            assert max(sizes) - min(sizes) <= 1


# Auto ----------------------------------------------------------------------------------------------------------------


def test_auto_goes_by_its_curves() -> None:
    curves = tuple(Curve((TimedSize(0, alpha), TimedSize(1000, alpha + 1))) for alpha in (5.0, 4.0, 3.0, 1.0, 2.0))
    auto = Auto(Identity(), curves)
    assert auto.choose(10) == RecursiveHalvingDoubling(Identity())
    check_is_mean(auto, 3, flat_grain(100))
    assert Auto(Identity()).choose(10) == AllReduceExchange(Identity())
    assert repr(auto) == repr(Auto(Identity()))
    with pytest.raises(CompositionError, match="candidates"):
        Auto(Identity(), curves[:2])
    with pytest.raises(CompositionError, match="rise"):
        Curve((TimedSize(5, 1.0), TimedSize(5, 2.0)))
    with pytest.raises(CompositionError, match="rise"):
        Curve(())


@pytest.mark.parametrize(("sizes", "ranks"), [([2], 4), ([(2, 3)], 5), ([2, 2], 8)], ids=str)
def test_ranks_choose_alike_where_nodes_have_parts_of_unequal_size(sizes: Sequence[NodeSize], ranks: int) -> None:
    """The smaller part alone would go another way, and ranks in lockstep would ask for different things."""
    numel, largest = 12_040, 24_576 // (2 if len(sizes) == 2 else 1)
    backend, slow = (Curve((TimedSize(0, time), TimedSize(1, time))) for time in (1.0, 9.0))
    for fast_up_to in (largest - 1, largest):
        direct = Curve((TimedSize(0, 0.1), TimedSize(fast_up_to, 0.1), TimedSize(fast_up_to + 1, 9.0)))
        auto = Auto(Identity(), (backend, direct, slow, slow, slow))
        xs = [torch.arange(numel, dtype=torch.float32) * (rank + 1) for rank in range(ranks)]
        for result in Lockstep(in_levels(auto, sizes), flat_grain(numel), ranks).reduce(xs):
            torch.testing.assert_close(result.value, torch.arange(numel) * (ranks + 1) / 2)


@pytest.mark.parametrize("route", [Direct, Ring, RecursiveHalvingDoubling, Tree, Auto])
def test_payloads_that_cannot_be_added_are_refused(route: type[AllReduceExchange]) -> None:
    with pytest.raises(CompositionError, match="cannot be added"):
        route(BlockInt(4))


# Axes and nodes ------------------------------------------------------------------------------------------------------

MESHES = [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 4)]
"""(nodes, ranks of a node)."""

INTERS: list[Reducer] = [
    AllReduceExchange(Identity()),
    Ring(Identity()),
    Tree(Identity()),
    RecursiveHalvingDoubling(Identity()),
    TwoShot(Identity()),
]


def test_collectives_on_an_axis_stay_in_their_group() -> None:
    """Ranks 0 1 2 / 3 4 5: rows of the mesh, then columns."""
    for axis, groups in ((Axis(3), [(0, 1, 2), (3, 4, 5)]), (Axis(2, 3), [(0, 3), (1, 4), (2, 5)])):
        sums = perform([Sum(torch.tensor([2.0**rank]), axis=axis) for rank in range(6)])
        rows = perform([Gather(torch.tensor([rank], dtype=torch.uint8), axis) for rank in range(6)])
        own = [torch.full((axis.size, 1), rank, dtype=torch.uint8) for rank in range(6)]
        swapped = perform([AllToAll(each, axis) for each in own])
        for group in groups:
            for rank in group:
                assert axis.members(rank) == group
                assert sums[rank].item() == sum(2.0**r for r in group)
                assert rows[rank].view(-1).tolist() == swapped[rank].view(-1).tolist() == list(group)


def test_messages_on_an_axis_count_its_places() -> None:
    axis, like = Axis(2, 3), torch.empty(0)
    sent = [torch.tensor([float(rank)]) for rank in range(6)]
    requests = [
        SendRecv(like, (Message(1 - axis.index(r), sent[r]),), (Expected(1 - axis.index(r), 1),), axis)
        for r in range(6)
    ]
    assert [found.item() for found in perform(requests)] == [3, 4, 5, 0, 1, 2]


@pytest.mark.parametrize(("nodes", "places"), MESHES)
@pytest.mark.parametrize("inter", INTERS, ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 600, 2049])
def test_two_levels_make_the_mean(nodes: int, places: int, inter: Reducer, numel: int) -> None:
    check_is_mean(Hierarchical(inter, places), nodes * places, flat_grain(numel))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_levels_in_any_dtype(dtype: torch.dtype) -> None:
    check_is_mean(Hierarchical(AllReduceExchange(Identity()), 3), 6, flat_grain(700, dtype=dtype))


LOSSY = [AllGatherExchange(TopK(0.1)), AllGatherExchange(BlockInt(4)), TwoShot(BlockInt(4)), AllReduceExchange(BF16())]


@pytest.mark.parametrize(("nodes", "places"), MESHES)
@pytest.mark.parametrize("inter", LOSSY, ids=repr)
def test_nothing_is_lost_between_nodes(nodes: int, places: int, inter: Reducer) -> None:
    ranks, grain = nodes * places, flat_grain(1500)
    lockstep = Lockstep(checks.Spied(ErrorFeedback(Hierarchical(inter, places))), grain, ranks)
    for step in range(3):
        xs = xs_of(grain, ranks, step)
        checks.check_means(checks.check_conservation(lockstep, xs), xs)


@pytest.mark.parametrize("inter", LOSSY[:3], ids=repr)
def test_what_a_node_owes_contracts(inter: Reducer) -> None:
    """Summed over its ranks, what a node did not send is as small as the inner exchange declares."""
    places, grain = 3, flat_grain(1500)
    reducer = Hierarchical(inter, places)
    delta = reducer.contraction(grain)
    assert delta is not None
    xs = xs_of(grain, 2 * places)
    left = [x.clone() for x in xs]
    for x, result in zip(left, Lockstep(reducer, grain, 2 * places).reduce(xs), strict=True):
        result.sent.subtract_from(x)
    for node in range(2):
        ranks = slice(node * places, (node + 1) * places)
        total, owed = torch.stack(xs[ranks]).sum(0), torch.stack(left[ranks]).sum(0)
        assert checks.norm(owed) <= (1 - delta) ** 0.5 * checks.norm(total) * (1 + 2.0**-12)


@pytest.mark.parametrize("inter", LOSSY[:3], ids=repr)
@pytest.mark.draw(1)
def test_residuals_of_nodes_stay_bounded(inter: Reducer) -> None:
    grain, ranks = flat_grain(1500), 6
    lockstep = Lockstep(ErrorFeedback(Hierarchical(inter, 3)), grain, ranks)
    drift = sample("normal", grain.shape, seed=0).sign()
    sizes: list[float] = []
    for step in range(300):
        lockstep.step([drift + sample("normal", grain.shape, seed=10 * step + rank) for rank in range(ranks)])
        owed = checks.owed(lockstep.states, grain)
        sizes.append(max(checks.norm(e) for e in owed.e) + checks.norm(owed.s))
    assert sum(sizes[240:]) <= 1.4 * sum(sizes[60:120])


def test_owned_shards_lie_end_to_end_in_the_grain() -> None:
    grain, ranks = flat_grain(5000), 6
    lockstep = Lockstep(Hierarchical(TwoShot(BlockInt(4)), 3), grain, ranks)
    for _ in range(2):
        covered = torch.zeros(grain.numel, dtype=torch.int32)
        for rank, state in enumerate(lockstep.states):
            (leaf,) = [leaf for _, leaf in walk(state)]
            covered[leaf.first(rank) : leaf.first(rank) + leaf.tensor.numel()] += 1
        assert bool((covered >= 1).all())
        lockstep.step(xs_of(grain, ranks))


def test_between_nodes_travels_only_a_share() -> None:
    numel, ranks, places = 1 << 18, 8, 4
    spied = checks.Spied(Hierarchical(TwoShot(BlockInt(4)), places))
    Lockstep(spied, flat_grain(numel), ranks).step([torch.zeros(numel)] * ranks)
    intra, between = Hierarchical(TwoShot(BlockInt(4)), places).axes(ranks)
    by_axis = {
        axis: sum(sent_bytes(request, 0, ranks) for request in spied.seen if request.axis == axis) / ranks
        for axis in (intra, between)
    }
    assert by_axis[between] == pytest.approx(BlockInt(4).payload_bytes(numel) / places, rel=0.03)
    assert by_axis[intra] == pytest.approx(2 * (places - 1) / places * 4 * numel, rel=0.03)
    spec = ParameterSpec("w", (numel,), torch.float32, CPU)
    found = cost(Hierarchical(TwoShot(BlockInt(4)), places), [spec], ranks, grain_numel=numel)
    assert found.inside_bytes == by_axis[intra]
    assert found.wire_bytes == sum(by_axis.values())


IN_NODES: dict[str, Callable[[Reducer], Reducer]] = {
    "alone": lambda inner: inner,
    "guarded": Guard,
    "warmed up": lambda inner: CompressionWarmUp(AllReduceExchange(Identity()), inner, 3),
    "in a policy": lambda inner: Partition((("*bias", AllReduceExchange(Identity())),), inner),
    "in a rule of a policy": lambda inner: Partition((("w", inner),), AllReduceExchange(Identity())),
}


@pytest.mark.parametrize("wrapped", IN_NODES.values(), ids=IN_NODES.keys())
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_nodes_that_do_not_divide_the_ranks_are_refused(ranks: int, wrapped: Callable[[Reducer], Reducer]) -> None:
    """Before any message, wherever they lie: else nothing would be compressed and nobody told."""
    reducer, spec = wrapped(Hierarchical(TwoShot(BlockInt(4)), 4)), ParameterSpec("w", (8,), torch.float32, CPU)
    served = reducer.assign(spec)
    for start in (
        lambda: reducer.require_ranks(ranks),
        lambda: Lockstep(served, flat_grain(8), ranks),
        lambda: cost(reducer, [spec], ranks),
    ):
        with pytest.raises(CompositionError, match=f"4 ranks a node do not divide the {ranks} ranks of this run"):
            start()
    with pytest.raises(CompositionError, match="4 ranks a node"):
        Replicated().check("int4,node=4", ranks)
    reducer.require_ranks(8)


def test_bytes_inside_nodes_are_told_apart() -> None:
    spec = [ParameterSpec("w", (1 << 12,), torch.float32, CPU)]
    nodes, flat = (cost(parse(text), spec, 8) for text in ("int4,node=4", "int4"))
    assert nodes.inside_bytes > nodes.between_bytes > 0
    assert nodes.inside_bytes + nodes.between_bytes == nodes.wire_bytes
    assert (flat.inside_bytes, flat.between_bytes) == (0, flat.wire_bytes)
    one = cost(parse("int4,node=8,guard=off"), spec, 8)
    assert (one.between_bytes, one.inside_bytes) == (0, one.wire_bytes)


def test_what_makes_no_hierarchy_is_refused() -> None:
    with pytest.raises(CompositionError, match="ErrorFeedback\\(Hierarchical"):
        Hierarchical(ErrorFeedback(AllGatherExchange(TopK(0.1))), 2)
    with pytest.raises(CompositionError, match="below 1"):
        Hierarchical(AllGatherExchange(TopK(0.1)), -1)
    with pytest.raises(SpecError, match="expected how many ranks share a node, 1 or more, or auto"):
        parse("int4,node=0")
    with pytest.raises(ValueError, match="no node"):
        parse("powersgd,node=2")
