"""Nodes of unequal size, and levels of nodes: the mean over all ranks, what is owed, and what crosses each link."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gradwire.cli.main import main
from gradwire.codecs import BlockInt, Identity
from gradwire.core.axis import NodeSize
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import ParameterSpec, flat_grain
from gradwire.core.state import walk
from gradwire.drivers.cost import cost
from gradwire.drivers.level_bytes import level_bytes
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import AllGatherExchange, AllReduceExchange, Auto, ErrorFeedback, Reducer, Ring, Tree, TwoShot
from gradwire.reducers.hierarchical import Hierarchical, in_levels
from gradwire.spec import parse
from gradwire.tasks.builtin import make_task
from gradwire.topology import Topology, described

LEVELS: dict[str, tuple[tuple[NodeSize, ...], int]] = {
    "1/2/3": (((1, 2, 3),), 6),
    "3/2/4": (((3, 2, 4),), 9),
    "2/2": (((2, 2),), 4),
    "2x2": ((2, 2), 8),
    "2x1/2": ((2, (1, 2)), 6),
    "1/2/3x2/1": (((1, 2, 3), (2, 1)), 6),
    "3/1/4x1/2": (((3, 1, 4), (1, 2)), 8),
}
INTERS = [each(Identity()) for each in (AllReduceExchange, TwoShot, AllGatherExchange, Tree, Ring, Auto)]
INTERS.append(Tree(Identity(), chunk_bytes=64))  # whose rounds depend on the size


def tensors(numel: int, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


@pytest.mark.parametrize("inter", INTERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("numel", [0, 10, 3000])
def test_levels_make_the_mean_over_ranks(inter: Reducer, name: str, numel: int) -> None:
    levels, ranks = LEVELS[name]
    xs = tensors(numel, ranks)
    means = Lockstep(in_levels(inter, levels), flat_grain(numel), ranks).step(xs)
    torch.testing.assert_close(means[0], torch.stack(xs).mean(0))
    for mean in means[1:]:
        assert torch.equal(mean, means[0])


@pytest.mark.parametrize("name", LEVELS)
def test_what_is_not_sent_is_owed(name: str) -> None:
    """n * mean + all that is owed is all that ranks gave, so every loss between nodes has one who owes for it."""
    levels, ranks = LEVELS[name]
    grain, xs = flat_grain(3000), tensors(3000, ranks)
    lockstep = Lockstep(ErrorFeedback(in_levels(TwoShot(BlockInt(4)), levels)), grain, ranks)
    total = torch.zeros(3000, dtype=torch.float64)
    for steps in range(1, 4):
        total += ranks * lockstep.step(xs)[0].double()
        owed = torch.zeros(3000, dtype=torch.float64)
        for rank, state in enumerate(lockstep.states):
            for _, leaf in walk(state):
                if leaf.kind == "element":
                    owed += leaf.tensor.double()
                elif leaf.kind == "owned":
                    first = leaf.first(rank)
                    part = owed[first : first + leaf.tensor.numel()]  # the last shard is filled up behind the end
                    part += ranks * leaf.tensor[: part.numel()].double()
        torch.testing.assert_close(total + owed, steps * torch.stack(xs).double().sum(0), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["1/2/3", "2x1/2"])
def test_a_resumed_run_is_the_same_run(name: str) -> None:
    levels, ranks = LEVELS[name]
    reducer, xs = ErrorFeedback(in_levels(TwoShot(BlockInt(4)), levels)), tensors(3000, ranks)
    straight, resumed = (Lockstep(reducer, flat_grain(3000), ranks) for _ in range(2))
    straight.step(xs)
    resumed.load_state_dicts(straight.state_dicts())
    for mean, other in zip(straight.step(xs), resumed.step(xs), strict=True):
        assert torch.equal(mean, other)


SPECS = [ParameterSpec("w", (1 << 14,), torch.float32, torch.device("cpu"))]
SITES = """
[[level]]
name = "site"
groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
"""


def crossing(reducer: Reducer, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What leaves each group, by the sizes that every rank's axes imply for ranks that are all elsewhere."""
    place = {rank: number for number, group in enumerate(groups) for rank in group}
    found = [0] * len(groups)
    for rank, own in place.items():
        found[own] += cost(reducer, SPECS, len(place), rank=rank).between_bytes
    return tuple(found)


