"""Two ways to make hosts: network namespaces, and ranks that share the loopback interface."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol

from gradwire.core.errors import NetworkError
from gradwire.network.delay_process import DelayProcess, LineUse
from gradwire.network.links import QUIET, Links, address, host_limits, host_script, switch_limits, switch_script
from gradwire.network.loopback import loopback_environments
from gradwire.network.processes import TAG, all_processes, kill
from gradwire.topology.processors import divide, own_cores

_TOOL_TIMEOUT_S = 20.0


class Hosts(Protocol):
    """What `Network` asks of each way to make hosts."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a rank's host."""
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of a rank's command."""
        ...

    def line_use(self) -> LineUse | None:
        """What the delay line has used so far; None where there is none."""
        ...

    def limit(self, links: Links) -> None:
        """Have the links as these are from now on, in what slows them."""
        ...

    def close(self) -> None:
        """End everything that runs on the hosts, and the hosts."""
        ...


class Namespaces:
    """Hosts as network namespaces, made as root or in a user namespace of one's own.

    Where there are enough cores each host has its own, as machines have. Otherwise the threads of two hosts, which send
    and compute at once, take cores from each other: two ranks on two cores took 133 ms a step under int4, and 102 with
    a core each. A delay line wants one more: on two cores that two hosts had, a round trip of 10 ms took 10.6.
    """

    def __init__(self, links: Links, port: int, tag: str, *, ranks_per_host: int, rootless: bool) -> None:
        self._hosts = len(links.rates_bits_per_s)
        self._groups = [len(each.sizes) for each in links.uplinks]
        self._ranks_per_host = ranks_per_host
        self._cores = divide(own_cores(), self._hosts, spared=links.by_line)
        self._port = port
        self._tag = tag
        self._rootless = rootless
        self._holders: list[subprocess.Popen[bytes]] = []  # the switch, then the hosts
        self._inodes: set[int] = set()
        self._line: DelayProcess | None = None
        try:
            for _ in range(self._hosts + 1):
                self._hold()
            self._join(links)
            if links.by_line:
                self._line = DelayProcess(links, self._enter(0), {TAG: tag})
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
            env={**os.environ, TAG: self._tag},
            start_new_session=True,  # a Ctrl-C in the terminal is the creator's to handle
        )
        self._holders.append(holder)
        said = _first_line(holder)
        if said != "ready":
            raise NetworkError(f"cannot make a network namespace: {said or 'its holder did not start'}")
        self._inodes.add(os.stat(f"/proc/{holder.pid}/ns/net").st_ino)

    def _join(self, links: Links) -> None:
        hosts = [str(holder.pid) for holder in self._holders[1:]]
        self._script(0, [*QUIET, *switch_script(hosts, links)])
        for host in range(self._hosts):
            self._script(host + 1, [*QUIET, *host_script(host, links)])

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
        """The command line that runs `argv` on a rank's host."""
        host = rank // self._ranks_per_host
        return [*self._enter(host + 1), "--", "taskset", "-c", ",".join(map(str, self._cores[host])), *argv]

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of a rank's command: its interface and where to meet."""
        each = self._ranks_per_host
        environment = loopback_environments(self._hosts * each, self._port)[rank]
        counted = "interface:eth0" if each == 1 else f"interface:eth0:{each}"
        wire = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_WIRE": counted}
        if self._groups:
            wire["GRADWIRE_UPLINKS"] = f"{self._holders[0].pid}:{':'.join(map(str, self._groups))}"
        return environment | wire | {"LOCAL_RANK": str(rank % each)}

    def line_use(self) -> LineUse | None:
        """What the delay line has used so far; None where there is none."""
        return self._line.use() if self._line else None

    def limit(self, links: Links) -> None:
        """Change the links' limits while they are in use."""
        self._script(0, switch_limits(links))
        for host in range(self._hosts):
            self._script(host + 1, host_limits(host, links))
        if self._line is not None:
            self._line.limit(links)

    def _processes(self) -> Iterator[int]:
        holders = {holder.pid for holder in self._holders}
        for pid in all_processes():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino in self._inodes and pid not in holders:
                    yield pid

    def close(self) -> None:
        """Kill what runs on the hosts, then their holders."""
        kill(self._processes)
        if self._line is not None:
            self._line.close()
            self._line = None
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                if pipe is not None:
                    pipe.close()
        self._holders.clear()
        self._inodes.clear()


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _TOOL_TIMEOUT_S)
    return process.stdout.readline().decode(errors="replace").strip() if ready else ""


class Loopback:
    """All ranks on 127.0.0.1; each slows down its own sockets (`WireMeter.pace`)."""

    def __init__(self, links: Links, port: int) -> None:
        self._links = links
        self._port = port

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command as it is."""
        return list(argv)

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of a rank's command: its pace and where to meet."""
        rates = self._links.rates_bits_per_s
        rate = rates[rank]
        bytes_per_s = float("inf") if rate is None else rate / 8
        environment = loopback_environments(len(rates), self._port)[rank]
        return environment | {"GRADWIRE_WIRE": f"sockets:{bytes_per_s:.0f}"}

    def line_use(self) -> None:
        """There is no delay line."""

    def limit(self, links: Links) -> None:
        """Ranks pace themselves, and lift that themselves."""

    def close(self) -> None:
        """Nothing was made that has to go."""
