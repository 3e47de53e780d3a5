"""What each rank does in the tests of `Gossip`: a small model, mixed with those of neighbours after each step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.sync import CHOCO, DPSGD, SGP, Gossip, Increasing
from gradwire.sync.gossip import GossipMethod, Graph, Neighbours, OnePeerExponential, OnGraph, Ring, Weighted
from sync_cases import DEADLINE_S, adam, digest, flat, loss_of, model, sgd, told

STEPS = 6


def settings(ranks: int) -> dict[str, tuple[Graph, GossipMethod]]:
    """One of each kind, for 3 ranks."""
    return {
        "dpsgd": (Weighted([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [0.0, 0.25, 0.75]]), DPSGD()),
        "sgp": (Neighbours([[1, 2], [2], [0]]), SGP()),
        "one-peer": (OnePeerExponential(ranks), SGP()),
        "choco": (Ring(ranks), CHOCO("topk:0.2+int8", 0.3)),
        "choco-keyed": (Ring(ranks), CHOCO("qsgd:7", 0.5)),
    }


def local_step(network: nn.Module, inner: torch.optim.Optimizer, step: int, rank: int) -> None:
    inner.zero_grad()
    loss_of(network, step, rank, next(network.parameters()).dtype).backward()
    inner.step()


def rows(tensor: Tensor) -> Tensor:
    """The tensor of every rank."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return torch.stack(found)


def by_hand(rank: int, world_size: int) -> dict[str, float]:
    """How far D-PSGD and SGP are from their papers' equations, computed from all ranks' parameters."""
    found: dict[str, float] = {}
    for name in ("dpsgd", "sgp", "one-peer"):
        graph, method = settings(world_size)[name]
        network, worst = model(), 0.0
        inner, w, z = sgd(network), torch.ones(world_size, dtype=torch.float64), rows(flat(model()))
        x = z.clone()
        with Gossip(network, graph, method, deadline_s=DEADLINE_S) as gossip:
            for step in range(STEPS):
                local_step(network, inner, step, rank)
                x = x + rows(flat(network)) - z
                matrix = graph.matrices[step % graph.period]
                x, w = matrix @ x, matrix @ w
                z = x / w.unsqueeze(1)
                assert gossip.step()
                worst = max(worst, float((flat(network) - z[rank]).abs().max()))
            exact = float((z - z.mean(0)).square().sum(1).mean())
            worst = max(worst, abs(gossip.consensus_distance() / exact - 1))
            with gossip.evaluating():
                worst = max(worst, float((flat(network) - x.sum(0) / w.sum()).abs().max()))
            worst = max(worst, float((flat(network) - z[rank]).abs().max()))
            gossip.sync()
            worst = max(worst, float((flat(network) - x.sum(0) / w.sum()).abs().max()), gossip.consensus_distance())
        found[name] = worst
    return found


def compressed(rank: int, world_size: int) -> dict[str, Any]:
    """CHOCO keeps the mean of all ranks, and after `sync` all have the same bits and keep them."""
    graph, method = settings(world_size)["choco"]
    network, rounds, worst = model(), list[bool](), 0.0
    inner = sgd(network)
    with Gossip(network, graph, method, every=2, deadline_s=DEADLINE_S) as gossip:
        for step in range(2 * STEPS):
            local_step(network, inner, step, rank)
            mean = rows(flat(network)).mean(0)
            rounds.append(gossip.step())
            worst = max(worst, float((rows(flat(network)).mean(0) - mean).abs().max()))
        apart = gossip.consensus_distance()
        digests: list[str] = []
        for _ in range(2):
            gossip.sync()
            digests.append(digest(network.state_dict().values()))
        assert not gossip.step()
        assert gossip.step()  # nobody has anything new to say
        digests.append(digest(network.state_dict().values()))
        return {
            "mean": worst,
            "rounds": rounds,
            "apart": apart,
            "digests": digests,
            "moved": float((flat(network) - flat(model())).abs().max()),
            "steps": gossip.stats().steps,
        }