@pytest.mark.parametrize(
    ("spec", "keys"), [("int4,node=1/2/3,guard=off", "abbccc"), ("int4,node=2,guard=off", "aabbcc")]
)
def test_what_leaves_a_node_is_what_its_ranks_send_between_nodes(spec: str, keys: str) -> None:
    topology, reducer = Topology.of_keys(keys), parse(spec)
    _, node = level_bytes(reducer, SPECS, topology)
    assert node.sent == crossing(reducer, topology.groups)
    payload = BlockInt(4).payload_bytes(1 << 14)
    assert node.sent == pytest.approx([2 * 2 / 3 * payload] * 3, rel=0.05)


def test_the_fewer_levels_are_compressed_the_less_crosses_the_slowest() -> None:
    topology = described(Topology.of_keys("aabbccdd"), SITES)
    payload, dense = BlockInt(4).payload_bytes(1 << 14), 4 << 14
    sent = {
        spec: {each.level: each.sent for each in level_bytes(f"{spec},guard=off", SPECS, topology)}
        for spec in ("int4", "int4,node=2", "int4,node=2x2")
    }
    assert sent["int4,node=2x2"]["site"] == pytest.approx([payload] * 2, rel=0.05)
    assert sent["int4,node=2"]["site"] == pytest.approx([2 * payload] * 2, rel=0.05)
    assert sent["int4"]["site"] == pytest.approx([4 * payload] * 2, rel=0.05)
    assert sent["int4,node=2x2"]["node"] == pytest.approx([dense + payload / 2] * 4, rel=0.05)
    assert sent["int4,node=2"]["node"] == pytest.approx([1.5 * payload] * 4, rel=0.05)


def test_the_command_tells_what_leaves_each_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = '[[level]]\nname = "node"\ngroups = [[0, 1], [2, 3], [4, 5], [6, 7]]\n'
    (tmp_path / "sites.toml").write_text(SITES + nodes)
    words = ["cost", "int4,node=2x2", "--hosts", "8", "--topology", str(tmp_path / "sites.toml")]
    assert main(words) == 0
    printed, model = capsys.readouterr().out, make_task("bytes", 0, None).model
    found = level_bytes("int4,node=2x2", model, described(Topology.of_keys("aabbccdd"), SITES))
    assert [f"{max(each.sent):,} B" in printed for each in found] == [True] * 3
    assert main([*words, "--rate", "50mbit"]) != 0
    assert "no --rate" in "".join(capsys.readouterr()).replace("\n", " ")
    assert main([*words[:-1], str(tmp_path / "none.toml")]) != 0
    assert "cannot be read" in "".join(capsys.readouterr()).replace("\n", " ")


@pytest.mark.parametrize(
    ("spec", "ranks", "said"),
    [
        ("int4,node=1/2/3", 4, "nodes of 1, 2 and 3 ranks have 6 ranks together, and this run has 4"),
        ("int4,node=2x2", 6, "4 ranks a node do not divide the 6 ranks of this run"),
        ("int4,node=2x1/2", 8, "nodes of 1 and 2 ranks have 3 ranks together, and this run has 4"),
    ],
)
def test_other_numbers_of_ranks_are_refused(spec: str, ranks: int, said: str) -> None:
    with pytest.raises(CompositionError, match=re.escape(said)):
        cost(spec, SPECS, ranks)


@pytest.mark.parametrize("node", ["1/0", "2x", "x2", "2x0", "1//2", "-1/2"])
def test_what_cannot_be_read_is_refused(node: str) -> None:
    with pytest.raises(SpecError, match="expected how many ranks share a node"):
        parse(f"int4,node={node}")


def test_levels_are_written_as_they_are_read() -> None:
    assert str(parse("int4,node=2x2")) == "int4,node=2x2"
    assert parse("none,node=2x2") == Hierarchical(Hierarchical(AllReduceExchange(Identity()), 2), 2)
    assert parse("none,node=1x2") == parse("none,node=2")
    with pytest.raises(CompositionError, match="node_size \\(1, 0\\) is below 1"):
        Hierarchical(AllReduceExchange(Identity()), (1, 0))
