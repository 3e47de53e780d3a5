"""`gradwire doctor` among ranks: what it finds between them, on threads, in processes and on emulated hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doctor_faults import (
    MEASURED_FAULTS,
    RANK_FAULTS,
    MeasuredFault,
    RankFault,
    all_sound,
    setting,
    sound,
    sound_measured,
)
from engines import Exchange, ThreadTransport, on_threads
from gradwire.cli.main import main
from gradwire.doctor import (
    Examination,
    Facts,
    Finding,
    Unchecked,
    together,
)
from gradwire.doctor.together import diagnosed, examine_group, of_words, to_words
from gradwire.drivers import axes
from gradwire.drivers.clocks import clock_offsets
from gradwire.network import Network
from gradwire.network.loopback import loopback_environments
from gradwire.ranks.supervised import RankFailure, run_function, run_ranks
from gradwire.topology import Host, HostIdentity
from gradwire.topology.axis_links import MeasuredPair
from gradwire.topology.pairs import RankPair, all_pairs_in_rounds
from namespaces import needs_namespaces
from trials import unspoiled

CPU = torch.device("cpu")
CASES = Path(__file__).with_name("doctor_cases.py")


def told(found: Examination, fault: RankFault | MeasuredFault) -> list[Finding]:
    """The findings that say what a fault is."""
    return [each for each in found.findings if fault.says in each.what and each.severity == fault.severity]


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_among_ranks_that_are_alike() -> None:
    found = diagnosed(all_sound(), sound_measured())
    assert (found.findings, found.unchecked, found.status) == ((), (), 0)
    assert found.subject == "4 ranks on 2 hosts"


@pytest.mark.parametrize("fault", RANK_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_between_ranks_is_found_and_names_them(fault: RankFault) -> None:
    found = diagnosed(fault.plant(all_sound()), sound_measured())
    (finding,) = told(found, fault)
    assert fault.evidence in finding.evidence
    assert found.status == 1


@pytest.mark.parametrize("check", together.RANK_CHECKS, ids=lambda check: check.__name__)
def test_each_check_of_ranks_is_needed(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "RANK_CHECKS", [each for each in together.RANK_CHECKS if each is not check])
    wrong = [(fault, diagnosed(fault.plant(all_sound()), sound_measured())) for fault in RANK_FAULTS]
    assert any(not told(found, fault) for fault, found in wrong)


@pytest.mark.parametrize("fault", MEASURED_FAULTS, ids=lambda fault: fault.name)
def test_what_was_measured_is_judged(fault: MeasuredFault) -> None:
    found = diagnosed(all_sound(), fault.plant(sound_measured()))
    (finding,) = told(found, fault)
    assert fault.evidence in finding.evidence


def test_links_far_below_what_interfaces_say_are_named() -> None:
    """All alike, so that none is slow among the others."""
    found = sound_measured()
    assert found.matrix is not None
    slow = tuple(type(pair)(pair.ranks, pair.alpha_s, 8e-9) for pair in found.matrix.pairs)
    all_slow = replace(found, matrix=replace(found.matrix, pairs=slow))
    said = [each.what for each in diagnosed(all_sound(), all_slow).findings]
    assert "ranks 0 and 1 reach 1 Gbit/s over interfaces of 10 Gbit/s" in said
    assert len(said) == 6


def test_a_fault_that_all_ranks_have_is_told_once() -> None:
    ranks = [setting(NCCL_ALGO="AUTO")(facts) for facts in all_sound()]
    (finding,) = diagnosed(ranks, sound_measured()).findings
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.text(4).startswith("ERROR    NCCL_ALGO=AUTO")
    ranks[3] = all_sound()[3]
    own = next(each for each in diagnosed(ranks, sound_measured()).findings if each.ranks)
    assert own.text(4).startswith("ERROR    ranks 0, 1 and 2 on node0, node1: NCCL_ALGO=AUTO")


def test_facts_of_another_version_are_no_end() -> None:
    words = {**to_words(sound()), "host": "none", "versions": {"gradwire": "9.0"}}
    strange = of_words(words, 3)
    assert (strange.rank, strange.versions) == (3, {"gradwire": "9.0"})
    found = diagnosed([*all_sound()[:3], strange], Unchecked("links", "a rank is strange"))
    assert "9.0 on rank 3" in str(found)
    assert "not checked: links, since a rank is strange" in str(found)


# Together, on threads -------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are measured by few and short messages."""
    monkeypatch.setattr(axes, "MOST_BYTES", 1 << 15)
    monkeypatch.setattr(axes, "TRIPS_S", 0.0)
    monkeypatch.setattr(axes, "QUICK", axes.Effort(0.0, 0.0, 2))


