"""`ElasticOptimizer`: an optimizer around any other one, whose worker may be killed, leave and join."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypedDict, cast

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.sync.elastic.elastic import Elastic
from gradwire.sync.local_sgd import AveragingOptimizer


class ElasticWhere(TypedDict, total=False):
    """What `gradwire.wrap` may be told beside an elastic spec, see `Elastic`; `store` must be."""

    store: str | Store
    run: str
    name: str
    least: int
    begin_with: int | None
    resume: Mapping[str, Any] | None
    lost_after_s: float
    join_s: float
    seed: int
    deadline_s: float
    records: str | Path | None


class ElasticOptimizer(AveragingOptimizer):
    """Steps an inner optimizer, and averages the parameters of all workers at hand at the end of each window.

    It is an `AveragingOptimizer` around an `Elastic`, see there. Each worker has its own state of the inner optimizer.

    Example:
        optimizer = gradwire.wrap(torch.optim.AdamW(model.parameters()), model, "elastic:50", store="10.0.0.1:29400")
        while optimizer.averaging.steps < 100_000 and not optimizer.averaging.left:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        optimizer.close()
    """

    kept_by: ClassVar[str] = Elastic.kept_by
    """What `gradwire.save` and `gradwire.load` say of it."""

    @property
    def averaging(self) -> Elastic:
        """The averages of all workers' models, and who these are."""
        return cast(Elastic, self._averager)
