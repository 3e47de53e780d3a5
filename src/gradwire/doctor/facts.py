"""What is known of one process and its host: read once, so that checks are functions of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gradwire.topology.host import Host
from gradwire.topology.identity import HostIdentity

UNLIMITED = -1
"""What `getrlimit` says for no limit."""


@dataclass(frozen=True)
class ProcessLimits:
    """ProcessLimits of a process; None is what could not be read, and `UNLIMITED` no limit.

    Attributes:
        open_files: that this process may have at once.
        most_open_files: to which it may raise that itself.
        locked_bytes: of memory that stays where it is, which RDMA needs.
        shared_bytes: size of `/dev/shm`.
        free_shared_bytes: of it.
    """

    open_files: int | None = None
    most_open_files: int | None = None
    locked_bytes: int | None = None
    shared_bytes: int | None = None
    free_shared_bytes: int | None = None


@dataclass(frozen=True)
class Devices:
    """What PyTorch sees of the GPUs of this host.

    Attributes:
        cuda_build: version of CUDA that PyTorch was built for; None where it was built without.
        usable: GPUs that this process may use; None where PyTorch could not tell.
        peer_access: for each pair of these whether one reads the other's memory; None where it was not asked.
    """

    cuda_build: str | None = None
    usable: int | None = None
    peer_access: tuple[tuple[bool, ...], ...] | None = None


@dataclass(frozen=True)
class MeetingPoint:
    """The address where ranks meet, as this process found it before it met anybody.

    Attributes:
        address: host and port.
        state: "free" (nobody listens, and this host may), "taken" (another program of this host listens), "open"
            (somebody listens there), "closed" (nobody listens, or a firewall refuses), "silent" (no answer at all),
            "unknown host", or "not tried".
    """

    address: str
    state: str


@dataclass(frozen=True)
class Facts:
    """All that checks of one process look at; what could not be read is None.

    Attributes:
        host: interfaces, RDMA ports, NUMA nodes, GPUs.
        versions: of python, torch, gradwire, numba, triton, numpy and nccl; those that are missing are left out.
        environment: variables of this process that a check may want, and no others.
        limits: of this process.
        devices: as PyTorch sees them.
        host_addresses: what the host's name resolves to, which Gloo takes; None where it does not resolve in time.
        addresses: IPv4 address of each interface that has one.
        nccl_files: variables that files of NCCL set, by the path of the file.
        missing_files: names of variables whose file is not there.
        meeting: where ranks meet; None where that is not said.
        processors: logical processors that this process may use.
        rank: of this process; None without a launcher.
        world_size: how many ranks there are.
        hosts: on how many hosts; None where that is not known.
        why_unread: why something could not be read, by the name of the check that wants it.
    """

    host: Host
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    limits: ProcessLimits = ProcessLimits()
    devices: Devices = Devices()
    host_addresses: tuple[str, ...] | None = ()
    addresses: dict[str, str] = field(default_factory=dict)
    nccl_files: dict[str, dict[str, str]] = field(default_factory=dict)
    missing_files: tuple[str, ...] = ()
    meeting: MeetingPoint | None = None
    processors: int | None = None
    rank: int | None = None
    world_size: int = 1
    hosts: int | None = None
    why_unread: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> HostIdentity:
        """What tells the host from all others."""
        return self.host.identity

    @property
    def name(self) -> str:
        """What people call the host."""
        return self.identity.name

    @property
    def has_several_hosts(self) -> bool:
        """Whether ranks are known to be on several hosts."""
        return self.hosts is not None and self.hosts > 1

    @property
    def local_ranks(self) -> int | None:
        """Ranks of this host, as the launcher says; None where it does not."""
        text = self.environment.get("LOCAL_WORLD_SIZE", "")
        return int(text) if text.isdigit() else None

    def among(self, hosts: int) -> Facts:
        """The same, where ranks have found out on how many hosts they are."""
        return replace(self, hosts=hosts)
