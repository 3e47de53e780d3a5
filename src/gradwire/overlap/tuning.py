"""`tune`: settings of when communication travels, found by measurement."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.buckets import caps_of, remake
from gradwire.adapters.fsdp2.prefetch import set_prefetch
from gradwire.core.errors import AttachError
from gradwire.overlap.figures import Overlap
from gradwire.overlap.meter import ROUNDS, STRETCH, Stopwatch, Timings
from gradwire.overlap.subjects import Subject, plain_caps, subject_of
from gradwire.reducers.base import Reducer
from gradwire.session.names import is_fsdp2
from gradwire.session.overlap_settings import OverlapSettings

SETTLING = 2
"""Steps under other settings that do not count: DDP makes its buckets anew after the first one."""

FIRST_ROUNDS = 2
"""Rounds after which what is far behind is left out."""

FAR = 1.10
"""How many times the shortest step a step may take to stay in."""

LEAST_GAIN = 0.02
"""A share of the step. What gains less than this, or less than twice its standard error, is not taken."""


class Trial(NamedTuple):
    """Settings that were tried, and the median of a step under them, in seconds, on the slowest rank."""

    settings: OverlapSettings
    step_s: float


@dataclass(frozen=True)
class Tuned:
    """What `tune` has found, the same on all ranks. `str` of it says what was gained.

    Attributes:
        settings: under which a step takes least; the default ones where nothing was clearly better.
        default_s, step_s: the medians of a forward and a backward pass, by default and under the settings, measured
            side by side once more after the search.
        overlap: exposed and isolated communication under the settings; None for models of `fully_shard`.
        trials: all that was tried, in order.
    """

    settings: OverlapSettings
    default_s: float
    step_s: float
    overlap: Overlap | None
    trials: tuple[Trial, ...]

    @property
    def gain(self) -> float:
        """The share of a step by default that the settings save."""
        return 1.0 - self.step_s / self.default_s

    def save(self, path: str | Path) -> None:
        """Write the settings to a file, for `gradwire.attach(..., overlap=path)`."""
        self.settings.save(path)

    def __str__(self) -> str:
        told = {name: value for name, value in self.settings.as_dict().items() if name != "order"}
        said = ", ".join(f"{name}={value}" for name, value in told.items())
        default, step = f"{1e3 * self.default_s:.1f} ms", f"{1e3 * self.step_s:.1f} ms"
        what = (
            f"{said}: a pass takes {step}, {self.gain:.1%} less than by default ({default})"
            if said
            else f"the defaults stay: a pass takes {default}, and none of {len(self.trials)} trials was clearly shorter"
        )
        return what if self.overlap is None else f"{what}; {self.overlap}"


def tune(
    model: nn.Module,
    batch: Any,
    method: Reducer | str | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    rounds: int = ROUNDS,
    stretch: int = STRETCH,
    **options: Any,
) -> Tuned:
    """Find by measurement when communication should travel, on the ranks and the network at hand.

    For DDP these are the sizes of its buckets, that of the first one among them; under a method of gradwire also the
    size of grains and the number of waves that travel at a time; for FSDP2 how many modules ahead parameters are
    gathered. Each is compared with the default, interleaved, and is taken where it gains clearly. All ranks get the
    same settings, since each time is that of the slowest rank.

    Every rank calls it at the same place, before `attach`. Passes are made with one batch and no step of an optimizer:
    parameters, buffers, gradients and random numbers are afterwards as they were before, and nothing stays attached. It
    takes a few hundred passes.

    Args:
        model: a `DistributedDataParallel` without a hook, the root of a model of `fully_shard`, or one that nobody
            wraps.
        batch: what the model is called with: a tuple is its positional arguments, a mapping its named ones.
        method: what `gradwire.attach` will be given; None: PyTorch's own communication.
        loss: makes a scalar of what the model returns. By default it is the scalar itself, its `loss`, or the mean of
            the squares of the first tensor in it.
        rounds: of measurement.
        stretch: steps in a row in each.
        options: of `gradwire.attach`.

    Returns:
        The settings and what they gain. Give them to `gradwire.attach(..., overlap=found.settings)`; for PyTorch's own
        communication to `gradwire.overlap.apply(model, found.settings)`. `found.save(path)` keeps them.

    Raises:
        AttachError: a model that communicates nothing, or that `attach` would refuse.
        CommunicationError: a rank failed or fell silent.

    Example:
        found = gradwire.overlap.tune(ddp, (inputs,), "int4", loss=lambda outputs: criterion(outputs, targets))
        print(found)
        session = gradwire.attach(ddp, "int4", overlap=found.settings)
    """
    if rounds < 1 or stretch < 1:
        raise AttachError(f"rounds={rounds} and stretch={stretch} must be 1 or more")
    scalar = loss or _scalar

    def run() -> None:
        scalar(_called(model, batch)).backward()

    with _as_it_was(model):
        subject = subject_of(model, run, method, **options)
        try:
            return Search(subject, rounds, stretch).run()
        finally:
            subject.close()


class Search:
    """One kind of setting after the other, each beside what was best so far.

    Args:
        subject: what is tuned.
        rounds, stretch: as of `tune`.

    Attributes:
        watch: that times steps.
    """

    def __init__(self, subject: Subject, rounds: int, stretch: int) -> None:
        self._subject, self._rounds, self._stretch = subject, rounds, stretch
        self.watch = Stopwatch(subject.group, subject.device)
        self._trials: list[Trial] = []

    def run(self) -> Tuned:
        """Measure, and conclude the same on all ranks."""
        subject = self._subject
        subject.step()  # of a model that nobody wraps the first step tells the order of gradients
        session = getattr(subject, "session", None)
        default = best = subject.now = OverlapSettings() if session is None else session.overlap
        for knob in subject.knobs:
            best = self._best_of([best, *knob(best)])
        found = self._timed([default] if best == default else [default, best])
        if best != default and not _is_shorter(found, "0", "1"):
            best = default
        default_s, step_s = found.median_s("0"), found.median_s("0" if best == default else "1")
        return Tuned(best, default_s, step_s, self._overlap(best), tuple(self._trials))

    def _best_of(self, tried: list[OverlapSettings]) -> OverlapSettings:
        """The best of some settings, of which the first one stays where none is clearly better."""
        early = self._timed(tried, min(FIRST_ROUNDS, self._rounds))
        shortest = min(early.median_s(name) for name in early.rounds_s)
        near = [0, *(i for i in range(1, len(tried)) if early.median_s(str(i)) <= FAR * shortest)]
        left, all_rounds = self._rounds - FIRST_ROUNDS, early.rounds_s
        if left > 0 and len(near) > 1:
            late = self._timed([tried[i] for i in near], left)
            all_rounds = {str(i): [*all_rounds[str(i)], *late.rounds_s[str(at)]] for at, i in enumerate(near)}
        whole = Timings(all_rounds)
        self._trials += [Trial(tried[int(name)], whole.median_s(name)) for name in all_rounds]
        better = [str(i) for i in near[1:] if _is_shorter(whole, "0", str(i))]
        return tried[int(min(better, key=whole.median_s, default="0"))]

    def _timed(self, tried: list[OverlapSettings], rounds: int | None = None) -> Timings:
        jobs = {str(i): self._subject.under(settings) for i, settings in enumerate(tried)}
        return self.watch.interleaved(jobs, rounds or self._rounds, self._stretch, untimed=SETTLING)

    def _overlap(self, settings: OverlapSettings) -> Overlap | None:
        apart = self._subject.apart()
        if apart is None:
            return None
        step = self._subject.under(settings)
        return self.watch.overlap(step, apart.floor, apart.isolated, self._rounds, self._stretch, untimed=SETTLING)


def _is_shorter(found: Timings, old: str, new: str) -> bool:
    """Whether new settings gain more than `LEAST_GAIN` and twice the standard error of what they gain in a round."""
    shares = [1 - b / a for a, b in zip(found.rounds_s[old], found.rounds_s[new], strict=True)]
    error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    return statistics.median(shares) > max(LEAST_GAIN, 2 * error)


def apply(model: nn.Module, settings: OverlapSettings) -> None:
    """Have PyTorch's own communication of a model go by settings that `tune` has found, before a step or between two.

    `gradwire.attach(..., overlap=settings)` does it for a method of gradwire.

    Args:
        model: a `DistributedDataParallel`, or the root of a model of `fully_shard`; every rank calls it alike.
        settings: as found; of DDP its buckets, of FSDP2 its prefetching.

    Raises:
        AttachError: another kind of model.
    """
    if isinstance(model, DistributedDataParallel):
        remake(model, plain_caps(caps_of(model), settings))
    elif is_fsdp2(model):
        set_prefetch(model, settings.prefetch)
    else:
        kind = type(model).__name__
        raise AttachError(f"apply takes a DistributedDataParallel or a model of fully_shard, and {kind} is none")


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _scalar(output: Any) -> Tensor:
    """A scalar of what a model returns, whose gradients have the shapes and the order of any loss's."""
    if (held := getattr(output, "loss", None)) is not None:
        output = held
    if isinstance(output, Mapping):
        output = output.get("loss", next(iter(output.values()), None))
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise AttachError(f"the model returned {type(output).__name__}: give tune loss=, which makes a scalar of it")
    return output if output.dim() == 0 else output.float().square().mean()


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Generator[None]:
    """Give the model its buffers and gradients back, and the generators of random numbers their states."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {tensor.get_device() for tensor in itertools.chain(model.parameters(), model.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
