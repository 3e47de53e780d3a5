"""What a host sees of itself, and which ranks share a node."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.core.axis import Axis
from gradwire.core.errors import TopologyError
from gradwire.network.loopback import free_port
from gradwire.ranks.supervised import run_ranks
from gradwire.topology import HostIdentity, Topology, described, nvlink_groups, nvlinks_between, read_host
from gradwire.topology.interfaces import read_interfaces
from gradwire.topology.pairs import rounds_of_pairs
from topology_trees import (
    INVALID_ARGUMENT,
    MISSING,
    UNKNOWN,
    Nvml,
    dgx,
    interface,
    made,
    rdma_port,
    roce,
    workstation,
)

HERE = HostIdentity("a")
SITES = "[[level]]\nname = 'site'\ngroups = [[0, 1], [2, 3]]\n"


# What a host sees of itself ------------------------------------------------------------------------------------------


def test_a_workstation_has_an_interface_and_nothing_is_guessed_beside_it(tmp_path: Path) -> None:
    host = read_host(made(tmp_path, workstation()), identity=HERE)
    ethernet, loopback = host.interfaces
    assert (ethernet.name, ethernet.kind, ethernet.bits_per_s, ethernet.state) == ("enp5s0", "ethernet", 1e9, "up")
    assert ethernet.numa_node is None  # the kernel says -1
    assert (loopback.kind, loopback.bits_per_s, loopback.is_virtual) == ("loopback", None, True)
    assert host.rdma_ports == ()
    assert host.gpus is None
    assert host.numa_nodes is not None
    assert [node.cpus for node in host.numa_nodes] == [tuple(range(16))]
    assert host.summary.splitlines() == [
        "host a",
        "  enp5s0: ethernet, 1 Gbit/s, up",
        "  virtual: lo",
        "  no RDMA port",
        "  NUMA node 0: 16 CPUs",
        "  GPUs unknown: NVML is not installed, or has no driver",
    ]


def test_eight_ndr_ports_have_50_gigabytes_a_second_each_and_a_numa_node(tmp_path: Path) -> None:
    host = read_host(made(tmp_path, dgx()), identity=HERE)
    assert [port.device for port in host.rdma_ports] == [f"mlx5_{i}" for i in range(8)]
    assert {(port.kind, port.bits_per_s, port.state) for port in host.rdma_ports} == {("InfiniBand", 400e9, "ACTIVE")}
    assert [port.numa_node for port in host.rdma_ports] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [port.interface for port in host.rdma_ports] == [f"ibp{i}" for i in range(8)]
    assert {each.kind for each in host.interfaces if each.name.startswith("ibp")} == {"infiniband"}
    assert host.numa_nodes is not None
    assert [len(node.cpus or ()) for node in host.numa_nodes] == [112, 112]
    assert "mlx5_7 port 1: InfiniBand, 400 Gbit/s (50 GB/s), ACTIVE, NUMA node 1, interface ibp7" in host.summary


def test_rdma_on_ethernet_is_roce_and_a_port_that_is_down_has_no_rate(tmp_path: Path) -> None:
    host = read_host(made(tmp_path, roce()), identity=HERE)
    up, down = host.rdma_ports
    assert (up.kind, up.bits_per_s, up.interface) == ("RoCE", 100e9, "ens1f0np0")
    assert (down.kind, down.bits_per_s, down.state) == ("RoCE", None, "DOWN")
    found = {each.name: each for each in host.interfaces}
    assert {name for name, each in found.items() if each.is_virtual} == {"lo", "br0", "veth1", "vlan7"}
    assert (found["bond0"].kind, found["bond0"].bits_per_s) == ("bond", 100e9)
    assert found["veth1"].bits_per_s is None  # it says 10 Gbit/s whatever limits it
    assert found["ens1f1np1"].bits_per_s is None
    assert "bonding_masters" not in found
    assert "virtual: br0, lo, veth1, vlan7" in host.summary


@pytest.mark.parametrize(
    ("rate", "layer", "node_type", "kind", "bits_per_s"),
    [
        ("200 Gb/sec (4X HDR)", "InfiniBand", "1: CA", "InfiniBand", 200e9),
        ("56 Gb/sec (4X FDR)", "InfiniBand", "1: CA", "InfiniBand", 56e9),
        ("2.5 Gb/sec (1X SDR)", "InfiniBand", "1: CA", "InfiniBand", 2.5e9),
        ("25 Gb/sec (1X EDR)", "Ethernet", "4: RNIC", "iWARP", 25e9),
        ("100 Gb/sec (4X EDR)", "Unknown", "7: unspecified", None, 100e9),
        ("", "Ethernet", "1: CA", "RoCE", None),
        ("soon", "InfiniBand", "1: CA", "InfiniBand", None),
    ],
)
def test_ports_are_read_as_the_kernel_writes_them(
    rate: str, layer: str, node_type: str, kind: str | None, bits_per_s: float | None, tmp_path: Path
) -> None:
    (port,) = read_host(made(tmp_path, rdma_port("dev0", rate, layer, node_type=node_type)), identity=HERE).rdma_ports
    assert (port.kind, port.bits_per_s) == (kind, bits_per_s)


@pytest.mark.parametrize("speed", ["-1", "0", "65535", "4294967295", "", "fast"])
def test_a_speed_that_the_kernel_does_not_know_is_none(speed: str, tmp_path: Path) -> None:
    (found,) = read_interfaces(made(tmp_path, interface("eth0", speed)))
    assert found.bits_per_s is None
    assert "speed unknown" in found.summary


def test_what_sysfs_shows_of_another_network_namespace_is_not_this_hosts(tmp_path: Path) -> None:
    """A command that enters a namespace still sees the sysfs that was mounted outside."""
    made(tmp_path, {**interface("eth0", "1000"), **interface("eth1", "1000")})
    mine = read_interfaces(tmp_path, {"eth0": 2, "lo": 1})
    assert [(each.name, each.bits_per_s) for each in mine] == [("eth0", 1e9), ("lo", None)]
    other = read_interfaces(tmp_path, {"eth0": 7})
    assert [(each.name, each.kind, each.bits_per_s) for each in other] == [("eth0", None, None)]


def test_a_host_without_sysfs_knows_nothing(tmp_path: Path) -> None:
    host = read_host(tmp_path / "none", identity=HERE)
    assert (host.interfaces, host.rdma_ports, host.numa_nodes, host.gpus) == ((), (), None, None)
    assert "no network interface can be read" in host.summary


def test_this_host_can_be_read() -> None:
    host = read_host()
    assert {each.name for each in host.interfaces} >= {"lo"}
    assert host.identity == HostIdentity.here()


# GPUs -----------------------------------------------------------------------------------------------------------------

RING = [[3, 1], [0, 2], [1, 3], [2, 0]]


def test_a_ring_of_nvlinks_joins_neighbours_and_all_four_are_one_group(tmp_path: Path) -> None:
    made(tmp_path, {f"bus/pci/devices/0000:{0x1A + i:02x}:00.0/numa_node": str(i // 2) for i in range(4)})
    nvml = Nvml(RING, speed=26562)
    gpus = read_host(tmp_path, nvml, HERE).gpus
    assert gpus is not None
    assert not nvml.is_open
    assert [gpu.bus_id for gpu in gpus] == [f"0000:{0x1A + i:02x}:00.0" for i in range(4)]
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 1, 1]
    assert [gpu.name for gpu in gpus] == ["NVIDIA H100"] * 4
    assert {gpu.nvlink_bits_per_s for gpu in gpus} == {26562 * 8e6}
    counts = [[nvlinks_between(one, other) for other in gpus] for one in gpus]
    assert counts == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    assert nvlink_groups(gpus) == ((0, 1, 2, 3),)
    assert "joined by NVLink: GPUs 0, 1, 2, 3" in read_host(tmp_path, nvml, HERE).summary


def test_peers_over_pcie_have_no_nvlink(tmp_path: Path) -> None:
    """The driver says of all pairs that they may read each other's memory."""
    host = read_host(tmp_path, Nvml([[], []]), HERE)
    assert host.gpus is not None
    assert [gpu.nvlinks for gpu in host.gpus] == [(), ()]
    assert nvlink_groups(host.gpus) == ((0,), (1,))
    assert "no NVLink" in host.summary
    assert "joined by NVLink" not in host.summary


