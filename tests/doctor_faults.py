"""A cluster that is set up right, and what can be wrong with it, one fault at a time."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.doctor.facts import UNLIMITED, Devices, Facts, MeetingPoint, ProcessLimits
from gradwire.doctor.finding import Severity
from gradwire.doctor.together import MeasuredTogether
from gradwire.drivers.clocks import ClockOffset
from gradwire.topology import Gpu, Host, HostIdentity, NetworkInterface, NvLink, RdmaPort, read_host
from gradwire.topology.axis_links import MeasuredPair
from gradwire.topology.link_matrix import LinkMatrix
from topology_trees import Nvml, dgx, made

GPUS = 8
VERSIONS = {
    "python": "3.12.4",
    "torch": "2.13.0",
    "gradwire": "0.3.0",
    "numba": "0.68.1",
    "numpy": "2.3.1",
    "triton": "3.7.1",
    "nccl": "2.30.3",
}
ENVIRONMENT = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "NCCL_SOCKET_IFNAME": "=eno1",
    "GLOO_SOCKET_IFNAME": "eno1",
    "NCCL_IB_HCA": "mlx5",
    "NCCL_DEBUG": "WARN",
    "NCCL_ALGO": "Ring,Tree",
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "OMP_NUM_THREADS": "8",
}


@functools.cache
def _host(number: int) -> Host:
    identity = HostIdentity(f"node{number}", f"boot{number}", 1)
    with tempfile.TemporaryDirectory() as folder:
        tree = made(Path(folder), {**dgx(), **_gpu_nodes()})
        return read_host(tree, Nvml([["switch"] * 18] * GPUS, speed=25_000), identity)


def sound(rank: int = 0) -> Facts:
    """The facts of a rank on one of two hosts of eight GPUs, of which nothing is wrong."""
    host_number, local = divmod(rank, GPUS)
    return Facts(
        host=_host(host_number),
        versions=dict(VERSIONS),
        environment={**ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(local)},
        limits=ProcessLimits(65536, 65536, UNLIMITED, 1 << 34, 1 << 33),
        devices=Devices("13.0", GPUS, tuple((True,) * GPUS for _ in range(GPUS))),
        host_addresses=(f"10.0.0.{1 + host_number}",),
        addresses={"lo": "127.0.0.1", "eno1": f"10.0.0.{1 + host_number}"},
        meeting=MeetingPoint("10.0.0.1:29500", "free"),
        processors=224,
        rank=rank,
        world_size=2 * GPUS,
        hosts=2,
    )


def _gpu_nodes() -> dict[str, str]:
    return {f"bus/pci/devices/0000:{0x1A + gpu:02x}:00.0/numa_node": str(gpu // 4) for gpu in range(GPUS)}


def all_sound() -> list[Facts]:
    """The facts of four of its ranks, two of each host, as if there were no others."""
    return [replace(sound(rank), rank=place) for place, rank in enumerate((0, 1, 8, 9))]


def sound_measured() -> MeasuredTogether:
    """What four hosts measure between them where all is well."""
    pairs = tuple(MeasuredPair((one, other), 2e-4, 8e-10) for one in range(4) for other in range(one + 1, 4))
    offsets = tuple(ClockOffset(rank, 2e-4, 1e-4, 0.0) for rank in (1, 2, 3))
    return MeasuredTogether(offsets, dict.fromkeys(range(4), 0), LinkMatrix((0, 1, 2, 3), ("a", "b", "c", "d"), pairs))


# One host -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with one host.

    Attributes:
        name: of the test.
        plant: makes sound facts wrong.
        says: what the finding must say, a part of its sentence.
        severity: of the finding.
        remedy: what its remedy must say.
    """

    name: str
    plant: Callable[[Facts], Facts]
    says: str
    severity: Severity
    remedy: str = ""


def setting(**variables: str) -> Callable[[Facts], Facts]:
    """Facts with these variables set."""
    return lambda facts: replace(facts, environment={**facts.environment, **variables})


def without(*names: str) -> Callable[[Facts], Facts]:
    """Facts without these variables."""
    return lambda facts: replace(
        facts, environment={name: value for name, value in facts.environment.items() if name not in names}
    )


def version(**packages: str | None) -> Callable[[Facts], Facts]:
    """Facts with other versions; None is a package that is missing."""
    return lambda facts: replace(
        facts, versions={name: each for name, each in {**facts.versions, **packages}.items() if each is not None}
    )


