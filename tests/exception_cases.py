"""What each rank does in the tests of exceptions: one rank raises at a point of a step, catches it and goes on."""

import contextlib
import datetime
import hashlib
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import hooks, sync

BAD, STEPS = 2, 5
"""The step in which the exception comes, and how many steps a rank makes that is told of nothing."""

DEADLINE_S = 120.0
"""Of all that is told without waiting for it: nobody is to come near it."""

FSDP2_S = 12.0
"""After which FSDP2's own collectives give up, which nobody else can end."""


class Broke(Exception):  # noqa: N818 - the name is looked for in what others are told
    """What a user's own code may raise."""


class Fuse:
    """Raises once, at the point that it is set to."""

    def __init__(self) -> None:
        self.point = ""

    def at(self, point: str) -> None:
        """Raise, if this is the point."""
        if self.point == point:
            self.point = ""
            raise KeyboardInterrupt(f"broke at {point}") if point == "interrupt" else Broke(f"broke at {point}")


class Bomb(Function):
    """The identity, which raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse, point: str) -> Tensor:
        ctx.fuse, ctx.point = fuse, point
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fuse.at(ctx.point)
        return gradients[0], None, None


class Layer(nn.Module):
    """Adds to its input; the gradient of each element of its parameter is the number of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(64, 16))

    def forward(self, h: Tensor, batch: Tensor) -> Tensor:
        return h + (self.p * batch).sum()


class Chain(nn.Module):
    """Four layers with points between them, where passes may break."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse, self.layers = fuse, nn.ModuleList(Layer() for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        h = passed(Bomb.apply(torch.zeros((), requires_grad=True), self.fuse, "after"))
        for number, layer in enumerate(self.layers):
            h = layer(h, batch)
            if number == 1:
                self.fuse.at("forward")
                self.fuse.at("interrupt")
                h = passed(Bomb.apply(h, self.fuse, "between"))
        return passed(Bomb.apply(h, self.fuse, "before"))


def passed(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


class Port:
    """A way to train, step after step, and what a rank knows of it."""

    reduces_gradients: ClassVar[bool] = True
    """Whether ranks have communicated before the optimizer makes its step."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse, self.inner = fuse, Chain(fuse)
        self.model: Any = self.inner
        self.optimizer: Any = torch.optim.SGD(self.inner.parameters(), 0.1)
        self.session: gradwire.Session | None = None
        self.open()

    def open(self) -> None:
        """Make what communicates."""

    def backward(self, batch: int) -> None:
        """Gradients of a batch, as they are to be used."""
        self.model(torch.tensor(float(batch))).backward()

    def step(self, batch: int) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.fuse.at("optimizer")
        self.optimizer.step()

    def owed(self) -> float | None:
        """What this rank owes, if its port tells."""
        return None if self.session is None else self.session.residual_norm()

    def close(self) -> None:
        """Stop communicating, whatever has happened."""
        if self.session is not None:
            self.session.close(at_once=True)


class Steps(Port):
    """`session.step()`, given gradients as they come."""

    def open(self) -> None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.inner.named_parameters()}
        self.session = gradwire.Session(self.inner, "topk:0.5", deadline_s=DEADLINE_S)
        self.under_way: Any = None
        self.abandoned: Any = None

        def deliver(parameter: Tensor) -> None:
            if self.under_way is not None:
                self.under_way.deliver(names[parameter], parameter.grad)

        for parameter in self.inner.parameters():
            parameter.register_post_accumulate_grad_hook(deliver)

    def backward(self, batch: int) -> None:
        assert self.session is not None
        point = self.fuse.point
        if point == "generator":
            self.abandon()
        for _ in range(1):
            with self.session.step() as self.under_way:
                if point == "break":
                    self.fuse.point = ""
                    break
                if point == "nested":
                    self.fuse.point = ""
                    self.session.step().__enter__()
                self.model(torch.tensor(float(batch))).backward()
        self.under_way = None

    def abandon(self) -> None:
        """A generator is dropped in the middle of a step, of which it has delivered nothing."""

        def within() -> Generator[None]:
            assert self.session is not None
            with self.session.step():
                yield

        generator = within()
        next(generator)
        del generator
        self.fuse.at("generator")