def test_links_to_switches_join_all_and_links_that_are_down_join_none(tmp_path: Path) -> None:
    switched = read_host(tmp_path, Nvml([["switch"] * 18, ["switch"] * 18, ["switch"] * 16 + [None] * 2]), HERE).gpus
    assert switched is not None
    assert nvlinks_between(switched[0], switched[1]) == 18
    assert nvlinks_between(switched[0], switched[2]) == 16
    assert nvlink_groups(switched) == ((0, 1, 2),)
    bridged = read_host(tmp_path, Nvml([[1, 1], [0, 0], [None, None]]), HERE).gpus
    assert bridged is not None
    assert nvlinks_between(*bridged[:2]) == 2
    assert nvlink_groups(bridged) == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("fails", "gpus", "links"),
    [
        ({"nvmlInit": UNKNOWN}, None, None),
        ({"nvmlDeviceGetCount": UNKNOWN}, None, None),
        ({"nvmlDeviceGetNvLinkState": UNKNOWN}, 4, None),
        ({"nvmlDeviceGetNvLinkState": INVALID_ARGUMENT}, 4, 0),
        ({"nvmlDeviceGetNvLinkRemotePciInfo": MISSING}, 4, 2),
        ({"nvmlDeviceGetNvLinkRemoteDeviceType": MISSING, "nvmlDeviceGetName": UNKNOWN}, 4, 2),
    ],
)
def test_what_nvml_refuses_is_unknown(
    fails: Mapping[str, int], gpus: int | None, links: int | None, tmp_path: Path
) -> None:
    found = read_host(tmp_path, Nvml(RING, fails=fails), HERE).gpus
    assert (None if found is None else len(found)) == gpus
    for gpu in found or ():
        assert (None if gpu.nvlinks is None else len(gpu.nvlinks)) == links
        assert gpu.nvlink_bits_per_s is None
        assert gpu.summary


