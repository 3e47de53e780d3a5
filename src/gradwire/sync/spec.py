"""The spec language of `gradwire.sync`: `local:H=8`, `diloco:H=20,outer=topk:0.02`, `demo:density=0.02`.

    spec    = name [":" item {"," item}]
    item    = option "=" value, or first of all the value of the name's main option: `local:8`
    value   = text, or "(" text ")" where the text has commas of its own: `outer=(int4,node=2)`

`H` is `every=` in Python. `outer` is `method=`: a spec of `gradwire.parse` for what carries the changes of a window,
which travel uncompressed without it. `last=` and `double_after=` make windows grow from `H` steps, `drift=` ends them
early. `double_after=` and `warmup=` may be percentages of `steps=`, the length of the run. All other options are named
as in Python. An optimizer that takes the place of the script's own takes over its learning rate, weight decay, betas
and eps, as far as it has such options and they are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from gradwire.core.method_spec import name_of, read
from gradwire.sync.methods import METHODS, Synchronised, SyncMethod, Where


@dataclass(frozen=True)
class Recipe:
    """A spec that was read.

    >>> parse("local:H=8,outer=int4").options
    {'H': 8, 'outer': 'int4'}
    """

    spec: str
    method: SyncMethod = field(repr=False)
    options: Mapping[str, Any]

    def optimizer(self, inner: Optimizer, model: nn.Module, **where: Unpack[Where]) -> Synchronised:
        """Return the optimizer to step in place of `inner`; close it in the end.

        Args:
            inner: the script's own optimizer of the model.
            model: alike on all ranks, and not wrapped in `DistributedDataParallel`.
            where: `group`, `seed` and `deadline_s` of `gradwire.Session`.

        Raises:
            GradwireError: as the class that the spec names.
        """
        made = self.method.optimizer(self.options, inner, model, where)
        made.session.method = self.spec
        return made


def is_sync(spec: str) -> bool:
    """Whether a spec is of this language, and not a reducer's.

    >>> is_sync("local:H=8"), is_sync("int4")
    (True, False)
    """
    return name_of(spec) in METHODS


def parse(spec: str) -> Recipe:
    """Read a spec.

    Raises:
        SpecError: an unknown name or option, or a value that cannot be read.
        CompositionError: options that do not fit together.

    >>> parse("diloco:H=20,outer=(topk:0.02,decay=0.9)").options
    {'H': 20, 'outer': 'topk:0.02,decay=0.9'}
    >>> parse("local:0")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CompositionError: every=0: a window has at least one step, so give 1 or more
    """
    method, given = read(spec, METHODS, "gradwire.sync")
    return Recipe(spec, method, given)
