"""What can be tuned: models by what communicates for them, with their knobs, floor and communication by itself."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradwire.adapters.attach import attach
from gradwire.adapters.buckets import caps_by, caps_of, deliver_in_pieces, remake
from gradwire.adapters.fsdp2.prefetch import prefetchable, set_prefetch
from gradwire.adapters.models import check
from gradwire.adapters.unwrapped import HookedSession
from gradwire.core.errors import AttachError
from gradwire.drivers.interpreter import WINDOW
from gradwire.drivers.window import Caps
from gradwire.overlap.isolated import all_reduce_alone, reduce_alone
from gradwire.session import Session
from gradwire.session.names import is_fsdp2, named
from gradwire.session.overlap_settings import OverlapSettings

Pass = Callable[[], None]
"""A forward and a backward pass."""

Knob = Callable[[OverlapSettings], list[OverlapSettings]]
"""What to compare some settings with, of one kind of setting."""

SMALLEST_BUCKET = 1 << 16
SMALLEST_GRAIN = 1 << 13


class Apart(NamedTuple):
    """Two jobs that a step is compared with.

    Attributes:
        floor: a step in which nothing is sent.
        isolated: the communication of a step by itself.
    """

    floor: Pass
    isolated: Pass


class Subject(ABC):
    """A model under the communication that is tuned.

    Args:
        model: as it is trained.
        run: a pass of it.

    Attributes:
        group: the ranks that communicate.
        device: of the parameters.
        now: the settings in force.
        gradient_bytes, numel: of all gradients of this rank.
    """

    group: Any

    def __init__(self, model: nn.Module, run: Pass) -> None:
        self.model, self._run = model, run
        self.now = OverlapSettings()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = trained[0].device if trained else torch.device("cpu")
        self.numel = sum(parameter.numel() for parameter in trained)
        self.gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)

    @property
    @abstractmethod
    def knobs(self) -> Sequence[Knob]:
        """Of each kind of setting, what to try."""

    @abstractmethod
    def apply(self, settings: OverlapSettings) -> None:
        """Communicate by these settings from now on, between two steps."""

    @abstractmethod
    def close(self) -> None:
        """Leave the model as it was."""

    def step(self) -> None:
        """A step: gradients are there when it ends. The optimizer's step is the same under all settings."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self._run()

    def under(self, settings: OverlapSettings) -> Callable[[], None]:
        """A job that makes a step under these settings, whatever was in force before."""

        def job() -> None:
            if self.now != settings:
                self.apply(settings)
                self.now = settings
            self.step()

        return job

    def apart(self) -> Apart | None:
        """A step without its communication, and that by itself; None where they cannot be had."""
        return None


def _others(now: OverlapSettings, name: str, values: Sequence[int | None]) -> list[OverlapSettings]:
    """Settings of which one has other values, each once."""
    wanted = dict.fromkeys(value for value in values if value != getattr(now, name))
    return [dataclasses.replace(now, **{name: value}) for value in wanted]


def waves_in_flight(now: OverlapSettings) -> list[OverlapSettings]:
    """Fewer and more waves at a time than by default."""
    return _others(now, "waves_in_flight", [WINDOW, 2, 3, 4, 6])