# Who is near whom -----------------------------------------------------------------------------------------------------


def test_containers_and_emulated_hosts_of_one_machine_are_different_and_a_variable_joins_them() -> None:
    one, other = HostIdentity("a", "boot", 1), HostIdentity("a", "boot", 2)
    assert one.key != other.key
    assert one.key != HostIdentity("b", "boot", 1).key  # a copy of a virtual machine
    assert one.key != HostIdentity("a", "later", 1).key
    assert HostIdentity("a", "boot", 1, "x").key == HostIdentity("b", "other", 2, "x").key
    assert HostIdentity.of_words(json.loads(json.dumps(one.to_words()))) == one
    with pytest.raises(TopologyError, match="GRADWIRE_NODE"):
        _ = HostIdentity(None).key
    with pytest.raises(TopologyError, match="versions"):
        HostIdentity.of_words({"hostname": 3})


def test_this_process_knows_its_host() -> None:
    here = HostIdentity.here(environment={})
    assert here.network_namespace == os.stat("/proc/self/ns/net").st_ino
    assert here.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert HostIdentity.here(environment={"GRADWIRE_NODE": " left "}).key == "node left"
    assert HostIdentity.here(Path("/nowhere"), {}).network_namespace is None


@pytest.mark.parametrize(
    ("keys", "groups", "node_size", "axes"),
    [
        ("aabb", ((0, 1), (2, 3)), 2, (Axis(2), Axis(2, 2))),
        ("aaaa", ((0, 1, 2, 3),), 4, (Axis(4), Axis(1, 4))),
        ("abcd", ((0,), (1,), (2,), (3,)), 1, (Axis(1), Axis(4))),
        ("aab", ((0, 1), (2,)), None, None),
        ("abab", ((0, 2), (1, 3)), None, None),
        ("a", ((0,),), 1, (Axis(1), Axis(1))),
    ],
)
def test_ranks_with_equal_keys_share_a_node(
    keys: str, groups: tuple[tuple[int, ...], ...], node_size: int | None, axes: tuple[Axis, ...] | None
) -> None:
    topology = Topology.of_keys(keys)
    assert topology.groups == groups
    assert topology.node_size == node_size
    assert topology.axes == axes
    assert (topology.why_no_axes is None) == (axes is not None)


