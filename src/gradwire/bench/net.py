"""Several hosts on one Linux machine, joined by links of a given rate.

Each host is a network namespace with one interface, `eth0`; a further namespace is the switch. The machine's
own firewall, addresses and interfaces are never touched::

    host 0 [eth0 | tbf] === [tbf | port0]                       tbf: the queue that lets `rate` through,
    host 1 [eth0 | tbf] === [tbf | port1]  switch (a bridge)         one for each direction of each link,
    host 2 [eth0 | tbf] === [tbf | port2]                            so every link is full duplex

No name is written anywhere: a namespace lives as long as its *holder*, a shell that waits for the end of its
standard input, which comes when the creator ends, however it ends. What can outlive a killed creator are the
commands it started on the hosts; they carry its name in `GRADWIRE_NET`, and `clean` removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Protocol

from gradwire.bench.ranks import free_port, loopback_environments
from gradwire.core.errors import NetworkError

Mode = Literal["root", "user", "paced"]

_MODES = ("auto", "root", "user", "paced")
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TOOLS = ("ip", "tc", "unshare", "nsenter", "sh")
_DEFAULT_PORT = 29500
_MAX_HOSTS = 1000  # a bridge has 1023 ports
_TOOL_TIMEOUT_S = 20.0
_TAG = "GRADWIRE_NET"

_serial = itertools.count()


def parse_rate(rate: str) -> float:
    """Read a rate in `tc`'s notation and return bits per second.

    Args:
        rate: a number and one of the units bit, kbit, mbit, gbit, tbit (powers of 1000), such as "100mbit".

    Raises:
        ValueError: for anything else, and beyond 1kbit to 10tbit. "mbps" is refused too: `tc` means megabytes by it,
            people megabits.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000.0, 2500000000.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", rate.lower())
    bits_per_s = float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0
    if not 1e3 <= bits_per_s <= 1e13:
        shown = repr(rate) if len(rate) <= 40 else f"{rate[:40]!r}..."
        raise ValueError(
            f"rate {shown} cannot be used: write a number and a unit of {', '.join(_UNITS)}, "
            'from 1kbit to 10tbit, such as "100mbit"'
        )
    return bits_per_s


