"""What each rank does in the tests of `gradwire.parallel.pipelines`."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.parallel.pipelines import Pipeline, SampleMemory

WIDTH, SAMPLES = 6, 2


def part(index: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> nn.Module:
    """A stage whose weights depend on its place alone."""
    torch.manual_seed(100 + index)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(dtype)


def batch(
    step: int, micro_batches: int, dtype: torch.dtype = torch.float64, width: int = WIDTH
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (SAMPLES * micro_batches, width)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(shape, generator=generator, dtype=dtype)


def step(schedule: Any, indices: list[int], last: int, x: Tensor, y: Tensor) -> tuple[list[float], Tensor | None]:
    """One step on this rank: its losses and outputs where it has the last stage."""
    losses: list[Tensor] = []
    args = (x,) if 0 in indices else ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        out = schedule.step(*args, **({"target": y, "losses": losses} if last in indices else {}))
    return [loss.item() for loss in losses], out


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


def twin(stages: int, steps: int, micro_batches: int, scale: bool = True) -> tuple[nn.Sequential, Tensor]:
    """The same model in one process: its gradients after some steps, and its last outputs."""
    model = nn.Sequential(*(part(i) for i in range(stages)))
    out = torch.empty(0)
    for i in range(steps):
        x, y = batch(i, micro_batches)
        out = model(x)
        pieces = zip(torch.tensor_split(out, micro_batches), torch.tensor_split(y, micro_batches), strict=True)
        loss = torch.stack([nn.functional.mse_loss(a, b) for a, b in pieces]).sum()
        model.zero_grad()
        (loss / micro_batches if scale else loss).backward()
    return model, out.detach()


def against_twin(rank: int, world_size: int, schedule: str, micro_batches: int, static: bool = True) -> dict[str, Any]:
    """How far outputs and gradients of an uncompressed pipeline are from those of one process, after two steps."""
    pipeline = Pipeline(schedule, micro_batches)
    example = torch.empty(SAMPLES, WIDTH, dtype=torch.float64, device="meta").requires_grad_()
    shapes = {"input_args": example, "output_args": example} if static else {}
    stages = [pipeline.stage(part(i), i, **shapes) for i in pipeline.indices]
    made = pipeline.schedule(stages, nn.functional.mse_loss)
    last = pipeline.shape.stages - 1
    out = None
    for i in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        _, out = step(made, pipeline.indices, last, *batch(i, micro_batches))
    model, expected = twin(pipeline.shape.stages, 2, micro_batches)
    distances = [float((gradients(s.submod) - gradients(model[s.stage_index])).abs().max()) for s in stages]
    if out is not None:
        distances.append(float((out - expected).abs().max()))
    return {
        "distance": max(distances),
        "sent": sum(stage.sent_bytes for stage in stages),
        "has_output": out is not None,
    }


def every_schedule(rank: int, world_size: int, names: list[str], micro_batches: int) -> dict[str, dict[str, Any]]:
    """Of several schedules, one after the other in one group of ranks."""
    return {name: against_twin(rank, world_size, name, micro_batches) for name in names}


# Compressed --------------------------------------------------------------------------------------------------


def compressed(
    rank: int, world_size: int, schedule: str, codec: str, width: int, dtype: str, gradients_by: str | None = None
) -> dict[str, Any]:
    """Bytes that a step with a codec has sent here, and how far the gradients of this rank are from exact ones."""
    kind = getattr(torch, dtype)
    example = torch.empty(SAMPLES, width, dtype=kind, device="meta").requires_grad_()
    found: list[Tensor] = []
    sent = 0
    for spec, back in (("none", None), (codec, gradients_by)):
        pipeline = Pipeline(schedule, 4, spec, back)
        stages = [
            pipeline.stage(part(i, kind, width), i, input_args=example, output_args=example) for i in pipeline.indices
        ]
        made = pipeline.schedule(stages, nn.functional.mse_loss)
        step(made, pipeline.indices, pipeline.shape.stages - 1, *batch(0, 4, kind, width))
        found.append(torch.cat([gradients(stage.submod) for stage in stages]).double())
        sent = sum(stage.sent_bytes for stage in stages)
    return {"sent": sent, "error": float((found[1] - found[0]).norm() / found[0].norm())}


def straight_through(rank: int, world_size: int, codec: str) -> float:
    """How far a compressed step is from one process that rounds at the boundary and passes gradients through."""
    from gradwire.parallel.pipelines.codecs import StageCodecs

    codecs, width = StageCodecs.of(codec), 32
    pipeline = Pipeline("1F1B", 2, codec)
    example = torch.empty(SAMPLES, width, dtype=torch.float64, device="meta").requires_grad_()
    module = part(rank, width=width)
    stage = pipeline.stage(module, rank, input_args=example, output_args=example)
    x, y = batch(0, 2, width=width)
    step(pipeline.schedule([stage], nn.functional.mse_loss), pipeline.indices, 1, x, y)
    first, second = part(0, width=width), part(1, width=width)
    for a, b in zip(x.split(SAMPLES), y.split(SAMPLES), strict=True):
        out = first(a)
        sent = codecs.activations.decode(codecs.activations.encode(out.detach()), out).requires_grad_()
        (nn.functional.mse_loss(second(sent), b) / 2).backward()
        assert sent.grad is not None
        whole = sent.grad * 2  # the schedule divides the gradients of weights at the end, and not what is sent
        out.backward(codecs.gradients.decode(codecs.gradients.encode(whole), whole) / 2)
    expected = gradients(second if rank else first)
    return float((gradients(module) - expected).abs().max() / expected.abs().max())


class Seen(nn.Module):
    """Keeps what a stage has received."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x.detach().clone())
        return x * self.scale


