"""Laws of simulated training: what must come out, whatever is drawn."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.cli.main import main
from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, AllReduce, AllToAll
from gradwire.core.errors import GradwireError, SpecError
from gradwire.core.link import Link
from gradwire.drivers.cost import cost
from gradwire.drivers.timing import step_s
from gradwire.simulation import Failing, SimulateOptions, scale, simulate
from gradwire.simulation.draws import ComputingTimes, SlowInTurn, TimeSpread
from gradwire.simulation.failures import run_with_failures
from gradwire.simulation.links import LevelLinks, LinkLevel, message_times
from gradwire.simulation.simulate import model_of
from gradwire.simulation.windows import Meetings, train_in_windows
from gradwire.spec import as_method
from gradwire.topology import AxisLink, MeasuredPair
from gradwire.topology.link_profile import LinkProfile

BASE = SimulateOptions(step="10ms", parameters="300k", ranks=4, rate="1gbit", latency="0.1ms", steps=64)
EXPONENTIAL = dataclasses.replace(BASE, spread="exponential:1", rate="10tbit", latency="0")
LINK = Link(1e-4, 8e-9)


# What messages take ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["none", "int4", "topk:0.01", "sign", "int4,node=2", "none,exchange=ring"])
def test_without_spread_and_failures_a_step_is_that_of_the_cost_driver(spec: str) -> None:
    found = simulate(spec, BASE)
    alone = step_s(spec, model_of(BASE), 4, LINK, step=10**6)
    assert found.step_s == pytest.approx(0.01 + alone)
    assert found.p50_s == pytest.approx(found.p99_s) == pytest.approx(found.step_s)
    assert found.shares.messages == pytest.approx(alone / (0.01 + alone))
    assert message_times(as_method(spec), model_of(BASE), 4, LevelLinks.of_hosts(LINK)).nbytes == (
        cost(spec, model_of(BASE), 4, step=10**6).wire_bytes
    )


def test_levels_share_their_links() -> None:
    links = LevelLinks((LinkLevel("rank", 1, Link(0.0, 1.0)), LinkLevel("host", 4, Link(0.0, 10.0))))
    row = torch.empty(16, dtype=torch.uint8, device="meta")
    inside, between = Axis(4), Axis(2, 4)
    assert links.seconds(AllReduce(row, axis=inside), 8) == 2 * 16 * 3 / 4  # hosts are not left
    assert links.seconds(AllReduce(row, axis=between), 8) == 10 * 4 * 16  # four pairs share each host's link
    assert links.seconds(AllReduce(row), 8) == 10 * 2 * 16 * 7 / 8  # a ring leaves each host once
    assert links.seconds(AllGather(row), 8) == 10 * 7 * 16
    trees = dataclasses.replace(links, all_reduce="tree")
    assert trees.seconds(AllReduce(row), 8) == 10 * 2 * 16
    rows = torch.empty(8, 2, dtype=torch.uint8, device="meta")
    assert links.seconds(AllToAll(rows), 8) == 10 * 4 * 4 * 2  # four ranks, each to four others


TOPOLOGY = """
[[level]]
name = "site"
size = 2
rate = "50mbit"
latency_ms = 20

[[level]]
name = "node"
size = 2
rate = "1gbit"

