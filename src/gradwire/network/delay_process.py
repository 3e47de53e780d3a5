"""The process of a delay line, as its creator sees it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.core.errors import NetworkError
from gradwire.network.links import Links

SCRIPT = Path(__file__).with_name("delay_line.py")
_ANSWER_S = 20.0


class LineUse(NamedTuple):
    """What a delay line has used since it started.

    Attributes:
        cpu_s: processor time of its process.
        missed: frames that came while it could take no more; a network without a delay line would have kept them.
    """

    cpu_s: float
    missed: int


class DelayProcess:
    """A delay line that runs until `close`, or until its creator has ended.

    Args:
        links: what it is to do.
        enter: the words that make a command run in the switch's namespace.
        environment: variables on top of this process's own.

    Raises:
        NetworkError: it does not start; the message has what it said last.
    """

    def __init__(self, links: Links, enter: Sequence[str], environment: Mapping[str, str]) -> None:
        ports = ",".join(f"{name}:{hosts}" for name, hosts in links.ports)
        settings = (ports, links.delay_s / 2, links.loss, links.queue_s)
        # -I -S: it needs nothing but the standard library, and importing the package would import PyTorch
        self._process = subprocess.Popen(
            [*enter, "--", sys.executable, "-I", "-S", str(SCRIPT), *map(str, settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # a question leaves at once, and nothing is left over to be written when it ends
            env={**os.environ, **environment},
            start_new_session=True,  # a Ctrl-C in the terminal is the creator's to handle
        )
        said = self._line()
        if said != "ready":
            rest = self._last_words()
            self.close()
            raise NetworkError(f"the delay line does not start: {rest or said or 'it said nothing'}")

    def use(self) -> LineUse:
        """Ask what it has used so far.

        Raises:
            NetworkError: it has ended, or does not answer.
        """
        return self._ask("")

    def limit(self, links: Links) -> None:
        """Have it hold and lose frames as these links do, from now on.

        Raises:
            NetworkError: it has ended, or does not answer.
        """
        self._ask(f"{links.delay_s / 2} {links.loss}")

    def _ask(self, question: str) -> LineUse:
        """Write it a line, and read what it has used."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n".encode())
            cpu_s, missed = self._line().split()
            return LineUse(float(cpu_s), int(missed))
        except (OSError, ValueError) as error:
            raise NetworkError(f"the delay line, process {self._process.pid}, has failed: {error}") from error

    def _line(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        return self._process.stdout.readline().decode(errors="replace").strip() if ready else ""

    def _last_words(self) -> str:
        """The last line that it writes before it ends: what went wrong."""
        try:
            said, _ = self._process.communicate(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return ""
        return (said.decode(errors="replace").strip().splitlines() or [""])[-1]

    def close(self) -> None:
        """End the process, and wait for it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
