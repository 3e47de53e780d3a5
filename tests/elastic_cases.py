"""A worker of the elastic tests: trains a small model, says where it is in lines of JSON, and dies where it is told."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.drivers.process_group import GroupTransport
from gradwire.sync import DiLoCo, Elastic
from gradwire.sync.elastic.link import GroupLine
from gradwire.sync.elastic.rounds import Rounds
from gradwire.tasks.builtin import load_digits

BATCH = 32


def prepare() -> None:
    """What workers have in common, once for all of them."""
    importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    load_digits()
    torch.optim.SGD(network(0).parameters(), 0.1)  # the first optimizer imports much
    gc.freeze()


def ready() -> None:
    """Nothing: whoever waits for its end knows that all is prepared."""


def network(seed: int) -> nn.Module:
    """A perceptron for digits, the same on all processors but for what the seed changes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def batch(seed: int, window: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Drawn by where a worker is in the run, so that nothing depends on who was killed before."""
    data = load_digits()
    generator = torch.Generator().manual_seed(((seed * 10_000 + window) * 64 + rank) * 512 + step)
    chosen = torch.randint(len(data.train_labels), (BATCH,), generator=generator)
    return data.train_images[chosen], data.train_labels[chosen]


def digest(model: nn.Module) -> str:
    whole = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def loss_of(model: nn.Module) -> float:
    """On all images that were held out and all that were not: what differs between runs is the model alone."""
    data = load_digits()
    with torch.no_grad():
        outputs = model(torch.cat([data.train_images, data.test_images]))
        return float(functional.cross_entropy(outputs, torch.cat([data.train_labels, data.test_labels])))


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(words: str) -> None:
    """Train as the words say."""
    torch.set_num_threads(1)
    plan = json.loads(words)
    say(pid=os.getpid())
    if plan.get("dies"):
        signal_at(signal.SIGKILL, **plan["dies"])
    if plan.get("stops"):
        signal_at(signal.SIGSTOP, **plan["stops"])
    model = network(plan["model_seed"])
    options: dict[str, Any] = {"every": 5, "deadline_s": 20.0, "lost_after_s": 1.5, **plan["options"]}
    with Elastic(model, outer=DiLoCo(), store=plan["store"], run=plan["run"], name=plan["name"], **options) as elastic:
        elastic.leave_on(signal.SIGTERM)
        optimizer = torch.optim.SGD(model.parameters(), plan["rate"])
        say(began=elastic.windows, digest=digest(model), workers=elastic.world_size)
        step = 0
        while elastic.samples < plan["samples"] and not elastic.left:
            inputs, targets = batch(plan["seed"], elastic.windows, elastic.rank, step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            time.sleep(plan.get("pause_s", 0.0))
            step += 1
            if elastic.step(len(inputs)):
                say(
                    windows=elastic.windows, digest=digest(model), workers=elastic.world_size, kind=elastic.last.kind,
                    samples=elastic.samples, loss=loss_of(model),
                )  # fmt: skip
                step = 0
        changes = [{**vars(change)} for change in elastic.changes]
        say(
            ended=elastic.windows, digest=digest(model), samples=elastic.samples, left=elastic.left, changes=changes,
            sent=elastic.sent_bytes, handed=elastic.handed_bytes,
        )  # fmt: skip


# Where to die, and where to stop --------------------------------------------------------------------------------------


def signal_at(sent: signal.Signals, kind: str, number: float) -> None:
    """Have this process killed by SIGKILL, or stopped by SIGSTOP.

    Args:
        sent: the signal.
        kind: "time", so many seconds from now; "before" or "after" the `number`-th line that it says in a round's log;
            "issue", before its `number`-th collective; "connect", before it connects for the `number`-th time;
            "end", once it has averaged its last window.
        number: see there.
    """

    def act() -> None:
        os.kill(os.getpid(), sent)

    if kind == "time":
        timer = threading.Timer(number, act)
        timer.daemon = True
        timer.start()
    elif kind == "issue":
        GroupTransport.issue = _counted(GroupTransport.issue, int(number), act, is_before=True)
    elif kind == "connect":
        GroupLine.connected = _counted(GroupLine.connected, int(number), act, is_before=True)
    elif kind == "end":
        Elastic.close = _counted(Elastic.close, 1, act, is_before=True)
    else:
        Rounds.append = _counted(Rounds.append, int(number), act, is_before=kind == "before")


def _counted(done: Callable[..., Any], number: int, act: Callable[[], None], is_before: bool) -> Callable[..., Any]:
    left = [number]

    def counted(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and is_before:
            act()
        result = done(*given)
        if left[0] == 0 and not is_before:
            act()
        return result

    return counted


if __name__ == "__main__":
    main(sys.argv[1])
