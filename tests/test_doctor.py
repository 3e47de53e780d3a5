"""`gradwire doctor` finds each planted fault by the check that is for it, and nothing where all is well."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from doctor_faults import (
    FAULTS,
    Fault,
    all_sound,
    setting,
    sound,
    sound_measured,
)
from gradwire.cli.main import main
from gradwire.doctor import (
    CLUSTERS,
    VARIABLES,
    Cluster,
    Examination,
    Facts,
    Finding,
    checks,
    examine_host,
    read_facts,
)
from gradwire.doctor.check_network import selected
from gradwire.doctor.facts import MeetingPoint
from gradwire.doctor.launched import unreachable
from gradwire.doctor.reading import probed, within
from gradwire.doctor.together import diagnosed, of_words, to_words
from gradwire.network.loopback import free_port
from gradwire.topology import HostIdentity, NetworkInterface, read_host
from topology_trees import UNKNOWN, Nvml, made, workstation

# One host -------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = examine_host(sound())
    assert (found.findings, found.unchecked, found.status) == ((), (), 0)
    said = str(found).splitlines()
    assert said[:2] == ["host node0", "nothing found"]
    assert "  eno1: ethernet, 10 Gbit/s, up, NUMA node 0" in said
    assert "GPU 0        -     18     18     18     18     18     18     18" in said
    assert "GPU 7    yes    yes    yes    yes    yes    yes    yes      -" in said


def told(found: Examination, fault: Fault) -> list[Finding]:
    """The findings that say what a fault is."""
    return [each for each in found.findings if fault.says in each.what and each.severity == fault.severity]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_a_host_is_found_with_evidence_and_remedy(fault: Fault) -> None:
    found = examine_host(fault.plant(sound()))
    (finding,) = told(found, fault)
    assert fault.remedy in finding.remedy
    assert finding.evidence
    assert finding.remedy.endswith((".", '"', "triton"))
    assert (finding.hosts, finding.ranks[-1:]) == (("node0",), (fault.plant(sound()).rank,))
    assert finding.what in str(found)
    assert found.status == (fault.severity != "note")


@pytest.mark.parametrize("check", checks.HOST_CHECKS, ids=lambda check: check.__name__)
def test_no_other_check_finds_what_one_is_for(check: checks.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it some fault would not be found at all."""
    wrong = [(fault, fault.plant(sound())) for fault in FAULTS]
    monkeypatch.setattr(checks, "HOST_CHECKS", [each for each in checks.HOST_CHECKS if each is not check])
    missed = [fault.name for fault, facts in wrong if not told(examine_host(facts), fault)]
    assert missed


def test_the_worst_comes_first_and_words_carry_all_of_it() -> None:
    facts = setting(NCCL_DEBUG="INFO", NCCL_ALGO="AUTO", NCCL_CROSS_NIC="yes")(sound())
    found = examine_host(facts)
    assert [each.severity for each in found.findings] == ["error", "warning", "note"]
    assert (found.worst, found.status) == ("error", 1)
    words = json.loads(json.dumps(found.to_words()))
    assert [each["what"] for each in words["findings"]] == [each.what for each in found.findings]
    assert (words["worst"], words["status"], words["unchecked"]) == ("error", 1, [])


def test_a_key_is_never_shown() -> None:
    secret = "correct horse battery"
    (finding,) = examine_host(setting(NCCL_PSK=secret)(sound())).findings
    assert "32 characters" in finding.what
    assert secret not in str(finding)
    ranks = [setting(NCCL_PSK=f"{secret} {rank % 2}" * 4)(facts) for rank, facts in enumerate(all_sound())]
    found = diagnosed(ranks, sound_measured())
    assert secret not in str(found)
    assert "unlike values of NCCL_PSK" in str(found)


