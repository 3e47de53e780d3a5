"""Several cases in one set of processes, since starting those takes longer than most cases do."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist


def many_of(cases: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a case that runs some of these, and answers with what each returned.

    Its `jobs` are, by the name of what each answers, the name of a case and its arguments.
    """

    def many(rank: int, world_size: int, jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, (case, arguments) in jobs.items():
            print("case", name, flush=True)
            dist.barrier()
            out[name] = cases[case](rank, world_size, **arguments)
        dist.barrier()  # rank 0 has the store, which others may still ask
        return out

    return many
