"""What is measured of links once, and read from then on: in one run, and by the next one from a file."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

import gradwire
from engines import Exchange, ThreadTransport
from gradwire import parse
from gradwire.cli import main as cli
from gradwire.core.errors import TopologyError
from gradwire.core.link import Curve, Link, TimedSize
from gradwire.drivers import axes, link_profiler
from gradwire.drivers.groups import group_apart
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.measure import Bench
from gradwire.drivers.window import Caps
from gradwire.ranks.supervised import run_function
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Reducer
from gradwire.session.direct_lane import DirectLane
from gradwire.session.figures import links_file
from gradwire.topology import AxisLink, AxisLinks, HostIdentity, MeasuredPair
from gradwire.topology.link_profile import LinkProfile
from gradwire.topology.reduction_times import Probe, ReductionTimes

CASES = Path(__file__).with_name("session_cases.py")
CPU = torch.device("cpu")
T = TypeVar("T")


class Counted:
    """Stands in for what measures: times that grow from call to call, and how often one was asked for on rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.routes = self.reductions = 0
        monkeypatch.setattr(link_profiler, "curves", self._curves)
        monkeypatch.setattr(link_profiler, "reduction_times", self._reduction_times)
        monkeypatch.setattr(axes, "MOST_BYTES", 1 << 15)
        monkeypatch.setattr(axes, "TRIPS_S", 0.0)

    def _curves(self, auto: Auto, bench: Bench) -> tuple[Curve, ...]:
        self.routes += bench.transport.rank == 0
        return tuple(Curve((TimedSize(4, 0.1 / 3), TimedSize(8, 1.0 + i))) for i in range(len(auto.candidates)))

    def _reduction_times(self, bench: Bench, nbytes: int, caps: Caps) -> ReductionTimes:
        self.reductions += bench.transport.rank == 0
        return ReductionTimes(nbytes, 0.1, (Probe(nbytes // 2, 0.2, math.inf), Probe(nbytes, 0.3, 0.01)), 0.5, 0.25)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def on_both(file: Path | None, ask: Callable[[LinkProfiler], T], nodes: str = "aa") -> list[tuple[T, tuple[str, ...]]]:
    """What a new profiler on each of two ranks answers, and its notes."""
    exchange = Exchange(2)

    def rank(number: int) -> tuple[T, tuple[str, ...]]:
        here = HostIdentity("host", "boot", 1, nodes[number])
        profiler = LinkProfiler(ThreadTransport(exchange, number), CPU, file, identity=here)
        return ask(profiler), profiler.notes

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def asked(spec: str) -> Callable[[LinkProfiler], Reducer]:
    return lambda profiler: profiler.with_times(parse(spec))


def test_routes_are_timed_once_a_run_for_each_codec_and_axis(counted: Counted) -> None:
    def several(profiler: LinkProfiler) -> list[Reducer]:
        return [profiler.with_times(parse(spec)) for spec in ("none,exchange=auto", "fp16,exchange=auto") * 2]

    for (plain, half, again, _), _ in on_both(None, several):
        assert isinstance(plain, Auto)
        assert plain.curves == again.curves  # pyright: ignore[reportAttributeAccessIssue]
        assert str(half) == "fp16,exchange=auto"
    assert counted.routes == 2
    (within, _), _ = on_both(None, asked("none,exchange=auto,node=2"))
    assert "node" in str(within)
    assert counted.routes == 3


def test_the_next_run_reads_what_this_one_measured(counted: Counted, tmp_path: Path) -> None:
    def all_of_it(profiler: LinkProfiler) -> list[object]:
        timed = profiler.with_times(parse("none,exchange=auto"))
        assert isinstance(timed, Auto)
        return [timed.curves, profiler.reduction_times(80, Caps(10, 20)), profiler.axis_links().links]

    file = tmp_path / "new" / "links.json"
    first = on_both(file, all_of_it)
    again = on_both(file, all_of_it)
    assert first == again
    assert first[0] == first[1]
    assert first[0][1] == ()
    assert (counted.routes, counted.reductions) == (1, 1)
    ((links, _), _) = on_both(file, lambda profiler: profiler.axis_links())
    assert links.source == str(file)
    on_both(file, lambda profiler: profiler.reduction_times(80, Caps(10, 30)))
    assert counted.reductions == 2
    on_both(file, lambda profiler: profiler.reduction_times(80, Caps(10, 20), again=True))
    assert counted.reductions == 3
    assert len(json.loads(file.read_text())["reductions"]) == 2


def test_links_that_a_description_says_are_told_without_measuring(tmp_path: Path) -> None:
    sites, file = tmp_path / "sites.toml", tmp_path / "links.json"
    sites.write_text(
        "".join(f"[[level]]\nname = '{name}'\nrate = '50mbit'\nlatency_ms = 20\n" for name in ("node", "rank"))
    )

    def rank(number: int, exchange: Exchange, kept: Path | None) -> AxisLinks:
        here = HostIdentity("host", "boot", 1, "aab"[number])
        return LinkProfiler(ThreadTransport(exchange, number), CPU, kept, sites, here).axis_links()

    for kept in (None, file, file):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(functools.partial(rank, exchange=Exchange(3), kept=kept), range(3)))
        assert [link.level for link in found[0].links] == ["rank", "node"]
        assert all(each.of("node") == Link(0.02, 1.6e-7) for each in found)


def test_a_group_that_the_default_group_does_not_know_keeps_no_file(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRADWIRE_LINKS", str(tmp_path / "links.json"))
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    apart = group_apart(store, 0, 1, 20.0)
    with gradwire.Session({"x": torch.ones(4)}, "none", lane=DirectLane(apart, store, "apart", 20.0)):
        assert links_file(apart) is None
    apart.abort()


def test_a_file_of_other_hosts_is_refused_on_all_ranks_and_written_anew(counted: Counted, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    on_both(file, asked("none,exchange=auto"), "ab")
    refusal = f"{file} is not used, since it was measured with rank 1 on b, which runs on c now: measured anew"
    assert [notes for _, notes in on_both(file, asked("none,exchange=auto"), "ac")] == [(refusal,)] * 2
    assert [notes for _, notes in on_both(file, asked("none,exchange=auto"), "ac")] == [()] * 2
    assert counted.routes == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"method": "Auto', '"methods": "Auto'),
        ('"Ring": [\n     [\n      4,', '"Ring": [\n     [\n      9,'),
        ('"cold_s": 0.5', '"cold_s": -0.5'),
        ('"cold_s": 0.5', '"cold_s": "0.5"'),
    ],
)
def test_a_damaged_file_is_refused(old: str, new: str, counted: Counted, tmp_path: Path) -> None:
    def both(profiler: LinkProfiler) -> None:
        profiler.with_times(parse("none,exchange=auto"))
        profiler.reduction_times(80)

    file = tmp_path / "links.json"
    on_both(file, both)
    text = file.read_text()
    assert old in text
    LinkProfile.from_text(text)
    with pytest.raises(TopologyError, match="it is no link profile"):
        LinkProfile.from_text(text.replace(old, new))


@pytest.mark.one_draw_in(3)
def test_a_session_reads_the_file_that_the_environment_names(tmp_path: Path) -> None:
    """In a group of two of three ranks, which has a file of its own beside that of all."""
    file = tmp_path / "links.json"
    environments = [{"GRADWIRE_LINKS": str(file), "GRADWIRE_TIME_LINK": "1"}] * 3
    first, again = (run_function(f"{CASES}:profiled", 3, {}, 120, environments=environments) for _ in range(2))
    assert first == again
    assert first[0] == first[1]
    assert len(first[0]["curves"]) == 5
    assert first[0]["probes"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["links", first[0]["other"]]
    one = run_function(f"{CASES}:timing_differs", 2, {}, 120, environments=[{}, {"GRADWIRE_LINKS": str(file)}])
    assert "rank 1 has int4, seed=0, checksum=False, the link is not timed, what is measured of links is kept" in one[0]


def on_two_nodes(folder: Path) -> Path:
    """The file of two nodes of two ranks, with links inside that are a hundred times as fast."""
    levels = {"rank": ((0,), (1,), (2,), (3,)), "node": ((0, 1), (2, 3))}
    links = (
        AxisLink("rank", (MeasuredPair((0, 1), 1e-6, 1e-9),)),
        AxisLink("node", (MeasuredPair((0, 2), 1e-4, 1e-7),)),
    )
    file = folder / "links.json"
    profile = LinkProfile(hosts=("a", "a", "b", "b"), names=("a", "a", "b", "b"), levels=levels, links=links)
    file.write_text(profile.to_text())
    return file


def test_cost_takes_the_links_of_each_level_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def milliseconds(rate: str, latency: str | None = None) -> list[float]:
        words = ["cost", "none", "none,node=2", "--task", "digits", "--hosts", "4", "--rate", rate]
        assert cli.main([*words, *(["--latency", latency] if latency else [])]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("none")]
        return [float(row[-1].replace(",", "")) for row in rows]

    file = on_two_nodes(tmp_path)
    flat, nodes = milliseconds(str(file))
    same_flat, same_nodes = milliseconds("80mbit", "0.1")
    assert flat == same_flat
    assert nodes < 0.6 * same_nodes
    assert cli.main(["cost", "int4,node=4", "--task", "digits", "--rate", str(file)]) == 0
    capsys.readouterr()
    for words, said in (
        (["--rate", str(file), "--latency", "1"], "--latency belongs to a rate"),
        (["--rate", str(file), "--hosts", "8"], "was measured with 4 ranks: give --hosts 4"),
        (["--rate", str(tmp_path / "no.json")], "no.json cannot be read"),
    ):
        assert cli.main(["cost", "none", "--task", "digits", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
