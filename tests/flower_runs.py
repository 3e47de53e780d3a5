"""Flower as a user starts it, with processes of its own that end with the test, and their logs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "flower_federation"
STARTED_S = 90.0
CONFIG = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


def environment(home: Path) -> dict[str, str]:
    """Nothing is told to anybody, nothing is fetched, and a process has one thread as the tests have."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default Ray's workers wait for whatever else runs
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


@contextlib.contextmanager
def superlink(folder: Path) -> Generator[Path]:
    """Run a SuperLink that simulates its nodes; yield Flower's home, whose configuration names it."""
    home = folder / "home"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / "config.toml").write_text(CONFIG.format(port=port))
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with running(command, home, folder / "superlink.log") as process:
        _await_health(process, f"http://127.0.0.1:{port}/health")
        yield home


@contextlib.contextmanager
def running(command: Sequence[str], home: Path, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """Start a process; end it and all that it has started afterwards, and show its log."""
    told = environment(home)
    with log.open("wb") as file:
        process = subprocess.Popen(list(command), env=told, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            for started in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(started, signal.SIGKILL)
            process.wait()
            print(f"--- {log.name}\n{log.read_text(errors='replace')}", flush=True)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have started, whatever session they are in."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _await_health(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + STARTED_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise AssertionError(f"no SuperLink at {address}")


def flwr_run(home: Path, log: Path, nodes: int, settings: str, deadline_s: float) -> str:
    """Run the example on so many simulated nodes; return what Flower has said."""
    resources = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
    command = ["flwr", "run", str(EXAMPLE), "here", "--stream", "--run-config", settings]
    with running([*command, "--federation-config", resources], home, log) as process:
        process.wait(deadline_s)
    return log.read_text(errors="replace")
