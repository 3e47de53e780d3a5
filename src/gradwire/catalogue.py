"""All methods of gradients and of optimizers, and what each is for: those for most users first, those for study last.

`gradwire methods` and docs/methods.md show it. It is made of the table of `gradwire.core.registry`, in which
`gradwire.methods`, `gradwire.sync.methods` and `gradwire.asynchronous.methods` enter theirs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from gradwire import composition, kernels
from gradwire.asynchronous import methods as unwaiting
from gradwire.core import grammar
from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.core.options import described
from gradwire.core.places import ELASTIC, EVERY_STEP, UNWAITING, WINDOWS, Place
from gradwire.core.registry import Method, SpecMethod, table
from gradwire.core.uses import USES, Recommended, Special, Study, Use
from gradwire.drivers.virtual import VirtualRanks
from gradwire.kernels.dispatch import Kernel, recorded
from gradwire.spec import as_method
from gradwire.sync import elastic
from gradwire.sync import methods as synchronised
from gradwire.sync import spec as sync_spec

__all__ = [
    "GRAMMAR",
    "SHARED",
    "TEXTS",
    "Entry",
    "Recommended",
    "Special",
    "Study",
    "Use",
    "catalogue",
    "entry",
    "facts",
    "listed",
]


@dataclass(frozen=True)
class Entry:
    """A method.

    Attributes:
        name: what its specs begin with.
        written: the name with what may follow it, in capitals: "topk:DENSITY".
        example: a spec that works.
        summary: what is sent, or what ranks do.
        use: what the method is for: `Recommended`, `Special` or `Study`.
        place: where it serves.
        options: its own options with their defaults; of several choices the first is the default.
        shared: whether it takes the options that all methods with windows have.
        exchange: how what is sent becomes a result; "own" for messages of its own.
        feedback: whether what was not sent is remembered and sent later, unless a spec says otherwise.
        fewest_ranks: how many ranks the example needs at least.
        paper: where it was published; empty where it is no paper's, or where its own documentation names none.
    """

    name: str
    written: str
    example: str
    summary: str
    use: Use
    place: Place
    options: tuple[str, ...]
    shared: bool
    exchange: str
    feedback: bool
    fewest_ranks: int
    paper: str


def catalogue() -> tuple[Entry, ...]:
    """Return every method of the places in `TEXTS`: recommended ones first, then special cases, then for study.

    >>> [entry.name for entry in catalogue() if isinstance(entry.use, Recommended)]
    ['int4', 'powersgd', 'local']
    """
    entries = [_entry(name, method) for name, method in _methods().items()]
    return tuple(sorted(entries, key=lambda entry: USES.index(type(entry.use))))


def entry(name: str) -> Entry:
    """Return the method of that name.

    Raises:
        SpecError: there is none, with the nearest.

    >>> entry("krum").fewest_ranks, entry("krum").options
    (5, ('bad=1',))
    """
    methods = _methods()
    if name not in methods:
        raise SpecError(f"{name!r} is no method: {meant(name, methods)}")
    return _entry(name, methods[name])


def _methods() -> dict[str, Method | SpecMethod]:
    return {name: method for name, method in table().items() if method.place in TEXTS}


def _text(module: ModuleType) -> str:
    """What a module's documentation says after its first line."""
    return (module.__doc__ or "").split("\n\n", 1)[1].strip("\n")


GRAMMAR = _text(grammar)
"""How every spec is written."""

TEXTS: Mapping[Place, str] = {
    EVERY_STEP: _text(composition),
    WINDOWS: _text(sync_spec),
    ELASTIC: _text(elastic),
    UNWAITING: _text(unwaiting),
}
"""The options of a place's methods, in words."""

SHARED = described({k: v for method in synchronised.METHODS.values() for k, v in method.shared.items()})
"""Options of whatever has windows of H steps, with their defaults."""


def _entry(name: str, method: Method | SpecMethod) -> Entry:
    shared = method.shared if isinstance(method, synchronised.SyncMethod) else {}
    return Entry(
        name=name,
        written=f"{name}:{method.argument.upper()}" if method.argument else name,
        example=method.example,
        summary=method.summary,
        use=method.use,
        place=method.place,
        options=described({option: found for option, found in method.options.items() if option not in shared}),
        shared=bool(shared),
        exchange=method.exchange,
        feedback=isinstance(method, Method) and method.feedback,
        fewest_ranks=as_method(method.example).fewest_ranks if method.place is EVERY_STEP else 1,
        paper=_paper(method),
    )