def remembered(
    rank: int, world_size: int, codec: str, epochs: int, first: str | None = "none", others: bool = False
) -> dict[str, Any]:
    """How far what rank 1 received of samples is from what rank 0 sent, epoch by epoch, and bytes sent."""
    torch.manual_seed(0)
    width, memory = 64, None if first is None else SampleMemory(first)
    pipeline = Pipeline("GPipe", 2, codec, memory=memory)
    example = torch.empty(2, width, device="meta").requires_grad_()
    module = Seen() if rank else part(0, torch.float32, width)
    stage = pipeline.stage(module, rank, input_args=example, output_args=example)
    schedule = pipeline.schedule([stage], nn.functional.mse_loss)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    exact = part(0, torch.float32, width)(x).detach()
    errors: list[float] = []
    sent: list[int] = []
    for epoch in range(epochs):
        before, received = stage.sent_bytes, torch.empty_like(exact)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(4):
            if memory is not None:
                memory.next_batch((rows + 1) % 8 if others and rank else rows)
            if isinstance(module, Seen):
                module.inputs.clear()
            step(schedule, pipeline.indices, 1, x[rows], x[rows])
            if isinstance(module, Seen):
                received[rows] = torch.cat(module.inputs)
        errors.append(float((received - exact).norm() / exact.norm()))
        sent.append(stage.sent_bytes - before)
    return {"errors": errors if rank else [], "sent": sent, "kept": 0 if memory is None else memory.nbytes}


# Data parallelism --------------------------------------------------------------------------------------------


def with_ddp(rank: int, world_size: int, names: list[str], plain: bool = False) -> dict[str, float]:
    """How far the gradients of two pipelines of two ranks, joined by DDP, are from the mean of both.

    With `plain` the stages do not have DDP's hooks called for them.
    """
    from gradwire.parallel.pipelines.stage import CompressedStage

    if plain:
        CompressedStage.perform_reduce_grad = CompressedStage.__bases__[0].perform_reduce_grad  # type: ignore[method-assign]
    replica, place, micro_batches = rank // 2, rank % 2, 4
    pipes: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    twins = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    example = torch.empty(SAMPLES, WIDTH, dtype=torch.float64, device="meta").requires_grad_()
    found: dict[str, float] = {}
    for name in names:
        pipeline = Pipeline(name, micro_batches, group=pipes[replica])
        modules = [DistributedDataParallel(part(i), process_group=twins[place]) for i in pipeline.indices]
        stages = [
            pipeline.stage(module, i, input_args=example, output_args=example)
            for module, i in zip(modules, pipeline.indices, strict=True)
        ]
        made = pipeline.schedule(stages, nn.functional.mse_loss)
        sums = [torch.zeros(()) for _ in modules]
        for i in range(2):
            for module in modules:
                module.zero_grad()
            step(made, pipeline.indices, pipeline.shape.stages - 1, *batch(10 * i + replica, micro_batches))
            sums = [torch.zeros_like(gradients(module)) for module in modules]
            for of in range(2):
                whole = nn.Sequential(*(part(j) for j in range(pipeline.shape.stages)))
                x, y = batch(10 * i + of, micro_batches)
                nn.functional.mse_loss(whole(x), y).backward()
                sums = [s + gradients(whole[j]) / 2 for s, j in zip(sums, pipeline.indices, strict=True)]
        distances = [float((gradients(m) - s).abs().max()) for m, s in zip(modules, sums, strict=True)]
        found[name] = max(distances)
    return found