class _Hosts(Protocol):
    """What `Network` asks of each way to make hosts."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str]: ...
    def environment(self, rank: int) -> dict[str, str]: ...
    def processes(self) -> Iterator[int]: ...
    def close(self) -> None: ...


class _Namespaces:
    """Hosts as network namespaces, made as root or in a user namespace of one's own."""

    def __init__(self, hosts: int, rate_bits_per_s: float | None, port: int, tag: str, *, rootless: bool):
        self._hosts = hosts
        self._port = port
        self._tag = tag
        self._rootless = rootless
        self._holders: list[subprocess.Popen[bytes]] = []  # the switch, then the hosts
        self._inodes: set[int] = set()
        try:
            for _ in range(hosts + 1):
                self._hold()
            self._join(rate_bits_per_s)
        except BaseException:
            self.close()
            raise

    def _enter(self, holder: int) -> list[str]:
        """The words before a command that make it run in a holder's namespace."""
        target = ["nsenter", "--target", str(self._holders[holder].pid), "--net"]
        return [*target, "--user", "--preserve-credentials"] if self._rootless else target

    def _hold(self) -> None:
        """Start the holder of one more namespace and wait until that exists."""
        words = ["unshare", "--net"]
        if self._rootless and not self._holders:
            words += ["--user", "--map-root-user"]
        elif self._rootless:  # the others must belong to the same user namespace
            first = str(self._holders[0].pid)
            words = ["nsenter", "--target", first, "--user", "--preserve-credentials", *words]
        holder = subprocess.Popen(
            [*words, "sh", "-c", "echo ready; read -r _", "gradwire-net"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, _TAG: self._tag},
            start_new_session=True,  # a Ctrl-C in the terminal is the creator's to handle
        )
        self._holders.append(holder)
        said = _first_line(holder)
        if said != "ready":
            raise NetworkError(f"cannot make a network namespace: {said or 'its holder did not start'}")
        self._inodes.add(os.stat(f"/proc/{holder.pid}/ns/net").st_ino)

    def _join(self, rate_bits_per_s: float | None) -> None:
        hosts = [str(holder.pid) for holder in self._holders[1:]]
        self._script(0, [*_QUIET, *_switch_script(hosts, rate_bits_per_s)])
        for rank in range(self._hosts):
            self._script(rank + 1, [*_QUIET, *_host_script(_address(rank), rate_bits_per_s)])

    def _script(self, holder: int, lines: list[str]) -> None:
        result = subprocess.run(
            [*self._enter(holder), "sh", "-e"],
            input="\n".join(lines),
            text=True,
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
            start_new_session=True,
        )
        if result.returncode:
            said = " ".join((result.stderr or result.stdout).split())
            raise NetworkError(f"cannot set up a network namespace: {said or f'status {result.returncode}'}")

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        return [*self._enter(rank + 1), "--", *argv]

    def environment(self, rank: int) -> dict[str, str]:
        environment = loopback_environments(self._hosts, self._port)[rank]
        wire = {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_WIRE": "interface:eth0"}
        return environment | wire

    def processes(self) -> Iterator[int]:
        holders = {holder.pid for holder in self._holders}
        for pid in _all_processes():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino in self._inodes and pid not in holders:
                    yield pid

    def close(self) -> None:
        _kill(self.processes)
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()
        self._holders.clear()
        self._inodes.clear()


# Counters must see our traffic only, so nothing may speak unasked.
_QUIET = [
    "for file in /proc/sys/net/ipv6/conf/all /proc/sys/net/ipv6/conf/default; do",
    "  if [ -e $file ]; then echo 1 > $file/disable_ipv6; fi",
    "done",
    "ip link set lo up",
]


def _switch_script(hosts: Sequence[str], rate_bits_per_s: float | None) -> list[str]:
    lines = ["ip link add name bridge type bridge stp_state 0 mcast_snooping 0", "ip link set bridge up"]
    for rank, host in enumerate(hosts):
        lines += [
            f"ip link add name port{rank} mtu {_MTU} type veth peer name eth0 netns {host} mtu {_MTU}",
            *_shape(f"port{rank}", rate_bits_per_s),
            f"ip link set port{rank} master bridge up",
        ]
    return lines


def _host_script(address: str, rate_bits_per_s: float | None) -> list[str]:
    return [
        f"ip address add {address}/16 dev eth0",
        *_shape("eth0", rate_bits_per_s),
        "ip link set eth0 up",
        # As a property of the route: the sysctl refuses what the machine's own list does not allow, and that
        # list is not ours to change. A kernel without cubic keeps its default.
        "ip route replace 10.77.0.0/16 dev eth0 congctl cubic || :",
    ]


# How a link is shaped: measured with a Gloo all_reduce of 8 MB fp32 among 4 hosts (TCP can reach 95.6% of the
# rate: 1448 of 1514 bytes) and with one message of 64 KB after a pause (ideal: 27, 5.5, 0.55 ms at the three
# rates). CPU is the time in interrupts, in hundredths of a second, over each whole run.
#
#   rate     burst     largest packet   congestion   all_reduce   64 KB     CPU
#   100mbit  16 KB     1 frame          cubic        93.5%                  357
#   100mbit  16 KB     1 frame          bbr          88.8%                  402
#   100mbit  16 KB     64 KB, cut up    cubic        93.6%                  316
#   100mbit  70 KB     64 KB            cubic        95.5%        1.1 ms     35
#   100mbit  12.6 KB   8 frames         cubic        95.0%        5.5 ms     90     <- chosen
#   100mbit  8 KB      4 frames         cubic        94.5%        5.8 ms    118
#   20mbit   70 KB     64 KB            cubic        95.5%        1.5 ms     26
#   20mbit   3.1 KB    2 frames         cubic        93.5%        27 ms     216     <- chosen
#   1gbit    125 KB    1 frame          cubic        65%                    193
#   1gbit    125 KB    1 frame          bbr          53%                    306
#   1gbit    125 KB    40 frames        cubic        95.0%        0.9 ms     21     <- chosen
#
# So: a burst of 1 ms, for a larger one gives small messages away, which flatters whoever compresses. Packets
# as large as the burst and no larger: tbf cuts up those that exceed it, and single frames cost much processor
# time. The queue charges for the framing of each frame in a large packet; the interface counts such a packet
# as one, so its bytes lack the others' framing, but bytes - 66 * packets is exactly the payload.
_MTU = 1500
_FRAME_BYTES = _MTU + 14
_BURST_S = 1e-3
_FRAMES = range(2, 41)  # a packet may hold 64 KB
_QUEUE_S = 50e-3  # an all_to_all of 1 MB among 4 hosts at 100mbit loses nothing (it does with 10 ms)
_MIN_QUEUE_BYTES = 65536
_MAX_QUEUE_BYTES = 2**32 - 1  # tc holds it in 32 bits


def _shape(interface: str, rate_bits_per_s: float | None) -> list[str]:
    """Return the commands that limit what leaves by `interface`."""
    if rate_bits_per_s is None:
        return []
    bytes_per_s = rate_bits_per_s / 8
    burst_bytes = bytes_per_s * _BURST_S
    frames = min(max(int(burst_bytes / _FRAME_BYTES), _FRAMES[0]), _FRAMES[-1])
    burst_bytes = max(burst_bytes, frames * _FRAME_BYTES) + 66
    limit_bytes = min(max(bytes_per_s * _QUEUE_S, _MIN_QUEUE_BYTES) + burst_bytes, _MAX_QUEUE_BYTES)
    return [
        f"ip link set {interface} gso_max_segs {frames}",
        f"tc qdisc add dev {interface} root tbf rate {rate_bits_per_s:.0f}bit burst {burst_bytes:.0f} "
        f"limit {limit_bytes:.0f}",
    ]


def _address(rank: int) -> str:
    return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _TOOL_TIMEOUT_S)
    return process.stdout.readline().decode(errors="replace").strip() if ready else ""


