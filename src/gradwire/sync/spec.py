"""Specs of methods that keep models together: `local:8`, `diloco:20,outer=topk:0.02`, `demo:0.02`.

`H` is `every=` in Python. `outer` is `method=`: a spec for what carries the changes of a window, which travel
uncompressed without it. `last=` and `double_after=` make windows grow from `H` steps, `drift=` ends them early.
`double_after=` and `warmup=` may be percentages of `steps=`, the length of the run. All other options are named as in
Python. An optimizer that takes the place of the script's own takes over its learning rate, weight decay, betas and
eps, as far as it has such options and they are not written.
"""

from __future__ import annotations

from gradwire import spec as language
from gradwire.core.errors import SpecError
from gradwire.core.grammar import name_of
from gradwire.core.nearest import meant
from gradwire.core.recipe import Recipe
from gradwire.sync.methods import METHODS, Synchronised


def is_sync(spec: str) -> bool:
    """Whether a spec is of a method of `gradwire.sync`.

    >>> is_sync("local:H=8"), is_sync("int4")
    (True, False)
    """
    return name_of(spec) in METHODS


def parse(spec: str) -> Recipe[Synchronised]:
    """Read a spec by `gradwire.parse`, and refuse other methods than those of `gradwire.sync`.

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
    if not is_sync(spec):
        raise SpecError(f"{spec!r} is no method of gradwire.sync: {meant(name_of(spec), METHODS)}")
    return language.parse(spec)