class _Buckets:
    """Sizes of DDP's buckets for so many bytes of gradients: parts of them, and what DDP takes by default."""

    def __init__(self, nbytes: int, default: Caps) -> None:
        self._nbytes, self._default = nbytes, default

    def sizes(self, now: OverlapSettings) -> list[OverlapSettings]:
        """Of all buckets but the first one."""
        parts = [max(SMALLEST_BUCKET, self._nbytes // parts) for parts in (2, 4, 8, 16, 32)]
        return [each for each in _others(now, "bucket_bytes", parts) if each.bucket_bytes != self._default.others]

    def first(self, now: OverlapSettings) -> list[OverlapSettings]:
        """Of the first one: as the others, a quarter, and a sixteenth."""
        whole = now.bucket_bytes or self._default.others
        whole = min(whole, self._nbytes)
        return _others(now, "first_bucket_bytes", [max(SMALLEST_BUCKET, whole // part) for part in (1, 4, 16)])


class _Waves:
    """Grains, and with them waves, for so many elements."""

    def __init__(self, numel: int) -> None:
        self._numel = numel

    def sizes(self, now: OverlapSettings) -> list[OverlapSettings]:
        """Grains of a half of all elements down to a 32nd; None is what a session plans by itself."""
        parts = [max(SMALLEST_GRAIN, self._numel // parts) for parts in (2, 4, 8, 16, 32)]
        return _others(now, "grain_numel", [None, *parts])


def plain_caps(default: Caps, settings: OverlapSettings) -> Caps:
    """Bytes that end a bucket of PyTorch's own; where settings say one size, it is that of all buckets.

    >>> plain_caps(Caps(10, 25), OverlapSettings(bucket_bytes=16))
    Caps(first=16, others=16)
    >>> plain_caps(Caps(10, 25), OverlapSettings(first_bucket_bytes=4))
    Caps(first=4, others=25)
    """
    others = settings.bucket_bytes or default.others
    return Caps(settings.first_bucket_bytes or (others if settings.bucket_bytes else default.first), others)


class PlainDDP(Subject):
    """PyTorch's own all-reduces of DDP's buckets."""

    model: DistributedDataParallel

    def __init__(self, model: DistributedDataParallel, run: Pass) -> None:
        super().__init__(model, run)
        assert model.process_group is not None, "DDP over a device mesh has no group of its own yet"
        self.group, self._caps = model.process_group, caps_of(model)
        self._is_silent = False

    @property
    @override
    def knobs(self) -> Sequence[Knob]:
        buckets = _Buckets(self.gradient_bytes, self._caps)
        return (buckets.sizes, buckets.first)

    @override
    def apply(self, settings: OverlapSettings) -> None:
        remake(self.model, plain_caps(self._caps, settings))
        self._is_silent = False

    @override
    def step(self) -> None:
        if self._is_silent:
            self.apply(self.now)
        super().step()

    @override
    def apart(self) -> Apart:
        return Apart(self._floor, lambda: all_reduce_alone(self.model))

    def _floor(self) -> None:
        if not self._is_silent:
            _silence(self.model, plain_caps(self._caps, self.now))
            self._is_silent = True
        super().step()

    @override
    def close(self) -> None:
        remake(self.model, self._caps)


def _silence(ddp: DistributedDataParallel, caps: Caps) -> None:
    """Have DDP send nothing of its buckets, as `torch.noop`, until its reducer is made anew."""
    held: Any = ddp
    before, held._comm_hooks = held._comm_hooks, [(noop_hook, None)]
    try:
        remake(ddp, caps)
    finally:
        held._comm_hooks = before


class _WithSession(Subject):
    """A model under a method."""

    session: Session

    def __init__(self, model: nn.Module, run: Pass, method: Any, **options: Any) -> None:
        super().__init__(model, run)
        self.session = attach(model, method, **options)
        self.group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {name: p for name, p in named(inner).items() if name in set(self.session.names)}
        self._gradients: dict[str, Tensor] = {}

    @property
    @override
    def knobs(self) -> Sequence[Knob]:
        return (_Waves(self.numel).sizes, waves_in_flight)

    @override
    def apply(self, settings: OverlapSettings) -> None:
        self.session.adopt(settings, self.session.remade(settings))

    @override
    def apart(self) -> Apart:
        return Apart(self._floor, self._isolated)

    @abstractmethod
    def _floor(self) -> None:
        """A step in which nothing is sent."""

    def _isolated(self) -> None:
        if not self._gradients:
            seeded = torch.Generator().manual_seed(0)
            for name, parameter in self._parameters.items():
                drawn = torch.randn(parameter.shape, generator=seeded)
                self._gradients[name] = drawn.to(parameter.device, parameter.dtype)
        reduce_alone(self.session, self._gradients)

    @override
    def close(self) -> None:
        self.session.close()


class AttachedDDP(_WithSession):
    """A method in DDP's hook."""

    model: DistributedDataParallel

    def __init__(self, model: DistributedDataParallel, run: Pass, method: Any, **options: Any) -> None:
        super().__init__(model, run, method, **options)
        self._caps = caps_by(model, OverlapSettings(), self.session.engine.dense_bytes)
        self._is_silent = False

    @property
    @override
    def knobs(self) -> Sequence[Knob]:
        buckets = _Buckets(self.gradient_bytes, self._caps)
        return (*super().knobs, buckets.sizes, buckets.first)

    @override
    def step(self) -> None:
        if self._is_silent:
            deliver_in_pieces(self.model, caps_by(self.model, self.now, self.session.engine.dense_bytes), again=True)
            self._is_silent = False
        super().step()

    @override
    def _floor(self) -> None:
        if not self._is_silent:
            _silence(self.model, caps_by(self.model, self.now, self.session.engine.dense_bytes))
            self._is_silent = True
        super().step()

    @override
    def close(self) -> None:
        super().close()
        held: Any = self.model
        held._comm_hooks = []  # DDP takes one, and another one is to come
        remake(self.model, caps_of(self.model))


class UnwrappedModel(_WithSession):
    """A method fed by hooks of a model that nobody wraps."""

    @override
    def _floor(self) -> None:
        assert isinstance(self.session, HookedSession), "attach returns one where nobody wraps the model"
        with self.session.no_sync():
            super().step()


class ShardedModel(Subject):
    """FSDP2, alone or under a method."""

    def __init__(self, model: nn.Module, run: Pass, method: Any, **options: Any) -> None:
        super().__init__(model, run)
        shard = next(iter(model.parameters()))
        mesh = cast(Any, shard).device_mesh
        self.group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        self.session = None if method is None else attach(model, method, **options)

    @property
    @override
    def knobs(self) -> Sequence[Knob]:
        depth = len(prefetchable(self.model))
        return (lambda now: _others(now, "prefetch", [None, *(k for k in (1, 2, 3) if k < depth)]),)

    @override
    def apply(self, settings: OverlapSettings) -> None:
        set_prefetch(self.model, settings.prefetch)

    @override
    def close(self) -> None:
        set_prefetch(self.model, None)
        if self.session is not None:
            self.session.close()


def subject_of(model: nn.Module, run: Pass, method: Any, **options: Any) -> Subject:
    """Return what is to be tuned.

    Raises:
        AttachError: a model that communicates nothing, or one that cannot be served.
    """
    if not dist.is_initialized():
        raise AttachError("there is no default process group: call torch.distributed.init_process_group first")
    if isinstance(model, DistributedDataParallel):
        check(model)
        made = PlainDDP(model, run) if method is None else AttachedDDP(model, run, method, **options)
    elif is_fsdp2(model):
        made = ShardedModel(model, run, method, **options)
    elif method is None:
        raise AttachError(
            "this model communicates nothing, so there is nothing to tune: wrap it in DistributedDataParallel or "
            'fully_shard, or name the method that attach will be given, as in tune(model, batch, "int4")'
        )
    else:
        made = UnwrappedModel(model, run, method, **options)
    if made.group.size() == 1:
        made.close()
        raise AttachError(
            "this model communicates nothing, so there is nothing to tune: its process group has one rank; start the "
            "script on two or more"
        )
    return made
