"""All methods of the three spec languages, and what each is for: those for most users first, those for study last.

`gradwire methods` and docs/methods.md show it. A method is made known in the list of its language: `gradwire.methods`,
`gradwire.sync.methods` or `gradwire.asynchronous.methods`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from gradwire import spec as gradient_spec
from gradwire.asynchronous import methods as unwaiting
from gradwire.core.errors import SpecError
from gradwire.core.options import Option, meant
from gradwire.core.registry import Method
from gradwire.core.uses import USES, Recommended, Special, Study, Use
from gradwire.drivers.virtual import VirtualRanks
from gradwire.kernels.dispatch import Kernel, recorded
from gradwire.methods import methods
from gradwire.sync import methods as synchronised
from gradwire.sync import spec as sync_spec

__all__ = [
    "LANGUAGES",
    "Entry",
    "Language",
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
class Language:
    """A spec language.

    Attributes:
        title: what its methods have in common.
        parse: the function that reads it.
        grammar: what may be written, and the options that all of its methods have.
        shared: options that several of its methods have, with their defaults.
    """

    title: str
    parse: str
    grammar: str
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A method.

    Attributes:
        name: of the spec language.
        written: the name with what may follow it, in capitals: "topk:DENSITY".
        example: a spec that works.
        summary: what is sent, or what ranks do.
        use: what the method is for: `Recommended`, `Special` or `Study`.
        language: whose name it is.
        options: its own options with their defaults; of several choices the first is the default.
        shared: whether it takes the options that several methods of its language have.
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
    language: Language
    options: tuple[str, ...]
    shared: bool
    exchange: str
    feedback: bool
    fewest_ranks: int
    paper: str


def catalogue() -> tuple[Entry, ...]:
    """Return every method of every language: recommended ones first, then those for special cases, then for study.

    >>> [entry.name for entry in catalogue() if isinstance(entry.use, Recommended)]
    ['int4', 'powersgd', 'local']
    """
    entries = [*_gradient_entries(), *_synchronised_entries(), *_unwaiting_entries()]
    return tuple(sorted(entries, key=lambda entry: USES.index(type(entry.use))))


def entry(name: str) -> Entry:
    """Return the method of that name.

    Raises:
        SpecError: there is none, with the nearest.

    >>> entry("krum").fewest_ranks, entry("krum").options
    (5, ('bad=1',))
    """
    found = {each.name: each for each in catalogue()}
    if name not in found:
        raise SpecError(f"{name!r} is no method: {meant(name, found)}")
    return found[name]


def is_method(name: str) -> bool:
    """Whether it is the bare name of a method, without an argument and without options.

    >>> is_method("topk"), is_method("local"), is_method("topk:0.01")
    (True, True, False)
    """
    return name in methods() or name in synchronised.METHODS or name in unwaiting.METHODS


def _grammar(module: ModuleType) -> str:
    return (module.__doc__ or "").split("\n\n", 1)[1].strip("\n")


def _described(options: Mapping[str, Option]) -> tuple[str, ...]:
    return tuple(f"{name}={option.described}" for name, option in options.items())


GRADIENTS = Language("Gradients of every step", "gradwire.parse", _grammar(gradient_spec))
MODELS = Language(
    "Fewer synchronisations",
    "gradwire.sync.parse",
    _grammar(sync_spec),
    _described({k: v for method in synchronised.METHODS.values() for k, v in method.shared.items()}),
)
UNWAITING = Language("Ranks that do not wait", "gradwire.asynchronous.parse", _grammar(unwaiting))
LANGUAGES = (GRADIENTS, MODELS, UNWAITING)


def _gradient_entries() -> Iterator[Entry]:
    for method in methods().values():
        example = method.examples[0] if method.examples else method.name
        yield Entry(
            name=method.name,
            written=_written(method.name, method.argument),
            example=example,
            summary=method.summary,
            use=method.use,
            language=GRADIENTS,
            options=tuple(gradient_spec.described_options(method)),
            shared=False,
            exchange=method.exchange,
            feedback=method.feedback,
            fewest_ranks=gradient_spec.parse(example).fewest_ranks,
            paper=_paper(method),
        )


def _synchronised_entries() -> Iterator[Entry]:
    for name, method in synchronised.METHODS.items():
        own = {option: found for option, found in method.options.items() if option not in method.shared}
        yield _other(name, method, MODELS, own, shared=bool(method.shared))


def _unwaiting_entries() -> Iterator[Entry]:
    for name, method in unwaiting.METHODS.items():
        yield _other(name, method, UNWAITING, method.options, shared=False)


def _other(
    name: str,
    method: synchronised.SyncMethod | unwaiting.AsyncMethod,
    language: Language,
    own: Mapping[str, Option],
    shared: bool,
) -> Entry:
    """The entry of a method that is more than a reducer."""
    return Entry(
        name=name,
        written=_written(name, method.main),
        example=method.example,
        summary=method.summary,
        use=method.use,
        language=language,
        options=_described(own),
        shared=shared,
        exchange=method.exchange,
        feedback=False,
        fewest_ranks=1,
        paper=_paper(method),
    )


def _written(name: str, argument: str | None) -> str:
    return f"{name}:{argument.upper()}" if argument else name


def _paper(method: Method | synchronised.SyncMethod | unwaiting.AsyncMethod) -> str:
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
    'Triton: selection.all_finite, sign.sign_decode, sign.sign_encode'
    """
    return listed(entry) | _kernel_facts(entry)


def listed(entry: Entry) -> dict[str, str]:
    """Return what is known of a method without a step of it."""
    found = {
        "what is sent": entry.summary,
        "written": entry.written,
        "for example": entry.example,
        "read by": entry.language.parse,
        "place": entry.use.title,
        **_use(entry.use),
        "exchange": entry.exchange,
        "error feedback": "yes, unless ef=off" if entry.feedback else "",
        "fewest ranks": f"{entry.fewest_ranks} for {entry.example}" if entry.fewest_ranks > 1 else "",
        "options": ", ".join(entry.options),
        "shared options": ", ".join(entry.language.shared) if entry.shared else "",
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
"""Options of other languages that name the method or the codec by which messages are coded."""


def _kernel_facts(entry: Entry) -> dict[str, str]:
    if entry.language is not GRADIENTS:
        taken = {
            option.partition("=")[0] for option in (*entry.options, *(entry.language.shared if entry.shared else ()))
        }
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
    """The kernels that two steps of a matrix and a vector ask for: the second step uses what the first remembers."""
    reducer, model = gradient_spec.parse(spec), nn.Linear(32, 36)
    world_size = max(2, reducer.fewest_ranks)
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    with recorded() as asked:
        ranks = VirtualRanks(reducer, model, world_size)
        for _ in range(2):
            ranks.step([gradients] * world_size)
    return frozenset(asked)
