"""`node=auto`: ranks find out who shares a node, and train as with the number written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.core.errors import CompositionError, SpecError
from gradwire.drivers.cost import cost
from gradwire.ranks.supervised import run_function
from gradwire.reducers.hierarchical import AS_FOUND, Hierarchical
from gradwire.spec import parse
from node_cases import STEPS

CASES = Path(__file__).with_name("node_cases.py")


def run(case: str, ranks: int = 4, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 120)


@pytest.mark.parametrize("nodes", ["aabb", "abcd", "aaaa"])
@pytest.mark.draw(1)
@pytest.mark.turns("nodes", 2)
def test_it_is_the_number_of_ranks_on_each_node(nodes: str) -> None:
    size = len(nodes) // len(set(nodes))
    found = run("reduced", method="int4,node=auto", nodes=nodes)
    written = run("reduced", method=f"int4,node={size}" if size > 1 else "int4", nodes=nodes)
    flags = STEPS if size == 1 else 0  # a byte in each step, since a mean over nodes shows no NaN by itself
    for one, other in zip(found, written, strict=True):
        assert (one["sums"], one["bytes"]) == (other["sums"], other["bytes"] + flags)
        assert one["method"] == "int4,node=auto"
        assert f"node_size={size})" in one["reducer"]
        assert one["reducer"] in one["begun"]


@pytest.mark.turns("nodes", 2)
def test_a_session_changes_to_it() -> None:
    changed = run("reduced", method="none", nodes="aabb", change="topk:0.1,node=auto")
    written = run("reduced", method="none", nodes="aabb", change="topk:0.1,node=2")
    assert [(one["sums"], one["reducer"]) for one in changed] == [(one["sums"], one["reducer"]) for one in written]


@pytest.mark.turns("nodes", 2)
def test_models_that_are_averaged_find_their_nodes() -> None:
    found, written = (
        run("averaged", method=f"local:2,outer=(int4,node={node})", nodes="aabb") for node in ("auto", "2")
    )
    assert found == written


@pytest.mark.turns("nodes", 2)
def test_nodes_of_unequal_size_are_found() -> None:
    """Gloo's ranks end with the bits that virtual ranks end with, and their counters show what is predicted."""
    found = run("reduced", method="int4,node=auto", nodes="abbccc", ranks=6)
    written = run("reduced", method="int4,node=1/2/3", nodes="abbccc", ranks=6)
    assert [one["sums"] for one in found] == [one["sums"] for one in written]
    assert len({tuple(one["sums"]) for one in found}) == 1
    assert "node_size=(1, 2, 3))" in found[0]["reducer"]
    model = [torch.zeros(3000, requires_grad=True)]
    predicted = [cost("int4,node=1/2/3", model, 6, rank=rank).wire_bytes for rank in range(6)]
    assert [one["bytes"] for one in found] == [STEPS * nbytes for nbytes in predicted]


def test_nodes_whose_ranks_are_scattered_are_told_on_every_rank() -> None:
    said = run("refused", methods=["int4,node=auto"] * 4, nodes="abab")
    assert len(set(said)) == 1
    assert said[0].startswith("TopologyError: node=auto needs nodes whose ranks follow each other, and found 4 ranks")
    assert "ranks 0 and 2 of a node do not follow each other" in said[0]


def test_ranks_that_do_not_all_want_it_are_told() -> None:
    said = run("refused", 2, methods=["int4,node=auto", "int4,node=2"], nodes="aa")
    assert [text.split(":")[0] for text in said] == ["AttachError"] * 2
    assert "rank 1 has int4,node=2, seed=0" in said[0]
    assert "and rank 0 has int4,node=auto, seed=0" in said[0]


def test_without_ranks_a_number_is_wanted() -> None:
    assert str(parse("int4,node=auto")) == "int4,node=auto"
    with pytest.raises(CompositionError, match="write a number here, as in node=8"):
        Hierarchical(parse("none"), AS_FOUND).axes(4)
    with pytest.raises(CompositionError, match="write a number here, as in node=8"):
        cost("int4,node=auto", nn.Linear(10, 10), 4)
    with pytest.raises(SpecError, match="expected how many ranks share a node"):
        parse("int4,node=some")


SITES = """
[[level]]
name = "site"
groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
rate = "{site}"
latency_ms = 0.1

[[level]]
name = "node"
rate = "200mbit"
latency_ms = 0.1

[[level]]
name = "rank"
rate = "1gbit"
latency_ms = 0.1
"""


@pytest.mark.draw(1)
@pytest.mark.parametrize(("site", "written"), [("1mbit", "2x2"), ("100mbit", "2")])
@pytest.mark.turns("nodes", 2)
def test_inside_groups_of_nodes_it_compresses_where_that_takes_less_time(
    site: str, written: str, tmp_path: Path
) -> None:
    """On the rates that a description gives for every level, so that nothing is measured."""
    file = tmp_path / "sites.toml"
    file.write_text(SITES.format(site=site))
    found = run("reduced", method="int4,node=auto", nodes="aabbccdd", ranks=8, topology=str(file))
    by_hand = run("reduced", method=f"int4,node={written}", nodes="aabbccdd", ranks=8)
    assert [one["sums"] for one in found] == [one["sums"] for one in by_hand]
    assert [one["reducer"] for one in found] == [one["reducer"] for one in by_hand]