def _paper(method: Method | SpecMethod) -> str:
    """What stands under References in the documentation of what computes a method."""
    found = re.search(r"^References:\n((?:    .*\n?|\n)+)", inspect.getdoc(method.build) or "", re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def facts(entry: Entry) -> dict[str, str]:
    """Return all that is known of a method, by what is told; what does not apply is left out.

    The kernels of a method of gradients are those that two steps of its example ask for on virtual ranks. These steps
    take up to half a second, and `listed` does without them. Kernels that belong to an optimizer are not told.

    >>> from gradwire.catalogue import entry
    >>> facts(entry("trimmed"))["fewest ranks"]
    '3 for trimmed:1'
    >>> facts(entry("sign"))["kernels on CUDA"]
    'Triton: sign.sign_decode, sign.sign_encode'
    """
    return listed(entry) | _kernel_facts(entry)


def listed(entry: Entry) -> dict[str, str]:
    """Return what is known of a method without a step of it."""
    found = {
        "what is sent": entry.summary,
        "written": entry.written,
        "for example": entry.example,
        "taken by": entry.place.call_of(entry.example),
        "place": entry.use.title,
        **_use(entry.use),
        "exchange": entry.exchange,
        "error feedback": "yes, unless ef=off" if entry.feedback else "",
        "fewest ranks": f"{entry.fewest_ranks} for {entry.example}" if entry.fewest_ranks > 1 else "",
        "options": ", ".join(entry.options),
        "shared options": ", ".join(SHARED) if entry.shared else "",
        "paper": entry.paper,
    }
    return {name: text for name, text in found.items() if text}


def _use(use: Use) -> dict[str, str]:
    if isinstance(use, Recommended):
        return {
            "write": use.spec,
            "link": use.link,
            "model": use.model,
            "accuracy": use.cost,
            "measured": ", ".join(use.measured),
        }
    return {"for": use.case} if isinstance(use, Special) else {"known": use.reason}


# Kernels -----------------------------------------------------------------------------------------------------

KERNELS_ON = {"kernels on a CPU": "cpu", "kernels on CUDA": "cuda"}
"""What is told of kernels, and the type of device of each."""

COMPILER_TITLES = {"numba": "numba", "triton": "Triton", "torch": "torch"}
NO_KERNELS = "none: operators of torch do all"
CODED_BY = ("outer", "update", "method", "codec")
"""Options of other places that name the method or the codec by which messages are coded."""


def _kernel_facts(entry: Entry) -> dict[str, str]:
    if entry.place is not EVERY_STEP:
        taken = {option.partition("=")[0] for option in (*entry.options, *(SHARED if entry.shared else ()))}
        return {name: f"those of {option}=" for option in CODED_BY if option in taken for name in KERNELS_ON}
    asked = _kernels_asked_for(entry.example)
    return {name: _run_in(asked, kind) for name, kind in KERNELS_ON.items()}


def _run_in(asked: frozenset[Kernel[..., object]], kind: str) -> str:
    """The names of kernels, by what they run in on a type of device."""
    names: dict[str, list[str]] = {title: [] for title in COMPILER_TITLES.values()}
    for kernel in sorted(asked, key=lambda kernel: (kernel.family, kernel.name)):
        names[COMPILER_TITLES[kernel.runs_in(kind)]].append(f"{kernel.family}.{kernel.name}")
    return "; ".join(f"{title}: {', '.join(found)}" for title, found in names.items() if found) or NO_KERNELS


@functools.cache
def _kernels_asked_for(spec: str) -> frozenset[Kernel[..., object]]:
    """The kernels that two steps of a matrix and a vector ask for: the second step uses what the first remembers.

    The engine looks for values that are not finite in every method's steps, so that kernel tells nothing of a method.
    """
    reducer, model = as_method(spec), nn.Linear(32, 36)
    world_size = max(2, reducer.fewest_ranks)
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    with recorded() as asked:
        ranks = VirtualRanks(reducer, model, world_size)
        for _ in range(2):
            ranks.step([gradients] * world_size)
    return frozenset(kernel for kernel in asked if kernel.name != kernels.all_finite.__name__)
