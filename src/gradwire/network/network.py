"""`Network`: what users of an emulated network hold."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal

from gradwire.core.errors import NetworkError
from gradwire.core.rates import format_rate, parse_rate
from gradwire.network.delay_process import LineUse
from gradwire.network.hosts import Hosts, Loopback, Namespaces
from gradwire.network.links import MTU, Links, Uplinks
from gradwire.network.loopback import free_port
from gradwire.network.processes import (
    ENDING,
    TAG,
    clean,
    exit_on_signal,
    identity_of,
    kill,
    tagged_processes,
    undisturbed,
)
from gradwire.network.units import parse_delay, parse_loss
from gradwire.topology.processors import cores, share

Mode = Literal["root", "user", "paced"]

_MODES = ("auto", "root", "user", "paced")
_TOOLS = ("ip", "tc", "unshare", "nsenter", "taskset", "sh")
_DEFAULT_PORT = 29500
_MAX_HOSTS = 1000  # a bridge has 1023 ports

_serial = itertools.count()


class Network:
    """A network of `hosts` hosts, one rank or several on each, for as long as the `with` block runs.

    Three ways to make it, tried in this order by `mode="auto"`:

    - "root": network namespaces, links limited by the kernel. Needs root.
    - "user": the same within an unprivileged user namespace. Needs a kernel that permits these.
    - "paced": no namespaces. The ranks share the loopback interface and pace their own sockets. An approximation:
      each connection has a fixed share of `rate` (a ring, which uses one, is up to N - 1 times too slow), the
      kernel makes up for late timers (on a busy machine up to a third too fast), and receiving is not limited.

    Leaving the block kills every process still running on the hosts and removes the network; so do Ctrl-C,
    SIGTERM, SIGHUP (a terminal that is closed) and the end of the interpreter, during set-up too.

    Args:
        hosts: how many, from 1 to 1000.
        rate: of each link in each direction, in `tc`'s notation ("100mbit"), or None for no limit; or one for each
            host, in a sequence.
        mode: which way, or "auto".
        port: rank 0's port for the rendezvous; None takes a free one.
        delay: what a round trip between any two hosts takes, as `ping` shows it ("50ms"); half of it each way.
        loss: share of the frames that get lost between two hosts ("0.1%"), in each direction, at random but alike
            in every network.
        ranks_per_host: how many ranks each host has. They are numbered host by host, and reach each other over the
            loopback interface of their host, which has no limit.
        uplinks: groups of hosts, and groups of these, the smallest first, each of which reaches the others by a link of
            its own; `UplinkMeter` counts what crosses it. Delay and loss are then between the largest groups only.

    Delay, loss, uplinks and several ranks on a host need namespaces, so "auto" does not fall back on paced sockets.
    In the first two ways each host has cores of its own, if this process may run on as many as there are hosts, and on
    one more for delay and loss.
    Delay and loss are the work of a process, which takes some processor time (`line_use`).

    Attributes:
        hosts: as given.
        ranks: on all hosts.
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

    Two sites of two nodes of two hosts, 50 Mbit/s between sites::

        Network(8, "1gbit", uplinks=[Uplinks((2, 2, 2, 2), "200mbit"), Uplinks((4, 4), "50mbit")])
    """

    def __init__(
        self,
        hosts: int,
        rate: str | Sequence[str] | None = "100mbit",
        *,
        mode: Literal["auto", "root", "user", "paced"] = "auto",
        port: int | None = None,
        delay: str = "0",
        loss: str = "0",
        ranks_per_host: int = 1,
        uplinks: Sequence[Uplinks] = (),
    ):
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must lie between 1 and {_MAX_HOSTS}, not {hosts}")
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, not {mode!r}")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port must lie between 1 and 65535, not {port}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, not {ranks_per_host}")
        self.hosts = hosts
        self.ranks = hosts * ranks_per_host
        self.rate = rate
        self.mode: Literal["auto", "root", "user", "paced"] = mode
        self.description = "a network not yet made"
        self._requested: Literal["auto", "root", "user", "paced"] = mode
        self._links = Links(_rates(hosts, rate), parse_delay(delay), parse_loss(loss), uplinks)
        if mode == "paced" and self._links.by_line:
            raise ValueError(
                "paced sockets have neither delay nor loss: these need a network of mode auto, root or user"
            )
        if mode == "paced" and ranks_per_host > 1:
            raise ValueError(
                "paced sockets slow all ranks down: several ranks on a host need a network of mode auto, root or user"
            )
        if mode == "paced" and uplinks:
            raise ValueError("paced sockets have no uplinks: these need a network of mode auto, root or user")
        self._ranks_per_host = ranks_per_host
        self._port = port
        self._made: Hosts | None = None
        self._lifted = False
        self._tag = ""
        self._creator = 0
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> Network:
        if self._made is not None:
            raise NetworkError("this network is already in use: make another Network")
        clean()
        self._creator = os.getpid()
        self._tag = f"{identity_of(self._creator)}:{next(_serial)}"
        self._signals_as_exit()
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
        Gloo which interface to use, and `WireMeter` where to count. LOCAL_RANK is the rank's place on its host.
        """
        return {**self._host(rank).environment(rank), TAG: self._tag}

    def line_use(self) -> LineUse | None:
        """Return what the delay line has used so far; None where the network has none.

        Raises:
            NetworkError: the network does not exist, or its delay line has failed.
        """
        return self._host(0).line_use()

    def lift(self) -> None:
        """Take rate, delay and loss off the links until `limit`, for what is not measured.

        Ranks on paced sockets do it themselves, by `WireMeter.lift`.
        """
        self._host(0).limit(self._links.lifted())
        self._lifted = True

    def change_rate(self, rate: str | Sequence[str] | None) -> None:
        """Give the hosts' links other rates while they are in use, as a line that others begin to share.

        Args:
            rate: as of `Network`.

        Raises:
            ValueError: a rate that cannot be read, or another number of rates than there are hosts.
            NetworkError: the network does not exist, or is one of paced sockets, whose ranks read their pace once.
        """
        links = replace(self._links, rates_bits_per_s=_rates(self.hosts, rate))
        host = self._host(0)
        if self.mode == "paced":
            raise NetworkError("paced sockets keep their rate: another one needs a network of mode root or user")
        host.limit(links)
        self._links, self.rate, self._lifted = links, rate, False

    def limit(self) -> None:
        """Have the links as they were before `lift`; nothing to do where they are."""
        if self._lifted:
            self._host(0).limit(self._links)
            self._lifted = False

    def _host(self, rank: int) -> Hosts:
        if self._made is None:
            raise NetworkError('the network does not exist yet: use it inside "with Network(...) as network:"')
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must lie between 0 and {self.ranks - 1}, not {rank}")
        return self._made

    def _make(self) -> Hosts:
        reasons: list[str] = []
        asked = self._requested
        needs_hosts = self._links.by_line or self._ranks_per_host > 1 or bool(self._links.uplinks)
        emulated: tuple[Mode, ...] = ("root", "user") if needs_hosts else ("root", "user", "paced")
        modes: tuple[Mode, ...] = emulated if asked == "auto" else (asked,)
        for mode in modes:
            try:
                made = self._make_as(mode)
            except NetworkError as error:
                if mode == modes[-1]:
                    raise
                reasons.append(f"not {mode}: {error}")
                continue
            self.mode = mode
            self.description = _describe(mode, self._links, self._ranks_per_host, reasons)
            return made
        raise AssertionError("the last mode returns or raises")

    def _make_as(self, mode: Mode) -> Hosts:
        if mode == "paced":
            return Loopback(self._links, _loopback_port(self._port))
        _check_tools(mode)
        port = self._port or _DEFAULT_PORT  # nobody else lives in a new namespace: every port is free
        return Namespaces(self._links, port, self._tag, ranks_per_host=self._ranks_per_host, rootless=mode == "user")

    def _close(self) -> None:
        if self._creator != os.getpid():  # a forked child must not tear down its parent's network
            return
        try:
            with undisturbed():
                if self._made is not None:
                    self._made.close()
                kill(lambda: (pid for pid, tag in tagged_processes() if tag == self._tag))
                self._made = None
        finally:
            while self._handled:
                signal.signal(self._handled.pop(), signal.SIG_DFL)

    def _signals_as_exit(self) -> None:
        """Let signals unwind the stack, so that `__exit__` runs, unless the program handles or ignores them already."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, exit_on_signal)
                self._handled.append(number)


def _rates(hosts: int, rate: str | Sequence[str] | None) -> list[float | None]:
    """The rate of each host's link."""
    if rate is None:
        return [None] * hosts
    if isinstance(rate, str):
        return [parse_rate(rate)] * hosts
    if len(rate) != hosts:
        raise ValueError(f"give one rate for each host: there are {len(rate)} rates for {hosts} hosts")
    return [parse_rate(one) for one in rate]


