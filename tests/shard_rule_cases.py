"""What each rank does in the tests of rules under FSDP2: every group's result next to the rule of whole gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from case_sets import many_of
from gradwire.reducers.aggregate import Median, Rule
from gradwire.spec import parse_rule
from weight_cases import Trained, digest, gradient, loss_of, network

GROUPS = (("0.",), ("2.",), ("4.",))
"""Prefixes of the parameters of each group: two layers are groups, and the root has the third."""


def batch(step: int, rank: int) -> Tensor:
    """Samples of a rank, whose gradients differ enough to be told apart."""
    generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
    return (1.0 + rank) * torch.randn(6, 12, generator=generator)


def own_gradients(step: int, ranks: int) -> list[dict[str, Tensor]]:
    """Every rank's own gradient."""
    found: list[dict[str, Tensor]] = []
    for rank in range(ranks):
        model = network()
        loss_of(model, batch(step, rank)).backward()
        found.append({name: gradient(p).clone() for name, p in model.named_parameters()})
    return found


def by_group(combine: Callable[[Tensor], Tensor], gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What each group's whole gradients become, one row a rank, by parameter."""
    found: dict[str, Tensor] = {}
    for prefixes in GROUPS:
        names = [name for name in gradients[0] if name.startswith(prefixes)]
        rows = torch.stack([torch.cat([own[name].reshape(-1) for name in names]) for own in gradients])
        parts = combine(rows).split([gradients[0][name].numel() for name in names])
        found |= {name: part.view_as(gradients[0][name]) for name, part in zip(names, parts, strict=True)}
    return found


def combining(rule: Rule) -> Callable[[Tensor], Tensor]:
    """The rule of whole rows. What it remembers it begins with zeros."""

    def combine(rows: Tensor) -> Tensor:
        if rule.remembers:
            rows = torch.cat([rows, torch.zeros(1, rows.shape[1])])
        doubles = rows.double()
        distances = (doubles[:, None] - doubles[None]).square().sum(-1) if rule.geometric else None
        return rule.combine(rows, distances)

    return combine


def clipped(clip: float, combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same of rows that are clipped before."""
    return lambda rows: combine(rows * (clip / rows.norm(dim=1, keepdim=True).clamp(min=clip)))


def mean(rows: Tensor) -> Tensor:
    """The mean of all rows."""
    return rows.mean(0)


PRIVATE = {"dp:0.2,noise=0": clipped(0.2, mean), "dp:0.2,noise=0,rule=median": clipped(0.2, combining(Median()))}


def as_by_group(rank: int, world_size: int, specs: list[str]) -> dict[str, dict[str, float]]:
    """How far the first step is from the rule of each group, and bytes that a rank sends."""
    plain = Trained("fsdp2", "none")
    plain.step(batch(0, rank))
    found: dict[str, dict[str, float]] = {"plain": {"off": 0.0, "sent": plain.session.stats().wire_bytes}}
    plain.session.close()
    for spec in specs:
        combine = PRIVATE[spec] if spec in PRIVATE else combining(cast(Rule, parse_rule(spec)))
        wanted = by_group(combine, own_gradients(0, world_size))
        trained = Trained("fsdp2", spec)
        trained.step(batch(0, rank))
        seen = dict(trained.model.named_parameters())
        whole = torch.cat([w.reshape(-1) for w in wanted.values()])
        off = torch.cat([(gradient(seen[name]) - w).reshape(-1) for name, w in wanted.items()])
        scale = float(whole.abs().max())
        found[spec] = {"off": float(off.abs().max()) / scale, "sent": trained.session.stats().wire_bytes}
        trained.session.close()
    return found


def not_finite(rank: int, world_size: int) -> dict[str, Any]:
    """A median leaves out what is not finite on one rank; where it is so on most, all ranks skip the step."""
    trained = Trained("fsdp2", "median")
    x = batch(0, rank)
    trained.step(x * torch.nan if rank == 1 else x)
    finite = all(bool(gradient(p).isfinite().all()) for p in trained.model.parameters())
    trained.session.close()
    skipping = Trained("fsdp2", "median", on_non_finite="skip")
    skipping.model[3].register_forward_hook(lambda module, inputs, output: output.detach())
    seen = torch.tensor([torch.nan, 1.0, 1.0]) if rank > 0 else torch.ones(3)  # the first row is in rank 0's shard
    (skipping.called(x) * seen).square().sum().backward()
    skipped = skipping.session.skipped
    dropped = all(p.grad is None for p in skipping.model.parameters())
    skipping.session.close()
    return {"finite": finite, "skipped": skipped, "dropped": dropped}


def resumed(rank: int, world_size: int, spec: str, folder: str) -> list[str]:
    """The end of a run without a break, and of one that was saved in the middle."""
    found: list[str] = []
    for breaks in (False, True):
        trained = Trained("fsdp2", spec)
        optimizer = torch.optim.SGD(trained.called.parameters(), 0.05)
        for step in range(6):
            if breaks and step == 3:
                gradwire.save(Path(folder), trained.session)
                before, state = trained, trained.called.state_dict()
                before.session.close()
                trained = Trained("fsdp2", spec)
                trained.called.load_state_dict(state)
                optimizer = torch.optim.SGD(trained.called.parameters(), 0.05)
                assert gradwire.load(Path(folder), trained.session) == 3
            trained.step(batch(step, rank))
            optimizer.step()
        found.append(digest(trained.model))
        trained.session.close()
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said of methods that have no half for shards, or too few ranks."""
    told: dict[str, str] = {}
    for spec in ("adasum", "krum:1", "median,worker_momentum=0.9"):
        try:
            Trained("fsdp2", spec).session.close()
            told[spec] = "nothing"
        except gradwire.CompositionError as error:
            told[spec] = str(error)
        dist.barrier()
    return told


CASES: dict[str, Callable[..., Any]] = {
    "as_by_group": as_by_group,
    "not_finite": not_finite,
    "resumed": resumed,
    "refused": refused,
}
many = many_of(CASES)