class _Loopback:
    """All ranks on 127.0.0.1; each slows down its own sockets (`WireMeter.pace`)."""

    def __init__(self, hosts: int, rate_bits_per_s: float | None, port: int):
        self._hosts = hosts
        self._bytes_per_s = float("inf") if rate_bits_per_s is None else rate_bits_per_s / 8
        self._port = port

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def environment(self, rank: int) -> dict[str, str]:
        environment = loopback_environments(self._hosts, self._port)[rank]
        return environment | {"GRADWIRE_WIRE": f"sockets:{self._bytes_per_s:.0f}"}

    def processes(self) -> Iterator[int]:
        return iter(())

    def close(self) -> None:
        pass


class Network:
    """A network of `hosts` hosts, one rank each, for as long as the `with` block runs.

    Three ways to make it, tried in this order by `mode="auto"`:

    - "root": network namespaces, links limited by the kernel. Needs root.
    - "user": the same within an unprivileged user namespace. Needs a kernel that permits these.
    - "paced": no namespaces. The ranks share the loopback interface and pace their own sockets. An approximation:
      each connection has a fixed share of `rate` (a ring, which uses one, is up to N - 1 times too slow), the
      kernel makes up for late timers (on a busy machine up to a third too fast), and receiving is not limited.

    Leaving the block kills every process still running on the hosts and removes the network; so do Ctrl-C,
    SIGTERM and the end of the interpreter, during set-up too.

    Args:
        hosts: how many, from 1 to 1000.
        rate: of each link in each direction, in `tc`'s notation ("100mbit"), or None for no limit.
        mode: which way, or "auto".
        port: rank 0's port for the rendezvous; None takes a free one.

    Attributes:
        hosts: as given.
        rate: as given.
        mode: the way in use ("root", "user" or "paced") inside the block; "auto" may stand here before it.
        description: one sentence for a report: what the network is and why not a better one.

    Raises:
        ValueError: for an argument that makes no sense.
        NetworkError: on entering, if the network cannot be made here; nothing is left behind.

    Example::

        with Network(2, "100mbit") as network:
            command = network.command(0, [sys.executable, "worker.py"])
            subprocess.run(command, env=os.environ | network.environment(0))
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = "100mbit",
        *,
        mode: Literal["auto", "root", "user", "paced"] = "auto",
        port: int | None = None,
    ):
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must lie between 1 and {_MAX_HOSTS}, not {hosts}")
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port must lie between 1 and 65535, not {port}")
        self.hosts = hosts
        self.rate = rate
        self.mode: Literal["auto", "root", "user", "paced"] = mode
        self.description = "a network not yet made"
        self._requested: Literal["auto", "root", "user", "paced"] = mode
        self._rate_bits_per_s = None if rate is None else parse_rate(rate)
        self._port = port
        self._made: _Hosts | None = None
        self._tag = ""
        self._creator = 0
        self._restore_sigterm = False

    def __enter__(self) -> Network:
        if self._made is not None:
            raise NetworkError("this network is already in use: make another Network")
        clean()
        self._creator = os.getpid()
        self._tag = f"{_identity(self._creator)}:{next(_serial)}"
        self._sigterm_as_exit()
        try:
            self._made = self._make()
            atexit.register(self._close)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        atexit.unregister(self._close)

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on a rank's host."""
        return self._host(rank).command(rank, argv)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables to set for a rank's command, on top of the usual ones.

        They tell `torch.distributed` where to meet (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK),
        Gloo which interface to use, and `WireMeter` where to count.
        """
        return {**self._host(rank).environment(rank), _TAG: self._tag}

    def _host(self, rank: int) -> _Hosts:
        if self._made is None:
            raise NetworkError('the network does not exist yet: use it inside "with Network(...) as network:"')
        if not 0 <= rank < self.hosts:
            raise ValueError(f"rank must lie between 0 and {self.hosts - 1}, not {rank}")
        return self._made

    def _make(self) -> _Hosts:
        reasons: list[str] = []
        asked = self._requested
        modes: tuple[Mode, ...] = ("root", "user", "paced") if asked == "auto" else (asked,)
        for mode in modes:
            try:
                made = self._make_as(mode)
            except NetworkError as error:
                if mode == modes[-1]:
                    raise
                reasons.append(f"not {mode}: {error}")
                continue
            self.mode = mode
            self.description = _describe(mode, self.hosts, self.rate, reasons)
            return made
        raise AssertionError("the last mode returns or raises")

    def _make_as(self, mode: Mode) -> _Hosts:
        if mode == "paced":
            return _Loopback(self.hosts, self._rate_bits_per_s, _loopback_port(self._port))
        _check_tools(mode)
        port = self._port or _DEFAULT_PORT  # nobody else lives in a new namespace: every port is free
        return _Namespaces(self.hosts, self._rate_bits_per_s, port, self._tag, rootless=mode == "user")

    def _close(self) -> None:
        if self._creator != os.getpid():  # a forked child must not tear down its parent's network
            return
        try:
            with _undisturbed():
                if self._made is not None:
                    self._made.close()
                _kill(lambda: (pid for pid, tag in _tagged_processes() if tag == self._tag))
                self._made = None
        finally:
            if self._restore_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._restore_sigterm = False

    def _sigterm_as_exit(self) -> None:
        """Let SIGTERM unwind the stack, so that `__exit__` runs, unless the program handles it already."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit_on_signal)
            self._restore_sigterm = True