def test_three_levels_are_a_mesh_of_three_axes() -> None:
    found = Topology.of_keys("aabbccdd")
    topology = described(found, "[[level]]\nname = 'site'\ngroups = [[0, 1, 2, 3], [4, 5, 6, 7]]\nlatency_ms = 20")
    assert topology.axes == (Axis(2), Axis(2, 2), Axis(2, 4))
    assert topology.level("site").latency_s == pytest.approx(0.02)
    assert [topology.links_name(place) for place in range(3)] == [
        "between ranks of a node",
        "between nodes of a site",
        "between sites",
    ]
    assert "2 sites of 4 ranks (described as joined by 20 ms one way)" in topology.summary


def test_sizes_in_place_of_groups_multiply_to_the_number_of_ranks() -> None:
    text = "".join(f"[[level]]\nname = '{name}'\nsize = 2\n" for name in ("site", "node", "rank"))
    topology = described(Topology.of_keys("aabbccdd"), text)
    assert topology.axes == (Axis(2), Axis(2, 2), Axis(2, 4))
    with pytest.raises(TopologyError, match="the file: sizes 2 x 2 x 2 make 8 ranks, and there are 6"):
        described(Topology.of_keys("aabbcc"), text, "the file")


def test_a_file_may_join_hosts_into_a_node_and_say_what_links_carry() -> None:
    text = (
        "[[level]]\nname = 'node'\ngroups = [[0, 1], [2, 3]]\nrate = '1gbit'\n[[level]]\nname = 'rank'\nrate = '20gbit'"
    )
    topology = described(Topology.of_keys("abcd"), text)
    assert topology.groups == ((0, 1), (2, 3))
    assert [level.bits_per_s for level in topology.levels] == [20e9, 1e9]


