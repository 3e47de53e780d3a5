"""FSDP2 in a comparison: the model in shards, alone or under a method."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

import gradwire
from gradwire.adapters.fsdp2.form import sharded_method
from gradwire.adapters.fsdp2.gather import parameter_codec
from gradwire.choosing.automatic import accuracy_of
from gradwire.compare.model_engine import ModelEngine
from gradwire.compare.results import FLOOR, FP32
from gradwire.compare.sides import Side, label_of
from gradwire.core.errors import SpecError
from gradwire.core.places import BASELINES, UNWAITING, WINDOWS
from gradwire.spec import find, for_shards

BF16 = "torch.bf16"

LABELS = {
    FP32: "fully_shard, nothing compressed",
    BF16: "fully_shard, MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=bfloat16)",
    FLOOR: "nothing is sent, each rank trains its own whole model",
}


class ShardedEngine(ModelEngine):
    """Each rank has a shard of every parameter.

    A group of `fully_shard` is made of each element of the model's module lists, its blocks, and one of what is left.
    """

    def __init__(self) -> None:
        self._whole: nn.Module | None = None

    def check(self, spec: str, hosts: int) -> None:
        """Read it; only methods with shards in the middle are served."""
        if accuracy_of(spec) is not None:
            return  # it chooses among methods that end with shards
        place = find(spec).place
        if place is BASELINES and spec not in LABELS:
            raise SpecError(
                f"{spec} is not for --engine fsdp2, which has {', '.join(LABELS)}"
                + (": fp16 needs a gradient scaler, which a comparison has none of" if "fp16" in spec else "")
            )
        if place in (WINDOWS, UNWAITING):
            raise SpecError(f"{spec} is not for --engine fsdp2 but for --engine ddp: its ranks have whole models")
        if place is not BASELINES:
            gradients, parameters = for_shards(spec)
            sharded_method(gradients).require_ranks(hosts)
            if parameters is not None:
                parameter_codec(parameters)

    def wrap(self, model: nn.Module, spec: str, bucket_mb: float) -> nn.Module:
        """In shards over all ranks; the floor as it is. There are no buckets."""
        if spec == FLOOR:
            return model
        self._whole = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        half = torch.bfloat16 if spec == BF16 else None
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(half, half))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(half, half, torch.float32 if half else None))
        return model

    def attach(self, model: nn.Module, optimizer: Optimizer, spec: str) -> Side:
        """By `gradwire.attach`, or not at all."""
        if spec == FLOOR:
            return AloneSide(model, optimizer)
        assert self._whole is not None
        return ShardedSide(model, optimizer, spec, self._whole)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost module lists.

    >>> len(list(blocks(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))))
    2
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


class AloneSide(Side):
    """The floor: every rank trains the whole model by itself."""

    label = LABELS[FLOOR]

    @override
    def codec_cpu_s(self) -> float:
        return 0.0

    @override
    def predicted_bytes(self) -> float:
        return 0.0


class ShardedSide(Side):
    """A sharded model, alone or under `gradwire.attach`.

    Args:
        model: the root.
        optimizer: of its shards.
        spec: of the method.
        whole: a model like it that is not sharded, to evaluate.
    """

    averages_to_evaluate = True
    reduces_behind_gradients = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, spec: str, whole: nn.Module) -> None:
        super().__init__(model, optimizer)
        self._whole = whole
        self._clock = CommunicationClock()
        self._handle = None
        self.label = LABELS.get(spec, "")
        if accuracy_of(spec) is not None:
            self._handle = gradwire.attach(model, spec)
        elif spec not in LABELS:
            gradients, parameters = for_shards(spec)
            self._handle = gradwire.attach(model, gradients, parameters=parameters)
            self.label = repr(self._handle.reducer) + (f", parameters in {parameters}" if parameters else "")

    @override
    def finish(self) -> None:
        if self._handle:
            self.label = label_of(self._handle, self.label)

    def codec_cpu_s(self) -> float:
        """CPU seconds of encoding and decoding."""
        return self._handle.stats().encode_s if self._handle else 0.0

    def exposed_in_steps_s(self) -> float:
        """Seconds inside FSDP2's gathers and reductions: on a CPU nothing is hidden behind computing."""
        return self._clock.seconds

    def predicted_bytes(self) -> float:
        """What goes through FSDP2's own collectives, and what the handle counts."""
        return self._clock.sent_bytes + (self._handle.stats().wire_bytes if self._handle else 0)

    def weigh(self, examples: int) -> None:
        """Where the method asks for it."""
        if self._handle and self._handle.engine.weighs:
            self._handle.weigh(examples)

    def residual_norm(self) -> float | None:
        """Norm of this rank's residual."""
        return self._handle.residual_norm() if self._handle else None

    @override
    def report(self) -> dict[str, Any] | None:
        return self._handle.report().as_dict() if self._handle else None

    @contextlib.contextmanager
    def evaluating(self) -> Generator[nn.Module]:
        """The whole model in full precision, as it would be saved."""
        shards = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, parameter in self._whole.named_parameters(remove_duplicate=False):
                parameter.copy_(cast(DTensor, shards[name]).full_tensor())
            for whole, buffer in zip(self._whole.buffers(), self.model.buffers(), strict=True):
                whole.copy_(buffer)
        yield self._whole

    def close(self) -> None:
        """Let go of its thread before the group goes away."""
        if self._handle:
            self._handle.close()
        self._clock.close()


class CommunicationClock:
    """Seconds that FSDP2 spends on gathering and reducing, its copies among them, and the bytes of its own collectives.

    PyTorch's functions are replaced in the whole process: fit for a process that exists to be measured, and for no
    other.
    """

    _TIMED = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

        self.seconds, self.sent_bytes = 0.0, 0.0
        self._before: list[tuple[Any, str, Callable[..., Any]]] = []
        for name in self._TIMED:
            self._replace(_fsdp_param_group, name, self._timed)
        self._replace(_fsdp_collectives.DefaultAllGather, "__call__", self._counting(gathered_bytes))
        self._replace(_fsdp_collectives.DefaultReduceScatter, "__call__", self._counting(reduced_bytes))

    def close(self) -> None:
        """Give the functions back."""
        for place, name, function in self._before:
            setattr(place, name, function)
        self._before = []

    def _replace(self, place: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._before.append((place, name, getattr(place, name)))
        setattr(place, name, around(getattr(place, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begun

        return run

    def _counting(self, bytes_of: Callable[[int, int], float]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Count what a collective of FSDP2's sends; its arguments are named or in the order of its interface."""

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(comm: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **options: Any) -> Any:
                self.sent_bytes += bytes_of(input_tensor.nbytes, group.size())
                return function(comm, output_tensor, input_tensor, group, *args, **options)

            return run

        return around


def gathered_bytes(nbytes: int, ranks: int) -> float:
    """What a rank sends to gather rows of `nbytes`: its own to each other, or all others' around a ring."""
    return nbytes * (ranks - 1)


def reduced_bytes(nbytes: int, ranks: int) -> float:
    """What a rank sends in a reduce-scatter of `nbytes` by Gloo: as much as in a ring all-reduce.

    >>> reduced_bytes(1000, 4)
    1500.0
    """
    return 2 * nbytes * (ranks - 1) / ranks
