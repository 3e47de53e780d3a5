"""Methods that go with the optimizer, and what their specs become."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire.core.grammar import arguments, read
from gradwire.core.options import require_choice
from gradwire.core.places import Place
from gradwire.core.registry import SpecMethod

O_co = TypeVar("O_co", covariant=True)


class OptimizerMethod(SpecMethod, Generic[O_co]):
    """A method that wraps the script's optimizer, or takes its place."""

    @abstractmethod
    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse options that do not fit together, as far as that can be told without ranks."""

    @abstractmethod
    def optimizer(self, given: Mapping[str, Any], inner: Optimizer, model: nn.Module, where: Any) -> O_co:
        """Return the optimizer to step in place of `inner`."""

    def label_session(self, spec: str, made: Any) -> None:
        """Have reports of what was made call it by its spec, where there are any."""
        return

    @override
    def made(self, spec: str) -> Recipe[O_co]:
        (part,) = read(spec, joins=False)
        given = arguments(spec, part, self)
        for name, value in given.items():
            require_choice(spec, name, value, self.options[name].kind)
        self.check(given)
        return Recipe(spec, self, given)


@dataclass(frozen=True)
class Recipe(Generic[O_co]):
    """A spec that was read, of a method that goes with the optimizer. Specs that mean the same are equal.

    >>> import gradwire
    >>> gradwire.parse("local:8,outer=(int4,node=2)").options
    {'H': 8, 'outer': 'int4,node=2'}
    >>> gradwire.parse("ssp:4") == gradwire.parse("ssp,staleness=4")
    True
    """

    spec: str = field(compare=False)
    method: OptimizerMethod[O_co] = field(repr=False)
    options: Mapping[str, Any]

    @property
    def place(self) -> Place:
        """Where it can serve."""
        return self.method.place

    def optimizer(self, inner: Optimizer, model: nn.Module, **where: Any) -> O_co:
        """Return the optimizer to step in place of `inner`, as `gradwire.wrap` does.

        Args:
            inner: the script's own optimizer of the model.
            model: alike on all ranks, and not wrapped in `DistributedDataParallel`.
            where: `group`, `seed` and `deadline_s` of `gradwire.Session`; `address` for ranks that do not wait.

        Raises:
            GradwireError: as the class that the spec names.
        """
        made = self.method.optimizer(self.options, inner, model, where)
        self.method.label_session(self.spec, made)
        return made
