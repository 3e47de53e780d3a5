"""What each rank does in the tests of another method in mid-run."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.core.state import walk
from session_cases import digest, loss_of, model

GRAIN = 500


def owed(session: gradwire.Session) -> float:
    """What this rank owes in all, in units of the sum over ranks."""
    leaves = [leaf for _, state in session.engine.states() for _, leaf in walk(state) if leaf.owed]
    n = session.transport.world_size
    return sum(float(leaf.tensor.double().sum()) * (n if leaf.kind == "owned" else 1) for leaf in leaves)


def total(values: float) -> float:
    both = torch.tensor([values], dtype=torch.float64)
    dist.all_reduce(both)
    return float(both)


class Training:
    """A model that is trained by `attach` or by a session, and sums of what was given to it and what it got."""

    def __init__(self, spec: str, rank: int, by_attach: bool) -> None:
        self.rank, self.network, self.step = rank, model(), 0
        self.ddp = DDP(self.network, bucket_cap_mb=0.0005) if by_attach else None
        self.handle = gradwire.attach(self.ddp, spec, grain_numel=GRAIN, deadline_s=30) if self.ddp else None
        self.session = (
            self.handle.session
            if self.handle
            else gradwire.Session(self.network, spec, grain_numel=GRAIN, deadline_s=30)
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.1)
        self.given = self.delivered = 0.0

    def run(self, steps: int) -> None:
        parameters = list(self.network.parameters())
        for _ in range(steps):
            local = torch.autograd.grad(loss_of(self.network, self.step, self.rank), parameters)
            self.given += sum(float(gradient.double().sum()) for gradient in local)
            self.optimizer.zero_grad()
            loss_of(self.ddp or self.network, self.step, self.rank).backward()
            if self.ddp is None:
                self.session.reduce_(self.network)
            self.delivered += sum(float(gradient_of(p).double().sum()) for p in parameters)
            self.optimizer.step()
            self.step += 1

    def change(self, spec: str) -> None:
        (self.handle or self.session).change(spec)

    def account(self) -> list[float]:
        """Sums over ranks: given, and delivered or owed."""
        return [total(self.given), total(self.delivered) + total(owed(self.session))]


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def changed(rank: int, world_size: int, pairs: list[list[str]]) -> dict[str, Any]:
    """Three steps by one method, three by another: what became of all gradients, and where it ended."""
    found: dict[str, Any] = {}
    for first, second in pairs:
        for by_attach in (False, True):
            training = Training(first, rank, by_attach)
            training.run(3)
            before = training.account()
            training.change(second)
            carried = training.account()
            training.run(3)
            session = training.session
            found[f"{first} {second} {by_attach}"] = {
                "accounts": [before, carried, training.account()],
                "digest": digest(training.network),
                "method": session.method,
                "steps": [session.engine.index, session.stats().steps],
                "repr": repr(session),
            }
            session.close()
    return found


def resumed(rank: int, world_size: int, folder: str, pairs: list[list[str]]) -> dict[str, list[str]]:
    """A change and four steps: without a break, saved at once and taken up, and saved two steps later."""
    found: dict[str, list[str]] = {}
    for number, (first, second) in enumerate(pairs):
        for saved_after in (None, 0, 2):
            training = Training(first, rank, by_attach=False)
            training.run(3)
            training.change(second)
            training.run(saved_after or 0)
            if saved_after is not None:
                where = Path(folder) / f"{number}-{saved_after}"
                gradwire.save(where, training.session)
                training.session.close()
                training.session = gradwire.Session(training.network, second, grain_numel=GRAIN)
                assert gradwire.load(where, training.session) == 3 + saved_after
            training.run(4 - (saved_after or 0))
            found.setdefault(f"{first} {second}", []).append(digest(training.network))
            training.session.close()
    return found


class Refusals:
    """What ranks are told of changes that fail, and whether the old method went on."""

    def __init__(self, rank: int) -> None:
        self.rank, self.told = rank, dict[str, str]()
        self.training = Training("int4", rank, by_attach=True)
        self.training.run(2)

    def tell(self, name: str, act: Callable[[], object]) -> None:
        began, session = time.monotonic(), self.training.session
        engine = session.engine
        try:
            act()
            self.told[name] = "nothing"
        except Exception as error:
            self.told[name] = f"{type(error).__name__}: {error}"
        assert session.engine is engine
        assert session.method == "int4"
        assert time.monotonic() - began < 20
        dist.barrier()
        self.training.run(1)


def refused(rank: int, world_size: int) -> dict[str, Any]:
    """Changes that fail on one rank or on all, each followed by a step under the old method."""
    refusals = Refusals(rank)
    training, session = refusals.training, refusals.training.session
    last = rank == world_size - 1
    refusals.tell("spec", lambda: training.change("unheard-of"))
    refusals.tell("spec of one", lambda: training.change("unheard-of" if last else "int8"))
    refusals.tell("too few ranks", lambda: training.change("krum:1"))
    refusals.tell("disagree", lambda: training.change("int8" if last else "topk:0.1"))
    refusals.tell("private", lambda: training.change("dp:1"))
    refusals.tell("making", lambda: making_fails(training, last))
    refusals.tell("within backward", lambda: within_backward(training))
    session.lane.deadline_s = 1
    refusals.tell("absent", lambda: None if last else training.change("int8"))
    session.lane.deadline_s = 30
    session.close()
    untroubled = Training("int4", rank, by_attach=True)
    untroubled.run(training.step)
    untroubled.session.close()
    return {**refusals.told, "digests": [digest(training.network), digest(untroubled.network)]}


def making_fails(training: Training, here: bool) -> None:
    """The last rank has no room for the new engine."""
    from gradwire.session import making

    works = making.dry_run

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    making.dry_run = fails if here else works  # type: ignore[assignment]
    try:
        training.change("topk:0.1")
    finally:
        making.dry_run = works


def within_backward(training: Training) -> None:
    """A change where gradients are still on their way: the first layer's come last."""
    told: list[Exception] = []

    def change(_: Tensor) -> None:
        try:
            training.change("topk:0.1")
        except gradwire.GradwireError as error:
            told.append(error)

    first = next(iter(training.network.parameters()))
    hook = first.register_hook(change)
    training.optimizer.zero_grad()
    assert training.ddp is not None
    loss_of(training.ddp, training.step, training.rank).backward()
    training.optimizer.step()
    training.step += 1
    hook.remove()
    raise told[0]


def unused(rank: int, world_size: int) -> dict[str, float]:
    """A change before a step in which no rank uses a layer: what it owes is neither lost nor delivered twice."""
    import hook_cases

    network = hook_cases.Gated()
    ddp = DDP(network, bucket_cap_mb=0.002, find_unused_parameters=True)
    given = delivered = between = 0.0
    with gradwire.attach(ddp, "topk:0.1", deadline_s=30) as handle:
        for step, gate in enumerate([1.0, 1.0, None, None, 1.0]):
            if step == 2:
                handle.change("none")
            network.gate = gate
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = nn.functional.cross_entropy(network(x), x[:, :4].argmax(1))
            local = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
            given += sum(float(gradient.double().sum()) for gradient in local)
            ddp.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1)).backward()
            delivered += sum(float(p.grad.double().sum()) for p in network.parameters() if p.grad is not None)
            if step == 3:
                between = total(owed(handle.session))
        return {"given": total(given), "accounted": total(delivered) + total(owed(handle.session)), "kept": between}
