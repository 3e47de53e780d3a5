"""No thread of Gloo is left when Python ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradwire.ranks import group_end

def train():
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()

def threads():
    return sum(path.read_text() == "pt_gloo_runloop\\n" for path in Path("/proc/self/task").glob("*/comm"))

group_end.before_init()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
print(threads(), end=" ")
group_end.destroy()
print(threads())
"""


@pytest.mark.one_draw_in(2)
def test_threads_of_a_group_end_with_it() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=120)
    assert said.stdout == "2 0\n"
