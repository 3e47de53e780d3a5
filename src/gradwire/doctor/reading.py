"""Reading the facts of this process and its host; nothing that cannot be read ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib
import ipaddress
import os
import platform
import resource
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradwire.core.version import VERSION
from gradwire.doctor.check_variables import SECRETS
from gradwire.doctor.facts import Devices, Facts, MeetingPoint, ProcessLimits
from gradwire.doctor.torch_variables import MEANT
from gradwire.topology.host import SYSFS, read_host
from gradwire.topology.processors import cores

_BEGINNINGS = ("NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_", "CUDA_", "GRADWIRE_", "PET_")
_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"}
    | {"MASTER_ADDR", "MASTER_PORT", *MEANT}
)
_FILES = ("NCCL_TOPO_FILE", "NCCL_CONF_FILE")
_PACKAGES = ("numba", "triton", "numpy")
_SIOCGIFADDR = 0x8915
_LAST_PORT = 65535
RESOLVE_S, CONNECT_S = 3.0, 2.0
"""How long a name may take to resolve, and a connection to be made: a name server that is gone takes minutes."""

T = TypeVar("T")


def read_facts(
    environment: Mapping[str, str] = os.environ, root: Path = SYSFS, nvml: Any | None = None, home: Path | None = None
) -> Facts:
    """Read what is known of this process and its host.

    Args:
        environment: variables of this process.
        root: where sysfs is mounted.
        nvml: see `gradwire.topology.read_host`.
        home: where `.nccl.conf` may be; None is the user's own folder.

    >>> read_facts({"NCCL_ALGO": "Ring", "HOME": "/root"}).environment
    {'NCCL_ALGO': 'Ring'}
    """
    own = {name: environment[name] for name in sorted(environment) if name.startswith(_BEGINNINGS) or name in _NAMES}
    own = _without_secrets(own)
    unread = _unread_sysfs(root)
    return Facts(
        host=read_host(root, nvml),
        versions=_versions(),
        environment=own,
        limits=_limits(unread),
        devices=_devices(unread),
        host_addresses=within(RESOLVE_S, _own_addresses),
        addresses=_interface_addresses(unread),
        nccl_files=_nccl_files(own, home or Path("~").expanduser()),
        missing_files=tuple(name for name in _FILES if name in own and not Path(own[name]).is_file()),
        meeting=_meeting(own),
        processors=cores(),
        rank=_whole(own.get("RANK")),
        world_size=_whole(own.get("WORLD_SIZE")) or 1,
        hosts=hosts_said(own),
        why_unread=unread,
    )


def _unread_sysfs(root: Path) -> dict[str, str]:
    """Why interfaces and ports cannot be read from sysfs, if so: in a container it may be hidden, or another's."""
    try:
        os.listdir(root / "class" / "net")
    except OSError as error:
        return {"links": f"{root / 'class' / 'net'} cannot be read ({error.strerror})"}
    return {}


def _without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with a digest in place of keys, since facts travel: equal where keys are, and as long, up to 64."""
    return {
        name: hashlib.sha256(value.encode()).hexdigest()[: len(value)] if name in SECRETS else value
        for name, value in variables.items()
    }


def hosts_said(environment: Mapping[str, str]) -> int | None:
    """On how many hosts the launcher has put the ranks; None where it does not say.

    >>> hosts_said({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}), hosts_said({})
    (2, None)
    """
    world, local = _whole(environment.get("WORLD_SIZE")), _whole(environment.get("LOCAL_WORLD_SIZE"))
    if world and local:
        return -(-world // local)
    return _whole(environment.get("GROUP_WORLD_SIZE")) or _whole(environment.get("PET_NNODES"))


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """What a function returns, or None where it takes longer; it goes on in a thread that ends with the process."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "gradwire": VERSION}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    nccl = _nccl_version()
    return {**found, **({"nccl": nccl} if nccl else {})}


def _nccl_version() -> str | None:
    if torch.version.cuda is None:  # this call fails then
        return None
    with contextlib.suppress(Exception):  # it is a build of PyTorch that has no NCCL
        return ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
    return None


