"""Specs of methods and partitions of federations: `fedprox:0.1+fedadam:0.03`, `dirichlet:0.3`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from gradwire.core.errors import SpecError
from gradwire.core.grammar import arguments, read, split
from gradwire.core.nearest import meant
from gradwire.core.options import options_of
from gradwire.core.places import CLIENTS
from gradwire.core.registry import SpecMethod, register_all
from gradwire.federated.methods import FedAvg, FederatedMethod, FedNova, FedProx, Scaffold
from gradwire.federated.optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi, Mean, ServerStep
from gradwire.federated.partition import DataPartition, Dirichlet, Even, LabelShards, Quantity

METHODS: Mapping[str, Callable[..., FederatedMethod]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "scaffold": Scaffold,
}
STEPS: Mapping[str, Callable[..., ServerStep]] = {
    "mean": Mean,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}
PARTITIONS: Mapping[str, Callable[..., DataPartition]] = {
    "even": Even,
    "dirichlet": Dirichlet,
    "shards": LabelShards,
    "quantity": Quantity,
}


class Named(NamedTuple):
    """What a name stands for: what clients do, and the server's step."""

    method: FederatedMethod
    optimizer: ServerStep

    place = CLIENTS


class _ClientMethod(SpecMethod):
    """A name of what clients do or of a step of the server, or of a partition; its first option is the argument."""

    place = CLIENTS

    def __init__(self, name: str, build: Callable[..., Any]) -> None:
        self.build, self.options, self.example = build, options_of(build), name
        self.argument = next(iter(self.options), None)
        self.summary = (inspect.getdoc(build) or "").partition("\n")[0]

    @override
    def made(self, spec: str) -> Named:
        return parse_method(spec)


_METHODS = {name: _ClientMethod(name, build) for name, build in {**METHODS, **STEPS}.items()}
_PARTITIONS = {name: _ClientMethod(name, build) for name, build in PARTITIONS.items()}
# A step of "mean" is what there is without one. Alone the name would be taken for the mean of gradients.
register_all({name: method for name, method in _METHODS.items() if name != "mean"})


def parse_method(text: str) -> Named:
    """Read a method, a step of the server, or both joined by "+". Options after a comma are those of what precedes.

    Raises:
        SpecError: a name or an option that there is not, two of one kind, or a number that cannot be read.
        CompositionError: a number out of range.

    >>> parse_method("fedprox:0.1+fedadam:0.03,tau=0.01")
    Named(method=FedProx(mu=0.1), optimizer=FedAdam(lr=0.03, beta1=0.9, tau=0.01, beta2=0.99))
    >>> parse_method("fednova")
    Named(method=FedNova(mu=0.0), optimizer=Mean(lr=1.0))
    """
    built = [_built(piece, _METHODS, text) for piece in split(text, "+")]
    methods = [part for part in built if isinstance(part, FederatedMethod)]
    steps = [part for part in built if isinstance(part, ServerStep)]
    if len(methods) > 1 or len(steps) > 1:
        raise SpecError(
            f"{text!r} names two of one kind: join one of {', '.join(METHODS)} with one of {', '.join(STEPS)}"
        )
    return Named(methods[0] if methods else FedAvg(), steps[0] if steps else Mean())


def parse_partition(text: str) -> DataPartition:
    """Read "even", "dirichlet:ALPHA", "shards:NUMBER" or "quantity:ALPHA".

    Raises:
        SpecError, CompositionError: as `parse_method`.

    >>> parse_partition("dirichlet:0.3")
    Dirichlet(alpha=0.3)
    """
    return _built(text, _PARTITIONS, text)


def _built(piece: str, known: Mapping[str, _ClientMethod], text: str) -> Any:
    """What one name with its options builds."""
    (part,) = read(piece, joins=False)
    if part.name not in known:
        raise SpecError(f"unknown name {part.name!r} in {text!r}: {meant(part.name, known)}")
    return known[part.name].build(**arguments(text, part, known[part.name]))