def facts_of(rank: int) -> Facts:
    """Facts of a rank on a host of its own."""
    return Facts(Host(HostIdentity(f"node{rank}")), {"numba": "0.68.1"}, {"GLOO_SOCKET_IFNAME": "eth0"}, rank=rank)


def test_ranks_find_the_same_and_a_clock_that_is_planted(soon: None) -> None:
    def examined(transport: ThreadTransport) -> Examination:
        ahead = 42.0 * (transport.rank == 2)
        return examine_group(transport, CPU, facts_of(transport.rank), lambda: time.time() + ahead)

    found = on_threads(3, examined)
    assert found[0] == found[1] == found[2]
    assert found[0].subject == "3 ranks on 3 hosts"
    assert [each.what for each in found[0].findings if each.check == "clocks"] == [
        "the clock of node2 is 42 s ahead of that of rank 0"
    ]
    assert found[0].matrix is not None
    assert [pair.ranks for pair in found[0].matrix.pairs] == [(1, 2), (0, 2), (0, 1)]


def test_a_sum_that_comes_out_wrong_is_found_with_its_rank(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(transport: ThreadTransport, device: torch.device) -> int:
        return 7 * (transport.rank == 1) + right(transport, device)

    right = together._wrong_elements  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(together, "_wrong_elements", wrong)
    (found, _) = on_threads(2, lambda transport: examine_group(transport, CPU, facts_of(transport.rank)))
    assert [each.what for each in found.findings if each.check == "all-reduce"] == [
        "an all-reduce gave rank 1 a wrong sum"
    ]


def test_offsets_of_clocks_are_found_to_half_a_round_trip() -> None:
    ahead, began_s = [0.0, -3600.0, 0.25], time.time()
    found = on_threads(
        3, lambda transport: clock_offsets((0, 1, 2), transport, CPU, lambda: time.time() + ahead[transport.rank])
    )
    assert found[0] == found[1] == found[2]
    for rank, seconds, error_s, at_s in found[0]:
        assert abs(seconds - ahead[rank]) <= error_s + 1e-6
        assert began_s <= at_s - ahead[rank] <= time.time()


def test_a_link_that_looks_slow_is_measured_again_and_may_be_acquitted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[Sequence[RankPair]], axes.Effort | None]] = []

    def measured_pairs(
        rounds: Sequence[Sequence[RankPair]], _: Any, __: Any, effort: axes.Effort | None = None
    ) -> tuple[MeasuredPair, ...]:
        asked.append((rounds, effort))
        slow = 8e-7 if effort is not None else 9e-8
        betas = {(0, 1): 8e-8, (0, 2): slow, (1, 2): 8e-8}
        return tuple(MeasuredPair((a, b), 1e-4, betas[a, b]) for each in rounds for a, b in each)

    monkeypatch.setattr(axes, "measured_pairs", measured_pairs)
    rounds = all_pairs_in_rounds([0, 1, 2])
    transport = ThreadTransport(Exchange(1), 0)
    found = axes.compared_pairs(rounds, transport, CPU)
    assert [rounds for rounds, _ in asked] == [rounds, [[RankPair(0, 2)]]]
    assert {pair.ranks: pair.beta_s_per_byte for pair in found} == {(1, 2): 8e-8, (0, 2): 9e-8, (0, 1): 8e-8}


