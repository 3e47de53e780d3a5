"""Meshes for parallel training: their axes, and a sentence for each product that is impossible."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from gradwire.core.errors import TopologyError
from gradwire.ranks.supervised import run_function
from gradwire.topology import Topology, mesh, mesh_sizes


def test_tensor_parallelism_is_innermost() -> None:
    sizes = {"tp": 2, "dp": 2, "cp": 3, "pp": 5, "ep": 7}
    assert list(mesh_sizes(2 * 2 * 3 * 5 * 7, sizes, nodes=2).items()) == [
        ("pp", 5), ("dp", 2), ("ep", 7), ("cp", 3), ("tp", 2)
    ]  # fmt: skip
    assert mesh_sizes(12, {"tp": 3}) == {"dp": 4, "tp": 3}
    assert mesh_sizes(4, {}) == {"dp": 4}


@pytest.mark.parametrize(
    ("ranks", "sizes", "nodes", "here", "said"),
    [
        (8, {"dp": 3, "tp": 2}, None, None, "dp=3 x tp=2 make 6 ranks, and there are 8: take dp=4, or start 6 ranks"),
        (8, {"tp": 3}, None, None, "tp=3 make 3 ranks, which do not divide the 8 that there are"),
        (8, {"pp": 16}, None, None, "pp=16 make 16 ranks, which do not divide the 8 that there are"),
        (8, {"cp": 0}, None, None, "cp=0 is below 1: write how many ranks the axis has, or leave it out"),
        (8, {"ep": -1}, None, None, "ep=-1 is below 1"),
        (8, {"tp": 4}, 2, None, "tp=4 puts ranks 0, 1, 2 and 3 into one group, and they are on nodes 0 and 1"),
        (8, {"tp": 4}, None, 2, "so take a tp that divides 2, with the ranks of a node one after the other"),
        (4, {"tp": 2}, Topology.of_keys("abab"), None, "tp=2 puts ranks 0 and 1 into one group"),
        (6, {"tp": 2}, Topology.of_keys("abbccc"), None, "so take a tp that divides 1"),
        (8, {"tp": 2}, 4, 2, "nodes=4 says that each node has so many ranks, and torchrun has started 2 on this one"),
        (8, {"tp": 2}, 3, None, "nodes of 3 ranks do not make up the 8 ranks of this run"),
        (8, {"tp": 2}, Topology.of_keys("aabb"), None, "nodes= is a topology of 4 ranks, and there are 8"),
    ],
)
def test_what_is_impossible_is_told(
    ranks: int, sizes: dict[str, int], nodes: int | Topology | None, here: int | None, said: str
) -> None:
    with pytest.raises(TopologyError, match=re.escape(said)):
        mesh_sizes(ranks, sizes, nodes, here)


def test_without_ranks_there_is_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not dist.is_initialized()
    with pytest.raises(TopologyError, match="start them by torchrun, or call init_process_group first"):
        mesh(tp=2)


def on_rank(rank: int, world_size: int) -> dict[str, list[int]]:
    made = mesh(tp=2, pp=2, nodes=2, device_type="cpu")
    assert made.mesh_dim_names == ("pp", "dp", "tp")
    dist.barrier()  # rank 0 has the store by which others still make their groups
    return {name: dist.get_process_group_ranks(made[name].get_group()) for name in ("pp", "dp", "tp")}


@pytest.mark.one_draw_in(2)
def test_ranks_meet_on_each_axis() -> None:
    found = run_function(f"{__file__}:on_rank", 4, {}, 120)
    assert found[2] == {"pp": [0, 2], "dp": [2], "tp": [2, 3]}