def _limits(unread: dict[str, str]) -> ProcessLimits:
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        shared = os.statvfs("/dev/shm")
    except OSError as error:
        unread["limits"] = f"/dev/shm cannot be read ({error.strerror})"
        return ProcessLimits(files, most_files, locked)
    return ProcessLimits(
        files, most_files, locked, shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize
    )


def _devices(unread: dict[str, str]) -> Devices:
    build = torch.version.cuda
    if build is None:
        return Devices()
    try:
        count = torch.cuda.device_count()
        reach = [[one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
                 for one in range(count)]  # fmt: skip
    except RuntimeError as error:
        unread["devices"] = f"PyTorch cannot ask CUDA ({str(error).splitlines()[0][:120]})"
        return Devices(build)
    return Devices(build, count, tuple(map(tuple, reach)) if count > 1 else None)


def _own_addresses() -> tuple[str, ...]:
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(each[4][0]) for each in found))
    return ()


def _interface_addresses(unread: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError as error:
        unread["interfaces"] = f"the kernel does not list interfaces ({error.strerror})"
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # one without an address
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(packed[20:24])
    return found


def _nccl_files(environment: Mapping[str, str], home: Path) -> dict[str, dict[str, str]]:
    """Variables that NCCL's files set: the user's own, in place of which another one may be named, and the system's."""
    named = environment.get("NCCL_CONF_FILE")
    paths = [Path(named) if named else home / ".nccl.conf", Path("/etc/nccl.conf")]
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found[str(path)] = _without_secrets(settings_in(lines))
    return found


def settings_in(lines: Sequence[str]) -> dict[str, str]:
    """The variables that lines of such a file set: what follows the first = is the value.

    >>> settings_in(["# why", "NCCL_DEBUG=WARN", "NCCL_SOCKET_IFNAME==ens1f0", "nothing"])
    {'NCCL_DEBUG': 'WARN', 'NCCL_SOCKET_IFNAME': '=ens1f0'}
    """
    parts = [line.partition("=") for line in lines if not line.startswith("#")]
    return {name.strip(): value for name, equals, value in parts if equals}


def _meeting(environment: Mapping[str, str]) -> MeetingPoint | None:
    address, port = environment.get("MASTER_ADDR", ""), _whole(environment.get("MASTER_PORT"))
    if not address or port is None or port > _LAST_PORT:
        return None
    return MeetingPoint(f"{address}:{port}", "not tried")


def probed(meeting: MeetingPoint, rank: int | None) -> MeetingPoint:
    """What is at the address where ranks meet, before they do: rank 0 has to be able to listen there.

    Without a launcher nobody listens yet, so this asks a launcher's question: is the port free on its own host, and is
    there an answer from another one?
    """
    host, _, port = meeting.address.rpartition(":")
    found = within(RESOLVE_S, lambda: _resolved(host))
    if not found:
        return MeetingPoint(meeting.address, "unknown host")
    if _is_here(found) and rank in (None, 0):
        return MeetingPoint(meeting.address, _listening(found, int(port)))
    return MeetingPoint(meeting.address, connected(found, int(port)))


def _resolved(host: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_here(address: str) -> bool:
    """Whether an address is one of this host's: a socket can be bound to it."""
    with socket.socket(_family(address)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _listening(address: str, port: int) -> str:
    with socket.socket(_family(address)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rendezvous does
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return "taken" if error.errno == errno.EADDRINUSE else f"refused to us ({error.strerror})"
    return "free"


def connected(address: str, port: int, seconds: float = CONNECT_S) -> str:
    """Try to connect: "open", "closed" or "silent"."""
    with socket.socket(_family(address)) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect((address, port))
        except TimeoutError:
            return "silent"
        except OSError as error:
            return "closed" if error.errno == errno.ECONNREFUSED else f"not reached ({error.strerror})"
    return "open"


def is_loopback(address: str) -> bool:
    """Whether an address reaches this host alone.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("host")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None