BAD = {
    "[[level]]\nname = 'site'\ngroups = [[0, 2], [1, 3]]": "puts ranks 0 and 1 into different groups, and they run on",
    "[[level]]\nname = 'node'\ngroups = [[0], [1], [2, 3]]": "level node puts ranks 0 and 1 into different groups",
    "[[level]]\nname = 'site'\ngroups = [[0, 1], [1, 2, 3]]": "level site has rank 1 twice",
    "[[level]]\nname = 'site'\ngroups = [[0, 1], [3]]": "level site misses rank 2",
    "[[level]]\nname = 'site'\ngroups = [[0, 1, 2, 3, 4]]": "level site has rank 4, and there are ranks 0 to 3",
    "[[level]]\nname = 'site'\ngroups = [[0, 1, 2, 3], [-1]]": "level site has rank -1",
    "[[level]]\nname = 'site'\ngroups = [0, 1]": "level site has no groups of ranks: write groups",
    "[[level]]\nname = 'site'\ngroups = [[0, 1], []]": "level site has no groups of ranks",
    "[[level]]\nname = 'site'\ngroups = [[0, true]]": "level site has no groups of ranks",
    "[[level]]\nname = 'site'": "level site has no groups: write groups",
    "[[level]]\ngroups = [[0, 1]]": "a level has no name",
    "[[level]]\nname = 'site'\ngroup = [[0, 1]]": "a level has no 'group': did you mean 'groups'",
    "[[level]]\nname = 'node'\nrate = 50": "level node has rate 50: write it with its unit in quotes",
    "[[level]]\nname = 'node'\nrate = '50mbps'": "level node: rate '50mbps' cannot be used",
    "[[level]]\nname = 'node'\nlatency_ms = -1": "level node has latency_ms -1: write milliseconds",
    "[[level]]\nname = 'node'\nlatency_ms = nan": "level node has latency_ms nan",
    "[[level]]\nname = 'node'\nsize = 2": 'where one level has a size, all have, and the last one is named "rank"',
    "[[level]]\nname = 'node'\nsize = 0": "level node has size 0",
    "[[level]]\nname = 'node'\nsize = 2\ngroups = [[0]]": "level node has both groups and a size",
    "[[level]]\nname = 'node'\nsize = 1\n[[level]]\nname = 'rank'\nsize = 2": "sizes 1 x 2 make 2 ranks, and there are",
    "[[level]]\nname = 'rank'\ngroups = [[0, 1], [2, 3]]": 'level "rank" is each rank by itself',
    SITES + SITES: "level site is described twice",
    SITES + "[[level]]\nname = 'half'\ngroups = [[0, 1], [2], [3]]": "level half puts ranks 2 and 3",
    "[level]\nname = 'site'": r"it has no levels: write \[\[level\]\]",
    "": "it has no levels",
    "nodes = 3": "it has 'nodes' beside its levels",
    "[[level": "it is no TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_description_that_does_not_fit_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(TopologyError, match=f"^topology.toml: .*{BAD[text]}"):
        described(Topology.of_keys("aabb"), text, "topology.toml")


def test_levels_must_lie_inside_each_other() -> None:
    text = "[[level]]\nname = 'country'\ngroups = [[0, 1], [2, 3]]\n[[level]]\nname = 'site'\ngroups = [[0, 2], [1, 3]]"
    with pytest.raises(TopologyError, match=r"ranks 0 and 2 share a site, and .* of level country"):
        described(Topology.of_keys("abcd"), text)


@pytest.mark.parametrize("keys", ["aabb", "abc", "aaabbc", "abcdefg", "a", "abab"])
def test_every_node_is_in_a_pair_and_in_one_of_a_round(keys: str) -> None:
    topology = Topology.of_keys(keys)
    rounds = rounds_of_pairs(topology, 1)
    for pairs in rounds:
        nodes = [topology.levels[1].group_of(rank) for pair in pairs for rank in pair]
        assert len(nodes) == len(set(nodes))
    if len(topology.groups) > 1:
        found = {topology.levels[1].group_of(rank) for pairs in rounds for pair in pairs for rank in pair}
        assert found == set(range(len(topology.groups)))
    assert len(rounds) <= 2
    for pairs in rounds_of_pairs(topology, 0):
        assert all(
            topology.levels[1].group_of(pair.first) == topology.levels[1].group_of(pair.second) for pair in pairs
        )


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_prints_what_this_host_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology"]) == 0
    assert capsys.readouterr().out.startswith(f"host {HostIdentity.here().name}\n")


def test_the_command_refuses_files_of_several_ranks_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--cache", "links.json"]) == 2
    assert "start the command by torchrun" in capsys.readouterr().err


@pytest.mark.one_draw_in(3)
def test_ranks_of_the_command_find_out_who_is_near_whom(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradwire", "topology", "--cache", str(tmp_path / "links.json")]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environments = [{**meeting, "RANK": str(rank)} for rank in range(2)]
    run_ranks([command] * 2, environments, log_dir=tmp_path, deadline_s=100.0)
    said = (tmp_path / "rank0.log").read_text()
    assert "2 ranks on 1 node of 2 ranks" in said
    assert "between ranks of a node: " in said
    assert (tmp_path / "links.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        '[[level]]\nname = "site"\ngroups = [[0, 1, 2, 3], [4, 5, 6, 7]]\n',
        "\n".join(
            f'[[level]]\nname = "{name}"\nsize = {size}' for name, size in (("site", 2), ("node", 2), ("rank", 2))
        ),
    ],
)
def test_some_ranks_take_what_a_description_says_of_them(text: str) -> None:
    """Of ranks 1, 4 and 7 of a file of eight the first is on one site, and the others are on the other."""
    topology = described(Topology.of_keys("abc"), text, members=[1, 4, 7])
    assert topology.level("site").groups == ((0,), (1, 2))
    assert topology.groups == ((0,), (1,), (2,))
    assert topology.node_levels == (1, (1, 2))