def limit(**limits: int) -> Callable[[Facts], Facts]:
    """Facts with other limits."""
    return lambda facts: replace(facts, limits=replace(facts.limits, **limits))


def interface(name: str, **changes: object) -> Callable[[Facts], Facts]:
    """Facts in which an interface is otherwise."""

    def plant(facts: Facts) -> Facts:
        changed = tuple(
            replace(each, **changes) if each.name == name else each  # type: ignore[arg-type]
            for each in facts.host.interfaces
        )
        return replace(facts, host=replace(facts.host, interfaces=changed))

    return plant


def port(place: int, **changes: object) -> Callable[[Facts], Facts]:
    """Facts in which an RDMA port is otherwise."""

    def plant(facts: Facts) -> Facts:
        ports: list[RdmaPort] = list(facts.host.rdma_ports)
        ports[place] = replace(ports[place], **changes)  # type: ignore[arg-type]
        return replace(facts, host=replace(facts.host, rdma_ports=tuple(ports)))

    return plant


def nvlinks(gpu: int, count: int) -> Callable[[Facts], Facts]:
    """Facts in which a GPU has fewer links."""

    def plant(facts: Facts) -> Facts:
        gpus = list(facts.host.gpus or ())
        gpus[gpu] = replace(gpus[gpu], nvlinks=(gpus[gpu].nvlinks or ())[:count])
        return replace(facts, host=replace(facts.host, gpus=tuple(gpus)))

    return plant


def islands(facts: Facts) -> Facts:
    """Facts in which GPUs have direct links to the other three of their half."""
    gpus = facts.host.gpus or ()
    halves = [
        replace(gpu, nvlinks=tuple(NvLink(i, "gpu", other.bus_id) for i, other in enumerate(_half_of(gpu, gpus))))
        for gpu in gpus
    ]
    return replace(facts, host=replace(facts.host, gpus=tuple(halves)))


