"""Hardware, versions and network of a comparison."""

from __future__ import annotations

import datetime
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.network import Network
from gradwire.topology.processors import cores


def processor() -> str:
    """The processor's name and how many cores of it may be used."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
        name = found[1] if found else name
    except OSError:
        pass
    return f"{name}, {cores()} cores"


def environment(network: Network) -> dict[str, Any]:
    """Hardware, versions and network, for whoever reads the results elsewhere."""
    return {**machine(), "network": network.description, "network_mode": network.mode}


def machine() -> dict[str, Any]:
    """What hardware and versions these are."""
    return {
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradwire": gradwire.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["gradwire", *sys.argv[1:]]),
    }