# Time and counters -------------------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """Passes a tensor on, and sleeps in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Sleeping(nn.Module):
    """A stage whose forward pass takes a time, and its backward pass twice that time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)


def slept(rank: int, world_size: int, schedule: str, micro_batches: int, seconds: float) -> float:
    """The bubble of a step whose stages sleep, measured; the least of three steps after one that makes connections."""
    from gradwire.parallel.pipelines.recording import WorkRecorder

    pipeline = Pipeline(schedule, micro_batches)
    example = torch.empty(1, 4, device="meta").requires_grad_()
    stages = [
        pipeline.stage(Sleeping(seconds / pipeline.shape.parts), i, input_args=example, output_args=example)
        for i in pipeline.indices
    ]
    made = pipeline.schedule(stages, nn.functional.mse_loss)
    recorder, found = WorkRecorder(stages), list[float]()
    x = torch.ones(micro_batches, 4)
    for _ in range(4):
        dist.barrier()
        with recorder.recording():
            step(made, pipeline.indices, pipeline.shape.stages - 1, x, x)
        found.append(recorder.gathered().bubble)
    return min(found[1:])


def counted(rank: int, world_size: int, codec: str) -> dict[str, float]:
    """Bytes that the interface counted in some steps, and those that the stage says it has sent."""
    from gradwire.network.wire import WireMeter

    pipeline, width = Pipeline("1F1B", 4, codec), 512
    example = torch.empty(64, width, device="meta").requires_grad_()
    stage = pipeline.stage(nn.Linear(width, width), rank, input_args=example, output_args=example)
    made = pipeline.schedule([stage], nn.functional.mse_loss)
    x = torch.randn(256, width)
    step(made, pipeline.indices, 1, x, x)
    meter = WireMeter.from_environment()
    dist.barrier()
    time.sleep(0.2)
    reading, before = meter.read(), stage.sent_bytes
    for _ in range(4):
        step(made, pipeline.indices, 1, x, x)
    time.sleep(0.2)
    return {"counted": meter.read().since(reading).payload_tx_bytes, "sent": stage.sent_bytes - before}


# What is refused ---------------------------------------------------------------------------------------------


def refused(rank: int, world_size: int, fault: str) -> str:
    """What is said of a mistake on this rank; a rank that waits for one that has given up says so."""
    own = rank == 1
    codec = "int4" if fault == "codec" and own else "int8"
    width = WIDTH + (fault == "shapes" and own)
    pipeline = Pipeline("GPipe", 4, codec)
    example = torch.empty(SAMPLES, width, dtype=torch.float64, device="meta").requires_grad_()
    stage = pipeline.stage(part(rank), rank, input_args=example, output_args=example)
    try:
        made = pipeline.schedule([stage], nn.functional.mse_loss)
        x, y = batch(0, 4)
        if fault == "empty":
            x = x[:, :0]
        if fault == "smaller":
            x = x[:7]
        step(made, pipeline.indices, 1, x, y)
    except Exception as error:
        return str(error)
    return ""


def few(rank: int, world_size: int) -> dict[str, Any]:
    """Fewer micro-batches than ranks."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = against_twin(rank, world_size, "1F1B", 2)
    return {**found, "said": [str(each.message) for each in said if "micro-batches on" in str(each.message)]}


# Plain functions ---------------------------------------------------------------------------------------------


def sent_and_received(rank: int, world_size: int) -> float:
    """A chain of all ranks by `send` and `recv`: how far its gradients are from those of one process."""
    from gradwire.parallel.point_to_point import recv, send

    module, (x, _) = part(rank), batch(0, 2)
    for _ in range(2):
        h = x if rank == 0 else recv(torch.empty_like(x), source=rank - 1)
        out = module(h)
        (send(out, to=rank + 1) if rank < world_size - 1 else out.square().sum()).backward()
    whole = nn.Sequential(*(part(i) for i in range(world_size)))
    (2 * whole(x).square().sum()).backward()
    return float((gradients(module) - gradients(whole[rank])).abs().max() / gradients(whole[rank]).abs().max())


def rounded(rank: int, world_size: int) -> list[float]:
    """What passes between two ranks by codecs: what rank 1 gets, and the gradient that rank 0 gets."""
    from gradwire.codecs import FP16, BlockInt
    from gradwire.parallel.point_to_point import recv, send

    codecs: dict[str, Any] = {"codec": BlockInt(bits=4, block=8), "gradients": FP16()}
    x = torch.tensor([0.0, 7.0, -3.2, 1.4], requires_grad=True)
    if rank == 0:
        send(x, to=1, **codecs).backward()
        assert x.grad is not None
        return x.grad.tolist()
    y = recv(torch.empty(4), source=0, **codecs)
    (y * torch.tensor([1.0, 2.0, 3.0, 0.1])).sum().backward()
    return y.tolist()