def clean() -> list[str]:
    """Kill what networks of dead creators have left behind and return a line about each.

    A creator is known by its process number and start time, so a recycled number does no harm. Networks in
    use are left alone, and so are those of other users and of other containers.
    """
    leftovers: dict[str, list[int]] = {}
    here = _process_namespace()
    for pid, tag in _tagged_processes():
        identity, _, _ = tag.rpartition(":")
        creator, _, rest = identity.partition(":")
        _, _, namespace = rest.partition(":")
        if namespace == here and creator.isdigit() and _identity(int(creator)) != identity:
            leftovers.setdefault(tag, []).append(pid)
    for tag, pids in leftovers.items():
        _kill(lambda pids=pids, tag=tag: (pid for pid in pids if _tag_of(pid) == tag))
    return [
        f"network of process {tag.partition(':')[0]}, which is gone: killed {len(pids)} process(es)"
        for tag, pids in leftovers.items()
    ]


def _describe(mode: Mode, hosts: int, rate: str | None, reasons: Sequence[str]) -> str:
    limit = "unlimited links" if rate is None else f"links limited to {rate} in each direction by tbf"
    plural = "" if hosts == 1 else "s"
    if mode == "paced":
        limit = "unlimited sockets" if rate is None else f"sockets paced to {rate} a rank"
        text = f"an approximation, not a network: {hosts} rank{plural} on the loopback interface, {limit}"
    else:
        how = "as root" if mode == "root" else "in an unprivileged user namespace"
        text = f"{hosts} host{plural} as network namespaces made {how}, joined by a bridge, {limit}, MTU {_MTU}"
    return text + (f" ({'; '.join(reasons)})" if reasons else "")


def _check_tools(mode: Mode) -> None:
    if not sys.platform.startswith("linux"):
        raise NetworkError(f"network namespaces exist on Linux only, not on {sys.platform}")
    if mode == "root" and os.geteuid() != 0:
        raise NetworkError("only root may, and this process is not root")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{', '.join(missing)} not found: install iproute2 and util-linux")


def _loopback_port(port: int | None) -> int:
    if port is None:
        return free_port()
    with socket.socket() as probe:
        # as the rendezvous does: connections that linger after a closed listener do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise NetworkError(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}") from None
    return port


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Put off SIGINT and SIGTERM until the block is done: a half torn down network helps nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    old = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def _all_processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _process_namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return "0"


def _identity(pid: int) -> str:
    """Return "process number:start time:process namespace"; start time 0 if it is gone."""
    start = "0"
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":  # a zombie has ended, whoever has yet to notice
            start = fields[19]
    return f"{pid}:{start}:{_process_namespace()}"


def _tag_of(pid: int) -> str | None:
    """Return the network a process belongs to, by the environment it was started with."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)%s=([^\0]*)" % _TAG.encode(), environment)
    return found[1].decode(errors="replace") if found else None


def _tagged_processes() -> Iterator[tuple[int, str]]:
    for pid in _all_processes():
        tag = _tag_of(pid) if pid != os.getpid() else None
        if tag:
            yield pid, tag


def _kill(find: Callable[[], Iterable[int]]) -> None:
    """Kill what `find` finds until it finds nothing: a process may start another while it is being killed."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        pids = list(find())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