@pytest.mark.parametrize("ranks", range(1, 9))
def test_rounds_of_pairs_have_every_pair_once_and_no_rank_twice(ranks: int) -> None:
    rounds = all_pairs_in_rounds(range(ranks))
    pairs = [tuple(pair) for each in rounds for pair in each]
    assert sorted(pairs) == [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]
    for each in rounds:
        talking = [rank for pair in each for rank in pair]
        assert len(talking) == len(set(talking))


# Processes ------------------------------------------------------------------------------------------------------------


def alike(found: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks have found the same."""
    without_times = [{key: value for key, value in each.items() if key != "seconds"} for each in found]
    return all(each == without_times[0] for each in without_times)


@pytest.mark.long
def test_ranks_on_the_loopback_are_one_host() -> None:
    found = run_function(f"{CASES}:examined", 2, {}, 120)
    assert alike(found)
    assert found[0]["subject"] == "2 ranks on 1 host"
    assert [each for each in found[0]["findings"] if each["severity"] != "note"] == []
    assert len(found[0]["links"]["pairs"]) == 1


@pytest.mark.one_draw_in(2)
@pytest.mark.net
@pytest.mark.timeout(200)
def test_a_clean_pair_of_emulated_hosts_has_nothing_above_a_note_within_20_s() -> None:
    needs_namespaces()
    reachable = 100e6 * 1448 / 1514

    def examined() -> list[Any]:
        with Network(2, "100mbit", delay="4ms") as network:
            return run_function(f"{CASES}:examined", 2, {}, 100, network)

    found = unspoiled(examined, lambda ranks: ranks[0]["links"]["pairs"][0]["bits_per_s"] > 0.8 * reachable)
    assert alike(found)
    assert [each["what"] for each in found[0]["findings"] if each["severity"] != "note"] == []
    (pair,) = found[0]["links"]["pairs"]
    assert pair["bits_per_s"] == pytest.approx(reachable, rel=0.2)
    assert pair["latency_s"] == pytest.approx(2e-3, rel=0.5)
    assert found[0]["seconds"] < 20


def told_on_hosts(network: Network, folder: Path, **variables: str) -> str:
    """What rank 0 says of two emulated hosts that are not set up right, which takes no deadline of a group."""
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "gradwire", "doctor", "--timeout", "60"]
    began = time.monotonic()
    with pytest.raises(RankFailure) as failed:
        run_ranks(
            [network.command(rank, command) for rank in range(2)],
            [{**network.environment(rank), **path, **variables} for rank in range(2)],
            log_dir=folder,
            deadline_s=100,
        )
    assert failed.value.status == 1
    assert time.monotonic() - began < 50
    return (folder / "rank0.log").read_text()


@pytest.mark.net
@pytest.mark.long
@pytest.mark.timeout(200)
def test_gloo_on_the_loopback_of_emulated_hosts_is_found_before_it_hangs(tmp_path: Path) -> None:
    """Their name resolves to 127.0.0.1, or to an address of the machine that none of them has."""
    needs_namespaces()
    with Network(2, "100mbit") as network:
        said = told_on_hosts(network, tmp_path, GLOO_SOCKET_IFNAME="")
    assert "Gloo would take the loopback" in said or "hosts cannot connect to each other" in said
    assert "not checked: clocks, sums and links of ranks" in said


@pytest.mark.net
@pytest.mark.long
@pytest.mark.timeout(200)
def test_ports_that_a_host_may_not_reach_are_found_before_a_group_hangs(tmp_path: Path) -> None:
    """The port where ranks meet is open, and those that the kernel chooses are not, as behind many firewalls."""
    needs_namespaces()
    with Network(2, "100mbit") as network:
        rule = ["ip", "rule", "add", "ipproto", "tcp", "dport", "32768-60999", "prohibit"]
        if subprocess.run(network.command(1, rule), capture_output=True, timeout=20, check=False).returncode:
            pytest.skip("this kernel has no rules by port")
        said = told_on_hosts(network, tmp_path)
    assert "ERROR    hosts cannot connect to each other on ports that the kernel chooses" in said
    assert "from vm (10.77.0.2)" in said.replace(HostIdentity.here().name, "vm")
    assert "not checked: clocks, sums and links of ranks, since the ranks have no connection that lasts" in said


@pytest.mark.net
@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_slow_link_among_fast_ones_is_named_on_emulated_hosts() -> None:
    needs_namespaces()
    with Network(3, ["100mbit", "100mbit", "20mbit"]) as network:
        found = run_function(f"{CASES}:examined", 3, {}, 120, network)[1]
    said = [each for each in found["findings"] if each["severity"] != "note"]
    assert [each["check"] for each in said] == ["links"]
    assert "(rank 2) are slow among the others" in said[0]["what"]
    assert said[0]["ranks"] == [2]


def launched(tmp_path: Path, environments: Sequence[dict[str, str]], *words: str) -> None:
    """Start the command once for each rank, as a launcher does."""
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "gradwire", "doctor", *words]
    run_ranks(
        [command] * len(environments), [{**each, **path} for each in environments], log_dir=tmp_path, deadline_s=100
    )


def test_ranks_of_a_launcher_meet_and_rank_0_speaks(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    launched(tmp_path, loopback_environments(2), "--json", str(file))
    words = json.loads(file.read_text())
    assert (words["ranks"], words["status"], words["subject"]) == (2, 0, "2 ranks on 1 host")
    assert "2 ranks on 1 host" in (tmp_path / "rank0.log").read_text()
    assert (tmp_path / "rank1.log").read_text() == ""


@pytest.mark.long
def test_a_contradiction_between_ranks_ends_all_with_status_1(tmp_path: Path) -> None:
    environments = loopback_environments(2)
    environments[1]["NCCL_ALGO"] = "Ring"
    with pytest.raises(RankFailure) as failed:
        launched(tmp_path, environments)
    assert failed.value.status == 1
    said = (tmp_path / "rank0.log").read_text()
    assert "ERROR    ranks have unlike values of NCCL_ALGO" in said
    assert "not set on rank 0; NCCL_ALGO=Ring on rank 1" in said


@pytest.mark.long
def test_a_rank_that_meets_nobody_says_so_by_itself(tmp_path: Path) -> None:
    alone = loopback_environments(2)[1]
    with pytest.raises(RankFailure) as failed:
        launched(tmp_path, [alone], "--timeout", "2")
    assert failed.value.status == 1
    said = (tmp_path / "rank0.log").read_text()
    assert f"rank 1 did not meet the others at 127.0.0.1:{alone['MASTER_PORT']}" in said
    assert "cannot be reached: closed" in said


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == json.loads(file.read_text())["status"]
    assert "host " in capsys.readouterr().out
    monkeypatch.setenv("NCCL_ALGO", "AUTO")
    assert main(["doctor", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["worst"] == "error"
    said = capsys.readouterr().out
    assert "ERROR    NCCL_ALGO=AUTO" in said
    assert "remedy:   Write a list of Ring" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "1gbit"], "--rate and --delay are of emulated hosts: give --hosts 2 too"),
        (["--timeout", "0"], "--timeout 0 is no time to wait"),
        (["--hosts", "0"], "hosts must lie between 1 and 1000, not 0"),
        (["--hosts", "2", "--rate", "fast"], "rate 'fast' cannot be used"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.net
@pytest.mark.timeout(200)
def test_the_command_on_emulated_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_namespaces()
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--hosts", "2", "--rate", "100mbit", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 hosts as network namespaces" in said
    assert "2 ranks on 2 hosts" in said
    assert json.loads(file.read_text())["links"]["ranks"] == [0, 1]
