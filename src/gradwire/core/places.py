"""Where a method can serve, and the call that takes its spec there."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.core.errors import SpecError


class Place(NamedTuple):
    """Where a method can serve.

    Attributes:
        title: what its methods have in common, as a heading.
        does: what they do, after "it".
        call: what to write; the spec takes the place of the braces.
    """

    title: str
    does: str
    call: str

    def call_of(self, spec: str) -> str:
        """Return the call that takes a spec here.

        >>> WINDOWS.call_of("local:8")
        'gradwire.wrap(optimizer, model, "local:8")'
        """
        return self.call.format(spec)


_WRAPS = ("goes with the optimizer and without DistributedDataParallel", 'gradwire.wrap(optimizer, model, "{}")')

EVERY_STEP = Place("Gradients of every step", "reduces gradients in every step", 'gradwire.attach(ddp, "{}")')
WINDOWS = Place("Fewer synchronisations", *_WRAPS)
UNWAITING = Place("Ranks that do not wait", *_WRAPS)
ELASTIC = Place(
    "Workers that come and go",
    "goes with the optimizer and with a store, and without a process group",
    'gradwire.wrap(optimizer, model, "{}", store="host:29400")',
)
CLIENTS = Place("Updates of clients", "is for clients of federations", "`gradwire federate --method {}`")
BASELINES = Place(
    "PyTorch's own",
    "is a method of PyTorch's, which only `gradwire compare` takes",
    "`gradwire compare --methods torch.fp32 {}`",
)


def require_place(spec: str, place: Place, *wanted: Place) -> None:
    """Refuse a method that cannot serve where its spec stands.

    Raises:
        SpecError: with the call that takes it.

    >>> require_place("int4", EVERY_STEP, WINDOWS, UNWAITING)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: 'int4' reduces gradients in every step: call gradwire.attach(ddp, "int4")
    """
    if place not in wanted:
        verb = "run" if place.call.startswith("`") else "call"
        raise SpecError(f"{spec!r} {place.does}: {verb} {place.call_of(spec)}")