[[level]]
name = "rank"
size = 4
rate = "100gbit"
latency_ms = 0.01
"""


def test_levels_are_read_from_a_topology_and_from_measured_links(tmp_path: Path) -> None:
    described, measured = tmp_path / "sites.toml", tmp_path / "links.json"
    described.write_text(TOPOLOGY)
    assert LevelLinks.of_topology(described).levels == (
        LinkLevel("rank", 1, Link(1e-5, 8e-11)),
        LinkLevel("node", 4, Link(1e-4, 8e-9)),
        LinkLevel("site", 8, Link(0.02, 1.6e-7)),
    )
    apart = dataclasses.replace(BASE, ranks=16, topology=described)
    assert simulate("int4,node=8", apart).step_s < simulate("int4", apart).step_s
    nodes = {"rank": tuple((rank,) for rank in range(4)), "node": ((0, 1), (2, 3))}
    links = (AxisLink("node", (MeasuredPair((0, 2), 1e-3, 1e-8),)),)
    profile = LinkProfile(hosts=("a", "a", "b", "b"), names=("a", "a", "b", "b"), levels=nodes, links=links)
    measured.write_text(profile.to_text())
    found = LevelLinks.of_profile(measured)
    assert [(level.name, level.ranks, level.link.alpha_s) for level in found.levels] == [
        ("rank", 1, 0),
        ("node", 2, 1e-3),
    ]
    for bad, says in (('rate = "50mbit"', "level site has no rate"), ('size = 2\nrate = "50mbit"', "no groups")):
        described.write_text(TOPOLOGY.replace(bad, ""))
        with pytest.raises(GradwireError, match=says):
            LevelLinks.of_topology(described)
    with pytest.raises(SpecError, match="no whole nodes of 2: take 2 or 4"):
        found.require(3)


# What is drawn -----------------------------------------------------------------------------------------------


def test_a_barrier_of_exponentials_has_the_mean_of_the_harmonic_sum() -> None:
    harmonic = sum(1 / k for k in range(1, 17))
    found = simulate("none", dataclasses.replace(EXPONENTIAL, ranks=16, steps=20_000))
    assert found.step_s == pytest.approx(0.01 * harmonic, rel=0.02)
    assert found.shares.computing == pytest.approx(1 / harmonic, rel=0.02)
    assert sum(found.shares) == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["lognormal:0.5", "exponential:0.5"])
def test_a_spread_has_its_mean_and_standard_deviation(text: str) -> None:
    times = ComputingTimes(2.0, TimeSpread.of(text), seed=3).chunk(2000, 0)
    assert float(times.mean()) == pytest.approx(2.0, rel=0.01)
    assert float(times.std()) == pytest.approx(1.0, rel=0.03)


def test_ranks_are_slow_in_turn_as_often_as_is_said() -> None:
    times = ComputingTimes(1.0, in_turn=SlowInTurn.of("10%:3x")).chunk(1000, 0)
    assert float((times == 3.0).double().mean()) == pytest.approx(0.1, abs=0.005)


@pytest.mark.one_draw_in(2)
def test_a_seed_gives_the_same_run_and_another_seed_another_one() -> None:
    uneven = dataclasses.replace(BASE, spread="lognormal:0.3", mtbf="1d", seed=5)
    for spec in ("int4", "local:H=4,delay=1", "elastic:4", "none"):
        assert simulate(spec, uneven).as_dict() == simulate(spec, uneven).as_dict()
        assert simulate(spec, uneven).step_s != simulate(spec, dataclasses.replace(uneven, seed=6)).step_s


def test_more_ranks_are_never_faster_in_a_step() -> None:
    uneven = dataclasses.replace(BASE, spread="exponential:0.5", slow_in_turn="5%:3x")
    for spec in ("int4", "local:H=4"):
        found = [run.step_s for run in scale(spec, uneven, 2, 256)]
        assert found == sorted(found)
        assert len(found) == 8


def test_a_step_never_takes_less_than_its_slowest_rank_or_its_messages() -> None:
    for overlap in (0.0, 0.3, 0.9):
        options = dataclasses.replace(BASE, overlap=overlap, slow=("2:3x",))
        found, messages = simulate("none", options), step_s("none", model_of(BASE), 4, LINK, step=10**6)
        assert 0.03 < found.step_s <= 0.03 + messages + 1e-12
        assert found.step_s >= messages


# Windows -----------------------------------------------------------------------------------------------------


def test_windows_send_once_and_even_out_chance() -> None:
    every, window = (simulate(spec, EXPONENTIAL).step_s for spec in ("none", "local:H=16"))
    assert window < 0.75 * every
    fixed = [simulate(f"local:H={h}", BASE).step_s - 0.01 for h in (2, 16)]
    assert fixed[1] == pytest.approx(fixed[0] / 8)


def test_a_delay_hides_messages_behind_the_steps_that_go_on() -> None:
    times = iter(torch.ones(64, 2, dtype=torch.float64))
    hidden = train_in_windows(times, 2, Meetings(1.5, every=4, delay=2), 64)
    assert sum(hidden.window_s) == pytest.approx(64.0)
    longer = train_in_windows(iter(torch.ones(64, 2, dtype=torch.float64)), 2, Meetings(2.5, every=4, delay=2), 64)
    assert sum(longer.window_s) == pytest.approx(64.0 + 15 * 0.5)  # the last average is not taken up


# Failures ----------------------------------------------------------------------------------------------------


def test_the_best_interval_is_found_and_young_and_daly_are_near_it() -> None:
    failing = Failing(mtbf_s=86_400.0 * 30, hosts=1024, checkpoint_s=60.0, restart_s=300.0)
    best = failing.lost(failing.best_s)
    assert all(best <= failing.lost(failing.best_s * factor) for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0))
    assert failing.daly_s == pytest.approx(failing.best_s, rel=0.001)
    assert failing.best_s < failing.young_s < 1.1 * failing.best_s
    assert Failing(100.0, 1, 300.0, 0.0).daly_s == 100.0  # Equation 37 where checkpoints take long


def test_simulated_losses_are_those_of_the_formula() -> None:
    options = dataclasses.replace(BASE, mtbf="10d", ranks=64, checkpoint="30s", restart="2min")
    for interval in (None, "5min", "1h"):
        first, *_ = simulate("int4", dataclasses.replace(options, interval=interval)).intervals
        assert first.simulated == pytest.approx(first.lost, rel=0.1)


def test_a_run_with_failures_spends_its_time_on_what_it_says() -> None:
    run = run_with_failures(100.0, 10.0, 1.0, 5.0, iter([3.0, 2.0, 30.0, 22.0, 1e9]))
    assert run.total_s == pytest.approx(run.work_s + run.repeated_s + run.checkpoints_s + run.restarts_s)
    assert run.failures == 4
    assert run.restarts_s == 2.0 + 5.0 + 5.0 + 5.0  # the second failure ended the first restart
    assert run.checkpoints_s == 9.0  # none after the last interval


def test_elastic_hosts_are_here_as_long_as_they_live() -> None:
    options = dataclasses.replace(
        BASE, ranks=32, mtbf="2min", restart="1min", detection="0", rate="10tbit", latency="0"
    )
    found = simulate("elastic:4", options)
    assert found.present is not None
    assert found.present == pytest.approx(32 * 120 / 180, rel=0.08)
    assert found.efficiency == pytest.approx(found.present / 32, rel=0.05)
    assert simulate("elastic:4", BASE).present == 4


# Servers -----------------------------------------------------------------------------------------------------


def test_asynchronous_ranks_never_wait_for_each_other_and_a_bound_of_0_is_a_barrier() -> None:
    options = dataclasses.replace(EXPONENTIAL, slow=("1:4x",), spread="0")
    free, synchronous, bounded = (simulate(spec, options) for spec in ("asgd", "ssp:0", "ssp:4"))
    assert free.shares.waiting == 0.0
    assert free.step_s == pytest.approx(0.04 / 3.25, rel=0.05)  # three ranks of speed 1, one of a quarter
    assert synchronous.step_s == pytest.approx(0.04, rel=0.02)
    assert free.step_s < bounded.step_s <= synchronous.step_s * 1.001
    assert bounded.shares.waiting > 0.3
    assert free.staleness == pytest.approx(3.0, rel=0.1)


def test_a_servers_link_bounds_what_asynchronous_ranks_push() -> None:
    options = dataclasses.replace(BASE, ranks=64, steps=20)
    wire_s = 4 * sum(spec.numel for spec in model_of(options)) * LINK.beta_s_per_byte
    assert simulate("asgd", options).step_s == pytest.approx(64 * wire_s, rel=0.1)
    assert simulate("asgd", dataclasses.replace(options, servers=8)).step_s == pytest.approx(8 * wire_s, rel=0.1)
    applied = dataclasses.replace(options, server_rate="10tbit", server_time="5ms")
    assert simulate("asgd", applied).step_s == pytest.approx(64 * 0.005, rel=0.1)


# The command -------------------------------------------------------------------------------------------------


ASKED = ["--step", "10ms", "--parameters", "300k"]


def test_ranks_on_gpus_send_fewer_and_larger_messages() -> None:
    on_cpu = SimulateOptions(step="250ms", parameters="100M", ranks=16, rate="10gbit", latency="1ms")
    found = [simulate("int4", dataclasses.replace(on_cpu, device=device)) for device in ("cpu", "cuda")]
    assert found[1].step_s < found[0].step_s


def test_the_command_prints_tables_json_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["simulate", "int4", *ASKED, "--mtbf", "30d", "--slow", "3:2x", "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("efficiency", "Young 1974", "Daly 2006", "int4"))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "computing" for event in events) == 4 * 20
    assert main(["simulate", "int4", "ssp:4", *ASKED, "--scale", "8..32", "--json"]) == 0
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["method"], run["ranks"]) for run in runs] == [
        (method, ranks) for method in ("int4", "ssp:4") for ranks in (8, 16, 32)
    ]
    assert all(math.isfinite(run["efficiency"]) for run in runs)
    hosts = ["--scale", "3..6", "--ranks-per-host", "3"]  # of which the default of --ranks makes no whole number
    assert main(["simulate", "none", *ASKED, *hosts]) == 0


def test_the_command_tells_the_hosts_of_measured_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.json"
    pairs = (MeasuredPair((0, 1), 1e-3, 1e-8),)
    levels = {"rank": ((0,), (1,)), "node": ((0,), (1,))}
    links = (AxisLink("node", pairs),)
    file.write_text(LinkProfile(hosts=("a", "b"), names=("a", "b"), levels=levels, links=links).to_text())
    assert main(["simulate", "none", *ASKED, "--rate", str(file)]) == 0
    assert "links measured on a, b" in capsys.readouterr().out
    assert main(["simulate", "none", *ASKED]) == 0
    assert "measured on" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["int4"], "--step 250ms"),
        (["int4", *ASKED, "--step", "fast"], "--step 'fast' is no time"),
        (["int4", *ASKED, "--step", "0"], "--step 0 is no time"),
        (["int4", *ASKED, "--ranks", "0"], "--ranks must be at least 1"),
        (["int4", *ASKED, "--ranks", "9", "--ranks-per-host", "4"], "no whole hosts of 4"),
        (["int4", *ASKED, "--rate", "fast"], "rate 'fast' cannot be used"),
        (["int4", *ASKED, "--rate", "none.json"], "none.json cannot be read"),
        (["int4", *ASKED, "--topology", "none.toml"], "--topology none.toml cannot be read"),
        (["int4", *ASKED, "--inside", "1tbit"], "--ranks-per-host as well"),
        (["int4", *ASKED, "--overlap", "1.5"], "--overlap 1.5 is no share"),
        (["int4", *ASKED, "--spread", "normal:0.1"], "unknown distribution 'normal'"),
        (["int4", *ASKED, "--spread", "lognormal"], "spread 'lognormal' cannot be read"),
        (["int4", *ASKED, "--spread", "exponential:2"], "a spread of 2.0 is none"),
        (["int4", *ASKED, "--slow", "9:2x"], "slow rank 9 does not exist: ranks are 0 to 3"),
        (["int4", *ASKED, "--slow-in-turn", "often"], "write CHANCE%:FACTORx"),
        (["int4", *ASKED, "--interval", "1h"], "give --mtbf as well"),
        (["int4", *ASKED, "--mtbf", "0"], "--mtbf 0 is no time"),
        (["int4", *ASKED, "--mtbf", "1s"], "training never gets on"),
        (["int4", *ASKED, "--scale", "8-64"], "--scale 8-64 is no range"),
        (["int4", *ASKED, "--scale", "64..8"], "no range of 1 to"),
        (["int4", *ASKED, "--parameters", "many"], "--parameters 'many' is no number"),
        (["int4", *ASKED, "--parameters", "9" * 400], "is no number of parameters"),
        (["int4", *ASKED, "--scale", "8..64", "--ranks", "8"], "--scale tells how many ranks there are"),
        (["none", *ASKED, "--checkpoint", "60s"], "--checkpoint is about failures, and there are none"),
        (["none", *ASKED, "--restart", "10min"], "--restart is about failures, and there are none"),
        (["elastic:50", *ASKED, "--detection", "1min"], "--detection is about failures, and there are none"),
        (["asgd", *ASKED, "--all-reduce", "tree"], "--all-reduce is for methods of every step and windows and elastic"),
        (["ssp:4", *ASKED, "--all-reduce", "tree"], "--all-reduce is for methods of every step"),
        (["intt4", *ASKED], "did you mean 'int4'"),
        (["hogwild", *ASKED], "'hogwild' cannot be simulated"),
        (["local:H=8,drift=0.1", *ASKED], "which is not simulated"),
        (["local:H=8", *ASKED, "--overlap", "0.5"], "--overlap is for methods of every step"),
        (["ssp:4", *ASKED, "--device", "cuda"], "--device is for methods of every step and windows and elastic"),
        (["int4", *ASKED, "--servers", "2"], "--servers is for methods of servers"),
        (["ssp:4", *ASKED, "--mtbf", "1d"], "leave --mtbf"),
        (
            ["elastic:4", *ASKED, "--mtbf", "1d", "--interval", "1h"],
            "--interval is for methods of every step and windows",
        ),
        (["none,exchange=ring", *ASKED, "--ranks", "128"], "64 ranks at most"),
        (["int4", "none", *ASKED, "--trace", "t.json"], "--trace shows one run"),
        (["ssp:4", *ASKED, "--trace", "t.json"], "leave --trace out"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
