"""An optimizer whose steps are pushed to servers, for a training script of ranks that do not wait for each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.lengths import Fixed, Length
from gradwire.asynchronous.own_part import OwnPart
from gradwire.asynchronous.pace import Free, Pace
from gradwire.asynchronous.remote_servers import GrantedValues, RemoteServers
from gradwire.asynchronous.rules import ASGD, ServerRule
from gradwire.asynchronous.several.messages import ServerReply
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.worker import PartedWorker
from gradwire.asynchronous.standing_still import RunWithoutSession, StandingStill
from gradwire.asynchronous.tcp import own_address
from gradwire.asynchronous.together import together
from gradwire.asynchronous.unwaiting import UnwaitingOptimizer
from gradwire.asynchronous.work import Work
from gradwire.core.errors import CommunicationError, StateError
from gradwire.core.flat_layout import FlatLayout
from gradwire.core.version import VERSION
from gradwire.peers import greeting
from gradwire.peers.sockets import SILENT_S, SocketConnections, SocketServer
from gradwire.sending import Sending
from gradwire.session.names import named, require_whole
from gradwire.sync.alike import require_same_start
from gradwire.sync.swap import swapped, write_

_ENDLESS = 1 << 62
"""Pushes: ranks train for as long as their script does."""


class AsynchronousWhere(TypedDict, total=False):
    """What every method may be told beside its spec, see `AsynchronousOptimizer`."""

    group: dist.ProcessGroup | None
    seed: int
    deadline_s: float
    address: str | None


class AsynchronousOptimizer(UnwaitingOptimizer):
    """Steps an inner optimizer, and pushes what the step changed to servers that add it to everybody's parameters.

        loop: inner step from w_pulled to w_after; push w_pulled - w_after; go on from what the servers have now

    Every rank of the process group is a worker, and a server of an even part of the parameters beside. So a rank sends
    as much as in a ring all-reduce: (n - 1) / n of the parameters as pushes, and as much to the workers that pull its
    part. Ranks step as often as each can. What they push is scaled by the rule: `ASGD(1 / n)`, the default, makes n
    pushes move as far as one synchronous step of the mean.

    Buffers, such as running statistics, are not pushed: each rank has its own. A rank that ends takes its part with it,
    and all others raise; `gradwire.asynchronous.processes` and Ray are for workers that come and go.

    `gradwire.save` and `gradwire.load` keep what the servers have, what ranks owe them, and inner optimizers' states;
    buffers are kept by your own checkpoint. Ranks call them when they get there, and meet (`standing_still`).

    Args:
        inner: the optimizer of this rank. From now on only this one steps it.
        model: alike on all ranks, and not wrapped in `DistributedDataParallel`.
        rule: what becomes of a push, alike on all ranks.
        pace: who may start when; free by default.
        length: local steps between pushes; 1 by default.
        sending: how pushes travel. Parameters travel as they are.
        group: the ranks; the default group by default.
        seed: of what codecs draw at random.
        deadline_s: seconds to wait for an answer. Under a bound it may be as long as the slowest worker's step.
        address: of this machine, as the others reach it; by default the one by which it reaches MASTER_ADDR.

    Attributes:
        version: updates that had been made when this rank was last told, by the server that had made the most.

    Raises:
        AttachError: ranks that begin with different models or settings, or a parameter of the optimizer that the model
            has not.
        CommunicationError: a rank that does not come or cannot be reached.

    Example:
        optimizer = AsynchronousOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, pace=Bounded(4))
        while optimizer.version < pushes:
            ...; optimizer.step()
        optimizer.finish()
        optimizer.close()
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        rule: ServerRule | None = None,
        *,
        pace: Pace | None = None,
        length: Length | None = None,
        sending: Sending | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        deadline_s: float = 600.0,
        address: str | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        require_whole(model, "AsynchronousOptimizer")
        super().__init__(inner, model)
        self._parameters = named(model)
        self._names = FlatLayout(self._parameters)
        self._together = together("AsynchronousOptimizer", group, deadline_s)
        job = Job(
            self._names.named(self._flat()),
            rule or ASGD(1 / self.world_size),
            _computes_itself,
            workers=self.world_size,
            pushes=_ENDLESS,
            pace=pace or Free(),
            length=length or Fixed(),
            sending=sending or Sending(),
            seed=seed,
            patience_s=deadline_s,
            silent_s=min(SILENT_S, deadline_s),
        )
        settings = f"{job.rule!r}, {job.pace!r}, {job.length!r}, {job.sending!r}, seed {seed}"
        require_same_start(f"{settings}, gradwire {VERSION}", self._parameters, self._together)
        self._host, self._servers, self._part = self._connected(job, address)
        parts = [pusher.names for pusher in self._servers.worker.pushers]
        job.sending.warm_up(torch.empty(part.numel, dtype=part.dtype) for part in parts)
        self._described = f"{type(inner).__name__} pushed by {settings}"
        self._settings = {name: repr(getattr(job, name)) for name in ("rule", "pace", "length", "sending", "seed")}
        self._run = RunWithoutSession.of(model, self._described, seed)
        granted = self._servers.join()
        self._together.gather("has joined")  # whoever joined later would begin with what the others have pushed by then
        self._pull(granted)

    def _connected(self, job: Job, address: str | None) -> _Ends:
        """This rank's server, and its side of the servers of all ranks."""
        secret = bytes.fromhex(self._together.gather(secrets.token_hex(greeting.SECRET_BYTES))[0])
        served = PartServer(job, self.rank, self.world_size)
        host = SocketServer(served, (address or _own_address(), 0), secret, silent_s=job.silent_s)
        host.start()
        try:
            found = self._together.gather(list(host.address))
            addresses = [(str(name), int(port)) for name, port in found]
            worker = PartedWorker(
                self.rank, None, job.parameters, servers=self.world_size, sending=job.sending, seed=job.seed
            )
            connections = SocketConnections(
                ServerReply,
                [host if rank == self.rank else there for rank, there in enumerate(addresses)],
                secret,
                self.rank,
                most_bytes=2 * self._names.nbytes + (1 << 16),
                connect_s=min(10.0, self.deadline_s),
                silent_s=job.silent_s,
            )
        except BaseException:
            host.close()
            raise
        servers = RemoteServers(worker, connections, self.deadline_s)
        return _Ends(host, servers, OwnPart(host, served.server, servers, self.deadline_s))

    # Steps -------------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Push, if enough local steps were made."""
        self._since += 1
        if self._since >= self._granted.steps:
            self._push()

    def _push(self) -> None:
        """Push the local steps made so far, as long as all that were granted would have taken."""
        begun = time.perf_counter()
        spent_s = (begun - self._began_s) * self._granted.steps / self._since
        self._pull(self._servers.push(self._granted.values - self._flat(), 0.0, spent_s))
        self._waited_s += time.perf_counter() - begun

    def _pull(self, granted: GrantedValues) -> None:
        self._granted, self._since = granted, 0
        write_(self._parameters, self._names.named(granted.values))
        self._began_s = time.perf_counter()

    def _flat(self) -> Tensor:
        return self._names.flat(self._parameters).cpu()

    @property
    @override
    def version(self) -> int:
        return self._granted.version

    @property
    @override
    def sent_bytes(self) -> int:
        return sum(self._servers.connections.sent_bytes) + self._host.sent_bytes

    @property
    @override
    def coded_s(self) -> float:
        return self._servers.coded_s

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is what the servers have now; afterwards this rank's own parameters are back."""
        self._require_open()
        return swapped(self._parameters, self._names.named(self._servers.read()))

    def described(self) -> str:
        """What this is, in a line."""
        return self._described

    # Saving ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def standing_still(self, call: str) -> Generator[StandingStill]:
        """In a `with` block all ranks have met, and nothing is under way; then all go on from the same parameters.

        `gradwire.save` and `gradwire.load` call it. Local steps since the last push are pushed first. Nobody waits for
        a rank that is here, so none waits for ever, and all get here: if ranks go by `version`, another rank's next
        push brings it to the version that this one has seen. Under a bound a rank may get one push further ahead.

        Raises:
            StateError: it has finished.
            CommunicationError: a rank that has ended or does not come. Only `close` is of use then.
        """
        self._require_standing(call)
        if self._since:
            self._push()
        self._servers.pause()
        version = self._part.wait_for_all(call)
        ranks = self._together.during(call, StateError)
        steps = max(ranks.gather(version))
        try:
            yield StandingStill(self.inner, self._run, ranks, steps, "pushed to servers", self._settings, self._part)
        except CommunicationError:
            raise  # a rank is missing, for which the others would wait
        except Exception:
            self._go_on()
            raise
        self._go_on()

    def _go_on(self) -> None:
        self._share()
        granted = self._servers.resume()
        self._together.gather("goes on")  # nobody pushes before all have the parameters
        self._pull(granted)

    # The end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """End training on all ranks, each of which calls this: afterwards they have the same model, and step no more.

        A rank that is here is waited for by nobody; it waits for the others. What it computed since its last push is
        lost. Connections stay until `close`.

        Raises:
            CommunicationError: a rank that does not come or has ended.
        """
        self._require_open()
        self.require_planned()
        self._servers.leave()
        self._together.gather("has pushed")
        write_(self._parameters, self._names.named(self._servers.read()))
        self._together.gather("has the model")
        self._steps = False

    def close(self) -> None:
        """Let go of the servers; other ranks that still train raise. A second call does nothing."""
        self._steps = False
        if self._run.is_open:
            self._run.is_open = False
            self._host.close()  # first: a rank that hears that this worker has ended must find its server lost
            self._servers.close()


class _Ends(NamedTuple):
    """Of a rank's connections."""

    host: SocketServer
    servers: RemoteServers
    part: OwnPart


def _computes_itself(worker: int) -> Work:
    raise AssertionError("the script computes")


def _own_address() -> str:
    """The address of this machine by which it would reach the master.

    Raises:
        CommunicationError: no MASTER_ADDR, or no way there.
    """
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        raise CommunicationError("MASTER_ADDR is not set: pass address=, the one of this machine that others reach")
    try:
        return own_address(master)
    except OSError as error:
        raise CommunicationError(
            f"MASTER_ADDR={master} cannot be reached from here ({error}): pass address="
        ) from error