def test_a_key_does_not_travel() -> None:
    """Facts go to all ranks, perhaps in plain text; what stands for a key is as long, and equal where the key is."""
    secret = "correct horse battery staple, and a few more"
    read = read_facts({"NCCL_PSK": secret}).environment["NCCL_PSK"]
    assert (len(read), read == secret) == (len(secret), False)
    assert read == read_facts({"NCCL_PSK": secret}).environment["NCCL_PSK"]


# What is absent -------------------------------------------------------------------------------------------------------


def test_a_host_that_shows_nothing_is_not_checked_and_says_why(tmp_path: Path) -> None:
    found = examine_host(Facts(read_host(tmp_path / "none", identity=HostIdentity("a"))))
    assert found.status == 0
    why = {each.check: each.why for each in found.unchecked}
    assert why["interfaces"] == "no network interface can be read"
    assert why["devices"].startswith("NVML is not installed")
    assert "not checked: interfaces, since no network interface can be read" in str(found)


def test_a_driver_that_refuses_is_no_fault_of_the_host(tmp_path: Path) -> None:
    nvml = Nvml([[]], fails={"nvmlInit": UNKNOWN})
    facts = Facts(read_host(made(tmp_path, workstation()), nvml, HostIdentity("a")), {"numba": "0.68.1"})
    found = examine_host(facts)
    assert found.findings == ()
    assert [each.check for each in found.unchecked] == ["devices"]


def test_what_could_not_be_read_of_limits_and_cuda_is_said() -> None:
    facts = sound()
    unread = {"limits": "/dev/shm cannot be read (No such file)", "devices": "PyTorch cannot ask CUDA (busy)"}
    found = examine_host(replace(facts, why_unread=unread))
    assert {each.why for each in found.unchecked} == set(unread.values())


def test_this_host_can_be_read_and_examined() -> None:
    facts = read_facts({"PATH": "/bin", "NCCL_ALGO": "Ring", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert facts.environment == {"LOCAL_WORLD_SIZE": "4", "NCCL_ALGO": "Ring", "RANK": "3", "WORLD_SIZE": "8"}
    assert (facts.rank, facts.world_size, facts.hosts, facts.local_ranks) == (3, 8, 2, 4)
    assert facts.versions["torch"] == torch.__version__
    assert (facts.limits.open_files or 0) > 0
    assert facts.addresses.get("lo") == "127.0.0.1"
    assert of_words(json.loads(json.dumps(to_words(facts))), 3) == facts


def test_a_sysfs_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    found = examine_host(replace(read_facts({}, root=tmp_path / "none"), host_addresses=("10.0.0.1",)))
    said = [each.text() for each in found.unchecked if each.check == "links"]
    assert said == [f"not checked: links, since {tmp_path}/none/class/net cannot be read (No such file or directory)"]


def test_files_of_nccl_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# ours\nNCCL_SOCKET_IFNAME==eth0\nNCCL_DEBUG=WARN\n")
    files = read_facts({}, home=tmp_path).nccl_files
    assert files[str(tmp_path / ".nccl.conf")] == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_DEBUG": "WARN"}
    other = tmp_path / "other.conf"
    other.write_text("NCCL_ALGO=Ring\n")
    facts = read_facts({"NCCL_CONF_FILE": str(other), "NCCL_TOPO_FILE": str(tmp_path / "none")}, home=tmp_path)
    assert str(tmp_path / ".nccl.conf") not in facts.nccl_files
    assert facts.nccl_files[str(other)] == {"NCCL_ALGO": "Ring"}
    assert facts.missing_files == ("NCCL_TOPO_FILE",)


def test_a_name_server_that_does_not_answer_is_not_waited_for() -> None:
    began = time.monotonic()
    assert within(0.05, lambda: time.sleep(1)) is None
    assert time.monotonic() - began < 0.5
    assert within(5, lambda: "here") == "here"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("^=docker0,lo", ["docker01", "ib0"]),
        ("ib", ["ib0"]),
        ("=ib", []),
        ("docker,ib0:1", ["docker0", "docker01", "ib0"]),
    ],
)
def test_lists_of_interfaces_select_as_nccl_does(value: str, names: Sequence[str]) -> None:
    assert selected(value, ["lo", "docker0", "docker01", "ib0"]) == names


