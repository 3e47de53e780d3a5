"""What the links between ranks carry: measured on threads, in processes, and on emulated hosts."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import Exchange, ThreadTransport
from gradwire.core.link import Link
from gradwire.drivers import axes
from gradwire.drivers.axes import answer_pings, measured_links
from gradwire.drivers.interpreter import Pending
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.network import Network
from gradwire.ranks.supervised import run_function, run_ranks
from gradwire.topology import AxisLinks, HostIdentity, Topology, described
from namespaces import needs_namespaces
from trials import unspoiled

CASES = Path(__file__).with_name("topology_cases.py")
CPU = torch.device("cpu")
SITES = "[[level]]\nname = 'site'\ngroups = [[0, 1], [2, 3]]\n"


# Links, on threads ----------------------------------------------------------------------------------------------------


def on_threads(topology: Topology) -> tuple[list[Any], list[ThreadTransport]]:
    exchange = Exchange(topology.world_size)
    transports = [ThreadTransport(exchange, rank) for rank in range(topology.world_size)]
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(functools.partial(measured_links, topology, device=CPU), transports)), transports


def test_all_ranks_issue_the_same_and_find_the_same_on_unequal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "MOST_BYTES", 1 << 17)
    monkeypatch.setattr(axes, "TRIPS_S", 0.0)
    found, transports = on_threads(Topology.of_keys("aabbc"))
    assert all(each == found[0] for each in found)
    assert [link.level for link in found[0]] == ["rank", "node"]
    assert [[pair.ranks for pair in link.pairs] for link in found[0]] == [[(0, 1), (2, 3)], [(0, 2), (0, 4)]]
    assert all(link.link.alpha_s > 0 for link in found[0])
    kinds = [[type(request) for request in transport.requests] for transport in transports]
    assert all(each == kinds[0] for each in kinds)


def test_the_next_ping_is_expected_before_the_answer_to_the_last_one_is_waited_for() -> None:
    log: list[str] = []

    class Noted(Pending):
        def __init__(self, what: str) -> None:
            self._what = what
            log.append(f"issue {what}")

        def wait(self) -> torch.Tensor:
            log.append(f"wait for {self._what}")
            return torch.zeros(0)

    answer_pings(lambda: Noted("answer"), lambda: Noted("ping"), 2, lambda pending: pending.wait())
    assert log == [
        *("issue ping", "wait for ping", "issue answer", "issue ping", "wait for answer"),
        *("wait for ping", "issue answer", "wait for answer"),
    ]


def test_what_a_file_says_of_a_link_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "MOST_BYTES", 1 << 15)
    monkeypatch.setattr(axes, "TRIPS_S", 0.0)
    text = "[[level]]\nname = 'node'\nrate = '50mbit'\nlatency_ms = 20\n[[level]]\nname = 'rank'\nrate = '80mbit'"
    topology = described(Topology.of_keys("aab"), text)
    (found, *_), _ = on_threads(topology)
    links = AxisLinks(found)
    assert links.of("node") == Link(0.02, 1.6e-7)
    inside = links.of("rank")
    assert inside is not None
    assert inside.beta_s_per_byte == 1e-7
    assert 0 < inside.alpha_s < 1
    assert "between nodes: 20 ms one way, 50 Mbit/s (latency and rate as described)" in links.summary(topology)
    assert "80 Mbit/s (rate as described, 1 pair measured)" in links.summary(topology)


def test_one_rank_has_nothing_to_measure() -> None:
    (found,), _ = on_threads(Topology.of_keys("a"))
    assert found == ()
    assert AxisLinks(found).summary(Topology.of_keys("a")) == "nothing to measure: one rank"


# Links, in processes --------------------------------------------------------------------------------------------------


def on_ranks(nodes: Sequence[str], case: str = "links", **arguments: Any) -> list[Any]:
    environments = [{"GRADWIRE_NODE": node} for node in nodes]
    return run_function(f"{CASES}:{case}", len(nodes), arguments, 120, environments=environments)


@pytest.mark.one_draw_in(3)
def test_processes_find_their_nodes_and_links_and_keep_them_for_the_same_hosts(tmp_path: Path) -> None:
    cache = str(tmp_path / "kept" / "links.json")
    first = on_ranks("aab", cache=cache)
    assert all(each["links"] == first[0]["links"] and each["groups"] == [[0, 1], [2]] for each in first)
    assert first[0]["source"] == "measured"
    assert first[0]["notes"] == []
    assert set(first[0]["links"]) == {"rank", "node"}
    again = on_ranks("aab", cache=cache)
    assert {each["source"] for each in again} == {cache}
    assert all(each["links"] == first[0]["links"] for each in again)
    assert f"read from {cache}" in again[0]["summary"]
    other = on_ranks("aac", cache=cache)
    assert {each["source"] for each in other} == {"measured"}
    refusal = f"{cache} is not used, since it was measured with rank 2 on b, which runs on c now: measured anew"
    assert all(each["notes"] == [refusal] for each in other)
    assert on_ranks("aac", cache=cache)[1]["source"] == cache


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"backend": "gloo"', '"backend": "nccl"', "it was measured with backend=nccl, which is gloo now"),
        ('"alpha_s"', '"alpha"', "it is no link profile"),
        ("{", "", "it is no link profile"),
        ('"format": 5', '"format": 4', "it has format 4, and 5 is known"),
        ('"names": [', '"names": ["a", ', "it is no link profile (2 hosts with 3 names"),
    ],
)
def test_a_file_of_other_links_is_refused_by_name(old: str, new: str, reason: str, tmp_path: Path) -> None:
    cache = tmp_path / "links.json"

    def links(transport: ThreadTransport) -> AxisLinks:
        here = HostIdentity("a", "boot", 1, f"node{transport.rank}")
        return LinkProfiler(transport, CPU, cache, identity=here).axis_links()

    def on_both() -> list[AxisLinks]:
        exchange = Exchange(2)
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(links, [ThreadTransport(exchange, rank) for rank in range(2)]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axes, "MOST_BYTES", 1 << 15)
        patch.setattr(axes, "TRIPS_S", 0.0)
        assert {each.source for each in on_both()} == {"measured"}
        assert {each.source for each in on_both()} == {str(cache)}
        cache.write_text(cache.read_text().replace(old, new, 1))
        refused = on_both()
        assert refused[0] == refused[1]
        assert refused[0].source == "measured"
        assert f"links.json is not used, since {reason}" in refused[0].notes[0]
        cache.unlink()
        cache.mkdir()
        assert any("cannot be written" in note for note in on_both()[1].notes)
        assert list(tmp_path.iterdir()) == [cache]


def test_descriptions_are_read_on_any_rank_and_refused_on_all(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[[level]]\nname = 'site'\ngroups = [[0, 1], [2]]")
    bad.write_text("[[level]]\nname = 'site'\ngroups = [[0, 2], [1]]")
    for files, said in (
        ([None, str(good), None], "nothing"),
        ([str(good), str(bad), None], "ranks 0 and 1 have different descriptions: give every rank the same file"),
        ([None, str(tmp_path / "none"), None], "rank 1 cannot read the description: "),
        ([str(bad)] * 3, f"{bad}: level site puts ranks 0 and 1 into different groups, and they run on one host"),
    ):
        told = on_ranks("aab", "refused", descriptions=files)
        assert all(each.startswith(said) for each in told), told


# Links, on emulated hosts ---------------------------------------------------------------------------------------------


@pytest.mark.net
@pytest.mark.timeout(200)
@pytest.mark.long
def test_two_ranks_on_each_of_two_emulated_hosts_are_two_nodes(tmp_path: Path) -> None:
    """They share a boot id and a host name with all others, and tell each other's network apart."""
    needs_namespaces()
    with Network(2, "50mbit", delay="10ms") as network:
        results = [tmp_path / f"result{rank}.json" for rank in range(4)]
        words = [sys.executable, "-m", "gradwire.ranks.rank_main", f"{CASES}:links", "{}"]
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        run_ranks(
            [network.command(rank // 2, [*words, str(results[rank]), "100"]) for rank in range(4)],
            [
                {
                    **network.environment(rank // 2),
                    **path,
                    "RANK": str(rank),
                    "WORLD_SIZE": "4",
                    "LOCAL_RANK": str(rank % 2),
                }
                for rank in range(4)
            ],
            log_dir=tmp_path,
            deadline_s=100,
        )
        found = json.loads(results[3].read_text())
    assert found["groups"] == [[0, 1], [2, 3]]
    assert found["pairs"] == {"rank": [[0, 1], [2, 3]], "node": [[0, 2]]}
    inside, between = Link(*found["links"]["rank"]), Link(*found["links"]["node"])
    assert between.alpha_s > 5 * inside.alpha_s
    assert between.beta_s_per_byte > 5 * inside.beta_s_per_byte
    assert "(net " in found["summary"]


@pytest.mark.long
@pytest.mark.net
@pytest.mark.timeout(200)
def test_a_slow_host_is_seen_and_so_are_three_levels(tmp_path: Path) -> None:
    needs_namespaces()
    file = tmp_path / "sites.toml"
    file.write_text(SITES)

    def measured() -> dict[str, Any]:
        with Network(4, ["50mbit", "50mbit", "50mbit", "10mbit"], delay="4ms") as network:
            return run_function(f"{CASES}:links", 4, {"description": str(file)}, 120, network)[2]

    def rates_of(found: dict[str, Any]) -> dict[str, float]:
        return {level: 8e-6 / beta for level, (_, beta) in found["links"].items()}

    found = unspoiled(measured, lambda found: rates_of(found)["site"] > 0.9 * 50 * 1448 / 1514)
    rates = rates_of(found)
    assert found["pairs"] == {"node": [[0, 1], [2, 3]], "site": [[0, 2]]}
    assert rates["node"] == pytest.approx(10 * 1448 / 1514, rel=0.1)
    assert rates["site"] == pytest.approx(50 * 1448 / 1514, rel=0.1)
    assert "this is the slowest; the fastest: " in found["summary"]
    assert "between sites: " in found["summary"]