def _half_of(gpu: Gpu, gpus: Sequence[Gpu]) -> list[Gpu]:
    return [other for other in gpus if other.index // 4 == gpu.index // 4 and other != gpu]


def meeting(state: str, address: str = "10.0.0.1:29500") -> Callable[[Facts], Facts]:
    """Facts with something else where ranks meet."""
    return lambda facts: replace(facts, meeting=MeetingPoint(address, state))


def device(**changes: object) -> Callable[[Facts], Facts]:
    """Facts in which PyTorch sees something else."""
    return lambda facts: replace(facts, devices=replace(facts.devices, **changes))  # type: ignore[arg-type]


def both(*plants: Callable[[Facts], Facts]) -> Callable[[Facts], Facts]:
    """Facts with several changes."""

    def plant(facts: Facts) -> Facts:
        for each in plants:
            facts = each(facts)
        return facts

    return plant


def slow_interface(facts: Facts) -> Facts:
    """Facts with another interface, that came up at 100 Mbit/s."""
    slow = NetworkInterface("eno2", "ethernet", 1e8, "up")
    return replace(facts, host=replace(facts.host, interfaces=(*facts.host.interfaces, slow)))


PARTED = tuple(tuple(one == other or {one, other} != {2, 5} for other in range(GPUS)) for one in range(GPUS))
LOOPBACK_NAME = both(without("GLOO_SOCKET_IFNAME"), lambda facts: replace(facts, host_addresses=("127.0.1.1",)))
SYSTEM_FILE, OWN_FILE = {"/etc/nccl.conf": {"NCCL_DEBUG": "INFO"}}, {"/home/a/.nccl.conf": {"NCCL_CROSS_NIC": "yes"}}

FAULTS = (
    # names and values of variables
    Fault("unknown", setting(NCCL_SOCKET_IFNAMES="eth0"), "NCCL_SOCKET_IFNAMES is a variable that nothing reads",
          "warning", "Did you mean NCCL_SOCKET_IFNAME?"),
    Fault("unknown-torch", setting(TORCH_NCCL_BLOCKING_WAITS="1"), "that nothing reads", "warning",
          "Did you mean TORCH_NCCL_BLOCKING_WAIT?"),
    Fault("unknown-master", both(without("MASTER_ADDR"), setting(MASTER_ADDRESS="a")), "MASTER_ADDRESS is a variable",
          "warning", "Did you mean MASTER_ADDR?"),
    Fault("algo", setting(NCCL_ALGO="AUTO"), "NCCL_ALGO=AUTO makes NCCL 2.24 and later fail", "error", "Ring"),
    Fault("proto", setting(NCCL_PROTO="allreduce:LL256"), "there is no 'LL256'", "error"),
    Fault("function", setting(NCCL_ALGO="allreduces:Ring"), "there is no 'allreduces'", "error", "allreduce"),
    Fault("true", setting(NCCL_CROSS_NIC="true"), "is read as 0: NCCL reads numbers by strtoll", "warning", "0 to 2"),
    Fault("octal", setting(NCCL_IB_TIMEOUT="022"), "is read as 18: a leading 0 makes it octal", "warning"),
    Fault("suffix", setting(NCCL_BUFFSIZE="8M"), "is read as 8: NCCL reads numbers by strtoll, which drops 'M'",
          "warning"),
    Fault("range", setting(NCCL_IB_QPS_PER_CONNECTION="500"), "NCCL_IB_QPS_PER_CONNECTION=500 is not legal", "warning",
          "1 to 128"),
    Fault("capitals", setting(NCCL_NET_GDR_LEVEL="phb"), "is ignored, so NCCL chooses: capitals matter", "warning",
          "PHB"),
    Fault("debug", setting(NCCL_DEBUG="VERBOSE"), "turns logging off", "warning"),
    Fault("network", setting(NCCL_NET="Sockets"), "is the name of no network", "error", "Socket"),
    Fault("torch-value", setting(TORCH_NCCL_ASYNC_ERROR_HANDLING="on"), "it is no whole number", "error", "0 to 3"),
    Fault("torch-debug", setting(TORCH_DISTRIBUTED_DEBUG="TRUE"), "makes PyTorch raise", "error", "DETAIL"),
    Fault("master-port", setting(MASTER_PORT="295000"), "MASTER_PORT=295000 is not legal", "error", "0 to 65535"),
    Fault("gloo-list", setting(GLOO_SOCKET_IFNAME="^docker0"), "without ^ and =", "error"),
    Fault("never-read", setting(NCCL_LL_THRESHOLD="0"), "NCCL_LL_THRESHOLD is not read since 2.5", "warning"),
    Fault("never-was", setting(NCCL_TIMEOUT="1800"), "NCCL_TIMEOUT is not read by any version", "warning",
          "init_process_group(timeout="),
    Fault("renamed", setting(NCCL_BLOCKING_WAIT="1"), "NCCL_BLOCKING_WAIT is an old name", "note",
          "TORCH_NCCL_BLOCKING_WAIT"),
    Fault("newer", both(version(nccl="2.21.5"), setting(NCCL_SOCKET_RETRY_CNT="50")),
          "is read since NCCL 2.24, and this is 2.21.5", "warning"),
    Fault("sockets", setting(NCCL_SOCKET_NTHREADS="16", NCCL_NSOCKS_PERTHREAD="8"), "would be 128", "warning"),
    Fault("channels", setting(NCCL_MIN_CTAS="32", NCCL_MAX_CTAS="8"), "NCCL_MIN_CTAS is above NCCL_MAX_CTAS",
          "warning"),
    Fault("no-infiniband", setting(NCCL_IB_DISABLE="1"), "InfiniBand is off, and NCCL_IB_HCA is about it", "warning"),
    Fault("blocking", setting(CUDA_LAUNCH_BLOCKING="1"), "kernels run one at a time", "warning"),
    Fault("logging", setting(NCCL_DEBUG="INFO"), "NCCL_DEBUG is on", "note"),
    Fault("twice", lambda facts: replace(facts, nccl_files=SYSTEM_FILE), "NCCL_DEBUG is set twice", "warning"),
    Fault("file", lambda facts: replace(facts, nccl_files=OWN_FILE), "/home/a/.nccl.conf sets NCCL_CROSS_NIC=yes",
          "warning"),
    Fault("topology-file", both(setting(NCCL_TOPO_FILE="/no"), lambda f: replace(f, missing_files=("NCCL_TOPO_FILE",))),
          "names a file that is not there", "warning"),
    # interfaces and links
    Fault("no-match", setting(NCCL_SOCKET_IFNAME="bond"), "NCCL_SOCKET_IFNAME=bond matches no interface", "error"),
    Fault("no-gloo", setting(GLOO_SOCKET_IFNAME="eth0"), "GLOO_SOCKET_IFNAME names eth0, which is not here", "error"),
    Fault("no-device", setting(NCCL_IB_HCA="=mlx4_0:1"), "NCCL_IB_HCA==mlx4_0:1 matches no RDMA device", "error"),
    Fault("loopback-name", LOOPBACK_NAME, "Gloo would take the loopback", "error", "such as eno1"),
    Fault("no-name", both(without("GLOO_SOCKET_IFNAME"), lambda facts: replace(facts, host_addresses=None)),
          "does not resolve within seconds", "warning"),
    Fault("loopback", setting(NCCL_SOCKET_IFNAME="lo"), "NCCL_SOCKET_IFNAME names lo, which reaches no other host",
          "error"),
    Fault("down", interface("eno1", state="down"), "GLOO_SOCKET_IFNAME names eno1, which is down", "error"),
    Fault("left-out", both(without("NCCL_IB_HCA"), setting(NCCL_NET="Socket")), "although RDMA ports are up",
          "warning"),
    Fault("port-down", port(3, state="DOWN", bits_per_s=None), "mlx5_3 port 1 is DOWN, and others are up", "warning"),
    Fault("port-slow", port(5, bits_per_s=100e9), "mlx5_5 has 100 Gbit/s, and other InfiniBand ports", "warning"),
    Fault("ethernet", slow_interface, "eno2 has come up at 100 Mbit/s", "warning"),
    Fault("far-gpus", lambda facts: replace(facts, host=replace(facts.host, rdma_ports=facts.host.rdma_ports[:4])),
          "4 of 8 GPUs have no RDMA port on their NUMA node", "note"),
    # where ranks meet
    Fault("taken", meeting("taken"), "port 29500 is taken by another program", "error", "another MASTER_PORT"),
    Fault("closed", meeting("closed"), "10.0.0.1:29500 cannot be reached: closed", "error", "firewall"),
    Fault("silent", meeting("silent"), "nothing answers at 10.0.0.1:29500", "error", "firewall"),
    Fault("nowhere", meeting("unknown host", "node:29500"), "MASTER_ADDR=node does not resolve", "error"),
    Fault("localhost", meeting("free", "localhost:29500"), "MASTER_ADDR=localhost is each host itself", "error"),
    # limits
    Fault("files", limit(open_files=128), "a process may open 128 files", "error", "ulimit -n"),
    Fault("files-low", limit(open_files=200, most_open_files=200), "a process may open 200 files", "warning",
          "limits.d"),
    Fault("shared", limit(shared_bytes=64 << 20, free_shared_bytes=64 << 20), "/dev/shm has 64 MiB", "warning",
          "--shm-size"),
    Fault("shared-full", limit(free_shared_bytes=1 << 20), "/dev/shm has 1 MiB left", "warning"),
    Fault("locked", limit(locked_bytes=8192 << 10), "too little memory may be locked", "error", "memlock"),
    # versions, devices, ranks of a host
    Fault("old-torch", version(torch="2.4.1+cu121"), "torch 2.4.1+cu121 is older", "error", "torch 2.9 or later"),
    Fault("old-numba", version(numba="0.61.2"), "numba 0.61.2 cannot be imported with numpy 2.3.1", "error"),
    Fault("no-numba", version(numba=None), "numba is not installed", "note", "gradwire[fast]"),
    Fault("no-triton", version(triton=None), "triton is not installed", "warning"),
    Fault("no-cuda", device(cuda_build=None, usable=None), "PyTorch is built without CUDA, and this host has 8 GPUs",
          "error"),
    Fault("hidden", both(setting(CUDA_VISIBLE_DEVICES=""), device(usable=0)), "can use none of this host's 8 GPUs",
          "error", "CUDA_VISIBLE_DEVICES"),
    Fault("too-many", device(usable=4), "8 ranks run on this host, and it has 4 GPUs", "error", "--nproc-per-node 4"),
    Fault("nvlinks", nvlinks(6, 17), "GPU 6 has 17 active NVLinks, and others of this host have 18", "warning"),
    Fault("islands", islands, "NVLinks do not join all GPUs", "note"),
    Fault("peers", device(peer_access=PARTED), "1 pair of GPUs cannot read each other's memory", "warning", "ACS"),
    Fault("no-p2p", setting(NCCL_P2P_DISABLE="1"), "NCCL_P2P_DISABLE=1 keeps NCCL from the fastest way", "warning"),
    Fault("rank", lambda facts: replace(facts, rank=16), "RANK=16 does not exist among 16 ranks", "error"),
    Fault("threads", setting(OMP_NUM_THREADS="224"), "8 ranks of 224 threads share 224 processors", "warning", "28"),
)  # fmt: skip


# Ranks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFault:
    """Something that is wrong between ranks that are right each by itself."""

    name: str
    plant: Callable[[Sequence[Facts]], Sequence[Facts]]
    says: str
    severity: Severity
    evidence: str = ""


def on(place: int, plant: Callable[[Facts], Facts]) -> Callable[[Sequence[Facts]], Sequence[Facts]]:
    """Ranks of which one is otherwise."""
    return lambda ranks: [plant(facts) if facts.rank == place else facts for facts in ranks]


def slow_host(ranks: Sequence[Facts]) -> Sequence[Facts]:
    """Ranks of which one host has slower ports, all of them alike."""
    slow = both(*(port(place, bits_per_s=200e9) for place in range(8)))
    return [slow(facts) if facts.name == "node1" else facts for facts in ranks]


def fewer_gpus(ranks: Sequence[Facts]) -> Sequence[Facts]:
    """Ranks of which one host has lost a GPU."""
    lost = [replace(facts, host=replace(facts.host, gpus=(facts.host.gpus or ())[:7])) for facts in ranks]
    return [less if less.name == "node1" else facts for less, facts in zip(lost, ranks, strict=True)]


RANK_FAULTS = (
    RankFault("torch", on(2, version(torch="2.12.1")), "unlike versions of torch", "error", "2.12.1 on rank 2"),
    RankFault("gradwire", on(1, version(gradwire="0.2.0")), "unlike versions of gradwire", "error"),
    RankFault("numba", on(3, version(numba=None)), "unlike versions of numba", "warning", "none on rank 3"),
    RankFault("algo", on(3, setting(NCCL_ALGO="Ring")), "unlike values of NCCL_ALGO", "error",
              "NCCL_ALGO=Ring,Tree on ranks 0, 1 and 2; NCCL_ALGO=Ring on rank 3"),
    RankFault("buffers", on(1, setting(NCCL_BUFFSIZE="8388608")), "unlike values of NCCL_BUFFSIZE", "warning",
              "not set on ranks 0, 2 and 3"),
    RankFault("world", on(1, setting(WORLD_SIZE="32")), "unlike values of WORLD_SIZE", "error"),
    RankFault("gloo", on(2, setting(GLOO_SOCKET_IFNAME="eno1,ibp0")), "unlike numbers of interfaces", "error"),
    RankFault("rates", slow_host, "the host of rank 2 has a slower port than others", "warning",
              "200 Gbit/s on rank 2"),
    RankFault("gpus", fewer_gpus, "hosts have unlike numbers of GPUs", "warning", "7 on rank 2"),
    RankFault("gpu", on(1, setting(LOCAL_RANK="0")), "ranks 0 and 1 of one host have the same LOCAL_RANK", "error"),
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredFault:
    """Something that only measuring shows."""

    name: str
    plant: Callable[[MeasuredTogether], MeasuredTogether]
    says: str
    severity: Severity
    evidence: str = ""


def links(
    *slow: tuple[int, int], times: float = 10.0, late_s: float = 0.0
) -> Callable[[MeasuredTogether], MeasuredTogether]:
    """MeasuredTogether links of which some are slower, or later."""

    def plant(found: MeasuredTogether) -> MeasuredTogether:
        assert found.matrix is not None
        pairs = tuple(
            MeasuredPair(pair.ranks, pair.alpha_s + late_s, times * pair.beta_s_per_byte)
            if pair.ranks in slow
            else pair
            for pair in found.matrix.pairs
        )
        return replace(found, matrix=replace(found.matrix, pairs=pairs))

    return plant


MEASURED_FAULTS = (
    MeasuredFault("slow-link", links((1, 2)), "slow links: ranks 1 and 2 among the others", "warning",
                  "ranks 1 and 2: 1 Gbit/s, where the fastest quarter of the pairs reach 10 Gbit/s"),
    MeasuredFault("slow-host", links((0, 3), (1, 3), (2, 3)), "all links of d (rank 3) are slow", "warning"),
    MeasuredFault("late-link", links((0, 2), times=1, late_s=0.02), "late", "warning", "20.2 ms one way"),
    MeasuredFault("clock", lambda found: replace(found, offsets=(*found.offsets[:2], ClockOffset(3, -7200.0, 1e-3, 0))),
                  "the clock of node1 is 7,200 s behind that of rank 0", "warning"),
    MeasuredFault("sum", lambda found: replace(found, wrong={0: 0, 1: 0, 2: 5, 3: 0}),
                  "an all-reduce gave rank 2 a wrong sum", "error", "rank 2: 5 of 131,072 elements"),
)  # fmt: skip