class Reduces(Port):
    """`session.reduce_` after a backward pass."""

    def open(self) -> None:
        self.session = gradwire.Session(self.inner, "topk:0.5", deadline_s=DEADLINE_S)

    def backward(self, batch: int) -> None:
        assert self.session is not None
        super().backward(batch)
        if self.fuse.point == "refused":
            self.fuse.point = ""
            self.session.reduce_({"layers.0.p": torch.zeros(2)})
        self.session.reduce_(self.inner)


def group(seconds: float) -> dist.ProcessGroup:
    """All ranks, in a group whose collectives give up after so long."""
    made = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    assert isinstance(made, dist.ProcessGroup)
    return made


class OfDDP(Port):
    """DDP with a bucket for each layer or two."""

    def open(self) -> None:
        ranks = group(DEADLINE_S)
        self.model = DDP(self.inner, bucket_cap_mb=0.001, process_group=ranks)
        list(self.inner.parameters())[1].register_hook(self.hooked)
        self.hook(ranks)

    def hooked(self, gradient: Tensor) -> None:
        """What a user does with a gradient."""
        self.fuse.at("hook")

    def hook(self, ranks: dist.ProcessGroup) -> None:
        """Have something else than DDP communicate."""


class Attached(OfDDP):
    """`gradwire.attach`."""

    def hook(self, ranks: dist.ProcessGroup) -> None:
        self.handle = gradwire.attach(self.model, "topk:0.5", deadline_s=DEADLINE_S)
        self.session = self.handle.session

    def backward(self, batch: int) -> None:
        if self.fuse.point == "with":
            self.fuse.point = "between"
            with self.handle:  # as where the loop stands in the block: what ends it is known, then
                super().backward(batch)
        super().backward(batch)


class DropIn(OfDDP):
    """A hook without memory."""

    def hook(self, ranks: dist.ProcessGroup) -> None:
        self.model.register_comm_hook(ranks, hooks.allreduce_hook)


class DropInPowerSGD(OfDDP):
    """A hook with memory."""

    def hook(self, ranks: dist.ProcessGroup) -> None:
        self.state = hooks.PowerSGDState(ranks, matrix_approximation_rank=1, start_powerSGD_iter=2)
        self.model.register_comm_hook(self.state, hooks.powerSGD_hook)


class PostLocal(OfDDP):
    """The hook of post-local SGD while it averages gradients."""

    def hook(self, ranks: dist.ProcessGroup) -> None:
        state = hooks.PostLocalSGDState(ranks, ranks, start_localSGD_iter=100)
        self.model.register_comm_hook(state, hooks.post_localSGD_hook)


class OfFSDP2(Port):
    """A sharded model, each layer a group of its own."""

    def open(self) -> None:
        mesh = DeviceMesh.from_group(group(FSDP2_S), "cpu")
        for layer in self.inner.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.inner, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), 0.1)
        self.handle = gradwire.attach(self.inner, "topk:0.5", deadline_s=DEADLINE_S)
        self.session = self.handle.session

    def backward(self, batch: int) -> None:
        loss = self.model(torch.tensor(float(batch)))
        self.fuse.at("loss")
        loss.backward()

    def close(self) -> None:
        self.handle.close(at_once=True)


class Local(Port):
    """Windows of two steps."""

    reduces_gradients: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}

    def open(self) -> None:
        self.optimizer = sync.LocalSGD(
            self.optimizer, self.inner, every=2, method="topk:0.5", deadline_s=DEADLINE_S, **self.options
        )
        for fragment in self.optimizer.averaging.fragments:
            self.at_reading(fragment, "changes")

    def at_reading(self, owner: Any, name: str) -> None:
        """Have a function of what averages raise, as one would for want of memory."""
        does: Callable[[], Any] = getattr(owner, name)

        def raises() -> Any:
            self.fuse.at("inside")
            return does()

        setattr(owner, name, raises)

    def close(self) -> None:
        self.optimizer.close()