def _describe(mode: Mode, links: Links, ranks_per_host: int, reasons: Sequence[str]) -> str:
    hosts = len(links.rates_bits_per_s)
    plural = "" if hosts == 1 else "s"
    if mode == "paced":
        limit = _limit(links, "unlimited sockets", "sockets paced to {} a rank")
        text = f"an approximation, not a network: {hosts} rank{plural} on the loopback interface, {limit}"
    else:
        how = "as root" if mode == "root" else "in an unprivileged user namespace"
        limit = _limit(links, "unlimited links", "links limited to {} in each direction by tbf")
        switch = _line(links) if links.by_line else "a bridge"
        ranks = f" of {ranks_per_host} ranks" if ranks_per_host > 1 else ""
        each = share(cores(), hosts, spared=links.by_line)
        own = f", with {each} core{'s' * (each > 1)} each" if each else ""
        groups = "".join(f", {each.summary}" for each in links.uplinks)
        text = (
            f"{hosts} host{plural}{ranks} as network namespaces made {how}{own}, joined by {switch}, {limit}{groups}, "
            f"MTU {MTU}"
        )
    return text + (f" ({'; '.join(reasons)})" if reasons else "")


def _line(links: Links) -> str:
    does = [f"a round trip of {1e3 * links.delay_s:g} ms"] if links.delay_s else []
    does += [f"{100 * links.loss:g} % of frames lost in each direction"] if links.loss else []
    return f"a delay line in user space ({', '.join(does)})"


def _limit(links: Links, unlimited: str, limited: str) -> str:
    """How fast links are, by the sentence for those with a rate."""
    shown = [format_rate(rate) for rate in links.rates_bits_per_s if rate is not None]
    return limited.format(", ".join(shown if len(set(shown)) > 1 else shown[:1])) if shown else unlimited


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
