"""`wrap`: any method that goes with the optimizer, around the script's own optimizer or in place of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from gradwire.asynchronous.optimizer import AsynchronousWhere
from gradwire.core.errors import SpecError
from gradwire.core.places import ELASTIC, UNWAITING, WINDOWS, Place, require_place
from gradwire.core.recipe import Recipe
from gradwire.spec import find, parse
from gradwire.sync.elastic import ElasticWhere


class Where(AsynchronousWhere, ElasticWhere):
    """What stands beside a spec; which of it, depends on the method."""


_BELONGS: Mapping[str, tuple[str, Collection[Place]]] = {
    "group": ("ranks of a process group", (WINDOWS, UNWAITING)),
    "address": ("workers that do not wait", (UNWAITING,)),
    **{
        name: ("workers that come and go", (ELASTIC,))
        for name in ElasticWhere.__annotations__
        if name not in AsynchronousWhere.__annotations__
    },
}
"""Whose what is that not every method may be told."""


def wrap(optimizer: Optimizer, model: nn.Module, method: str | Recipe[Any], **where: Unpack[Where]) -> Any:
    """Return the optimizer to step in place of `optimizer`, by which ranks train `model` together.

    It serves methods that average models every few steps (`local`, `diloco`, ...), also among workers that come and go
    (`elastic`), or mix them with those of neighbours (`gossip`, ...), optimizers that are compression (`demo`, `dion`,
    ...) and workers that do not wait (`ssp`, `asgd`, ...). Call it on every rank, with the same method. For methods
    that reduce gradients in every step there is `gradwire.attach`.

    Args:
        optimizer: the script's own, of the model. An optimizer that is compression takes over its learning rate, weight
            decay, betas and eps, as far as it has them and the spec does not say them. From now on it is not stepped
            by anybody else.
        model: alike on all ranks, and not wrapped in `DistributedDataParallel`.
        method: a spec such as `"local:8,outer=int4"`, or what `gradwire.parse` makes of it.
        where: `group` (the ranks), `seed` of all random choices, and `deadline_s`, the seconds after which a silent
            rank is an error. `address` is for workers that do not wait: this machine's, as others reach it. Workers
            that come and go have no `group`, and meet at a `store`; what else they may be told `Elastic` says.

    Returns:
        An optimizer. In the end all ranks get one model by its `sync()`, or by `finish()` where workers do not wait;
        then `close()` it.

    Raises:
        SpecError, CompositionError: a method that cannot be read, or that serves elsewhere, with the right call.
        GradwireError: as the class that the spec names.

    >>> import gradwire, torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = gradwire.wrap(torch.optim.AdamW(model.parameters()), model, "local:8,outer=int4")
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(16, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.sync()  # all ranks have one model now
    >>> optimizer.close()
    >>> gradwire.wrap(torch.optim.AdamW(model.parameters()), model, "int4")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: 'int4' reduces gradients in every step: call gradwire.attach(ddp, "int4")
    >>> dist.destroy_process_group()
    """
    if isinstance(method, str):
        places = (WINDOWS, UNWAITING, ELASTIC)
        require_place(method, find(method, *places).place, *places)
        method = parse(method)
    if not isinstance(method, Recipe):
        raise SpecError(f"{method!r} does not go with the optimizer: give what does, such as 'local:8,outer=int4'")
    for name in where:
        whose, places = _BELONGS.get(name, ("", (method.place,)))
        if method.place not in places:
            raise SpecError(f"{name}= is for {whose}, and {method.spec!r} has none: leave it out")
    return method.optimizer(optimizer, model, **where)