class LocalLate(Local):
    """Parts of the model in turn, taken up a step later."""

    options: ClassVar[dict[str, Any]] = {"fragments": 2, "delay": 1}


class Levels(Local):
    """Two ranks average each step, and all four every second step."""

    def open(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
        averaging = sync.Hierarchical.over(mesh, self.inner, {"place": 1, "site": 2}, deadline_s=DEADLINE_S)
        self.optimizer = sync.AveragingOptimizer(self.optimizer, averaging)
        self.at_reading(averaging.levels[0].fragments[0], "changes")


class Gossips(Local):
    """A round of gossip in each step."""

    def open(self) -> None:
        gossip = sync.Gossip(self.inner, every=1, deadline_s=DEADLINE_S)
        self.optimizer = sync.AveragingOptimizer(self.optimizer, gossip)
        self.at_reading(gossip, "_wide")


class Compresses(Local):
    """An optimizer that is compression, which is given a closure."""

    def open(self) -> None:
        self.optimizer = sync.optimizers.DeMo(self.inner.parameters(), lr=0.1, deadline_s=DEADLINE_S)

    def step(self, batch: int) -> None:
        self.fuse.at("optimizer")

        def closure() -> float:
            self.fuse.at("inside")
            self.optimizer.zero_grad()
            loss = self.model(torch.tensor(float(batch)))
            loss.backward()
            return float(loss.detach())

        self.optimizer.step(closure)


PORTS: dict[str, type[Port]] = {
    port.__name__: port
    for port in (
        *(Steps, Reduces, Attached, DropIn, DropInPowerSGD, PostLocal, OfFSDP2),
        *(Local, LocalLate, Levels, Gossips, Compresses),
    )
}


def cells(rank: int, world_size: int, port: str, cells: list[tuple[str, int]]) -> dict[str, dict[str, Any]]:
    """Train with one rank that raises at a point, for each such point and rank; -1 stands for all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for point, who in cells:
        fuse = Fuse()
        made = PORTS[port](fuse)
        found[f"{point} {who}"] = cell(made, point if who in (rank, -1) else "")
        meet(f"{port} {point} {who}", world_size)
        with contextlib.suppress(gradwire.GradwireError):
            made.close()
    return found


def cell(port: Port, point: str) -> dict[str, Any]:
    """Train until `STEPS` steps are made, or this rank is told that it cannot go on.

    Returns:
        How many steps were made or paired, what this rank raised and was told, and whether it owed as much at the end
        as before the step in question.
    """
    made, batch, raised, owed = 0, 0, "", port.owed()
    while made < STEPS:
        if batch == BAD:
            port.fuse.point, owed = point, port.owed()
        try:
            port.step(batch)
            made += 1
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            if batch < BAD or not point or raised:  # where windows end, it comes a step later
                return {"made": made, "raised": raised, "told": said, "kept": port.owed() == owed}
            raised = said
            made += point == "optimizer" and port.reduces_gradients
            port.inner.zero_grad()
        batch += 1
    return {"made": made, "raised": raised, "told": "", "digest": digest(port.inner)}


def digest(model: nn.Module) -> str:
    """The bits of what this rank has of all parameters."""
    held: list[Any] = [parameter.detach() for parameter in model.parameters()]
    whole = b"".join((t.to_local() if hasattr(t, "to_local") else t).numpy().tobytes() for t in held)
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def meet(name: str, world_size: int) -> None:
    """Wait for all ranks, by the store: collectives may be broken."""
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if store.add(name, 1) == world_size:
        store.set(f"{name}, all", "")
    store.wait([f"{name}, all"], datetime.timedelta(seconds=2 * DEADLINE_S))