# Resuming -----------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """For each method the digests of a run without a break, and of one that went on from files between two rounds."""
    found: dict[str, list[str]] = {}
    for name, (graph, method) in settings(world_size).items():
        for breaks in (False, True):
            path = f"{folder}/{name}-{rank}.pt" if breaks else None
            found.setdefault(name, []).append(_run(rank, graph, method, path))
    return found


def _run(rank: int, graph: Graph, method: GossipMethod, path: str | None) -> str:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, Gossip]:
        network = model(torch.float32)
        return network, adam(network), Gossip(network, graph, method, every=Increasing(1, 2, 3), deadline_s=DEADLINE_S)

    network, inner, gossip = parts()
    for step in range(2 * STEPS):
        if path and step == STEPS:
            assert gossip.since == 1
            holders = {"model": network, "inner": inner, "gossip": gossip}
            torch.save({key: holder.state_dict() for key, holder in holders.items()}, path)
            gossip.close()
            network, inner, gossip = parts()
            saved = torch.load(path, weights_only=True)
            network.load_state_dict(saved["model"])
            inner.load_state_dict(saved["inner"])
            gossip.load_state_dict(saved["gossip"])
        local_step(network, inner, step, rank)
        gossip.step()
    own = digest(network.parameters())
    gossip.sync()
    together = digest(network.state_dict().values())
    gossip.close()
    return f"{own} {together} {gossip.steps}"


# Bytes --------------------------------------------------------------------------------------------------------------


def sent(rank: int, world_size: int) -> dict[str, list[int]]:
    """For each method the bytes that two rounds sent on this rank, and those that were predicted."""
    found: dict[str, list[int]] = {}
    for name, (graph, method) in settings(world_size).items():
        network = model(torch.float32)
        reducer = OnGraph(graph, method)
        predicted = [gradwire.cost(reducer, network, world_size, step=step, rank=rank).wire_bytes for step in (0, 1)]
        with Gossip(network, graph, method, deadline_s=DEADLINE_S) as gossip:
            before = gossip.stats().wire_bytes
            for _ in predicted:
                gossip.step()
            found[name] = [gossip.stats().wire_bytes - before, sum(predicted)]
    return found


# Buffers ------------------------------------------------------------------------------------------------------------


def buffers(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Each policy's buffers of BatchNorm, after a round and after `sync`, of ranks that have seen other data."""
    found: dict[str, dict[str, Any]] = {}
    for policy in ("average", "rank0", "own"):
        network = model()
        with Gossip(network, buffers=policy, deadline_s=DEADLINE_S) as gossip:
            loss_of(network, 0, rank)
            own = digest(network.buffers())
            gossip.step()
            kept = digest(network.buffers()) == own
            mean = rows(network.get_buffer("1.running_mean")).mean(0)
            gossip.sync()
            far = float((network.get_buffer("1.running_mean") - mean).abs().max())
            found[policy] = {"kept": kept, "digest": digest(network.buffers()), "far": far}
    return found


# What is wrong --------------------------------------------------------------------------------------------------------


def differing(rank: int, world_size: int) -> dict[str, str]:
    """What every rank is told where the last one has something else."""
    other, found = rank == world_size - 1, dict[str, str]()
    network = model()
    if other:
        with torch.no_grad():
            network.get_parameter("3.bias").add_(1)
    found["model"] = told(lambda: Gossip(network, deadline_s=DEADLINE_S))
    network = model()
    found["every"] = told(lambda: Gossip(network, every=2 if other else 1, deadline_s=DEADLINE_S))
    found["graph"] = told(lambda: Gossip(network, "complete" if other else "ring", deadline_s=DEADLINE_S))
    gossip = Gossip(network, deadline_s=DEADLINE_S)
    before = digest(network.parameters())
    if other:
        with torch.no_grad():
            network.get_parameter("0.weight")[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found["nan"] = told(gossip.step)
    found["kept"] = str(other or digest(network.parameters()) == before)
    gossip.close()
    found["closed"] = told(gossip.step)
    return found