# Ports ----------------------------------------------------------------------------------------------------------------


def test_a_port_is_free_or_taken_and_one_of_another_host_open_or_closed() -> None:
    port = free_port()
    meeting = MeetingPoint(f"127.0.0.1:{port}", "not tried")
    assert probed(meeting, 0).state == "free"
    assert probed(meeting, 1).state == "closed"
    with socket.create_server(("127.0.0.1", port)):
        assert probed(meeting, 0).state == "taken"
        assert probed(meeting, 1).state == "open"
    assert probed(MeetingPoint(f"no.such.host.invalid:{port}", "not tried"), 0).state == "unknown host"


def test_connections_between_hosts_are_judged_in_both_directions() -> None:
    names = {0: "a", 1: "b"}
    assert unreachable({(0, 1): "open", (1, 0): "open"}, names) == []
    (found,) = unreachable({(0, 1): "open", (1, 0): "silent"}, names)
    assert isinstance(found, Finding)
    assert (found.severity, found.evidence) == ("error", "from b to a: silent")


# Variables ------------------------------------------------------------------------------------------------------------


def test_variables_have_a_purpose_a_source_and_no_two_have_one_name() -> None:
    assert len(VARIABLES) > 150
    for name, variable in VARIABLES.items():
        assert variable.name == name
        assert variable.source.startswith("https://")
        assert variable.purpose or variable.instead
        assert variable.kind.legal


# Advice ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_is_advised_passes_the_doctors_own_checks(name: str) -> None:
    """On a host that has the interfaces, devices and files of the examples."""
    cluster = CLUSTERS[name]
    found = examine_host(host_of_the_examples(cluster))
    assert [each.what for each in found.findings if each.check in ("variables", "interfaces")] == []
    left_out = {each.name for each in cluster.advice if each.name and each.value is None}
    assert not left_out & {*cluster.variables}
    assert {each for each in (*cluster.variables, *left_out) if each.startswith(("NCCL_", "TORCH_"))} <= {*VARIABLES}


def host_of_the_examples(cluster: Cluster) -> Facts:
    """Sound facts with nothing set but what is advised."""
    facts = sound()
    names = [each.name for each in facts.host.interfaces]
    others = [name for name in ("eth0", "ens5") if name not in names]
    interfaces = (*facts.host.interfaces, *(NetworkInterface(name, "ethernet", 1e11, "up") for name in others))
    environment = {**{name: facts.environment[name] for name in ("RANK", "WORLD_SIZE")}, **cluster.variables}
    return replace(facts, host=replace(facts.host, interfaces=interfaces), environment=environment)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_line_of_the_file_has_a_reason_and_a_source_and_a_shell_reads_it(name: str, tmp_path: Path) -> None:
    text = str(CLUSTERS[name])
    remarks = [line for line in text.splitlines()[1:] if line.startswith("#")]
    assert len(remarks) == len(CLUSTERS[name].advice)
    assert all(re.search(r"# .{10,} \[https://\S+\]$", line) for line in remarks)
    file = tmp_path / "nccl.env"
    file.write_text(text)
    done = subprocess.run(["sh", "-c", f". {file} && env"], capture_output=True, text=True, env={}, check=True)
    set_now = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert CLUSTERS[name].variables.items() <= set_now.items()


def test_advice_is_printed_and_an_unknown_cluster_gives_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl", "advise", "--cluster", "roce"]) == 0
    assert "# leave NCCL_IB_GID_INDEX out: since 2.21" in capsys.readouterr().out
    assert main(["nccl", "advise", "--cluster", "aws"]) == 2
    assert "there is no advice for a cluster 'aws': did you mean efa?" in capsys.readouterr().err
    assert main(["nccl", "advise", "--cluster", "zzz"]) == 2
    assert "known are single-node, infiniband, roce, efa, gcp, azure, ethernet" in capsys.readouterr().err
