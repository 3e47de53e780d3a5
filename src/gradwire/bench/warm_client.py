"""Stands for a rank that a warm host process runs: `warm_client.py SOCKET JOB LOG`. See `gradwire.bench.warm`.

Run as a file, never imported: importing the package would import PyTorch, which is what this is there to avoid.
"""

import os
import signal
import socket
import sys
from pathlib import Path


def main() -> int:
    """Hand the job over, wait, and end as the rank ended."""
    path, job, log = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
            socket.send_fds(connection, [job.encode()], [1, 2])
            answer = connection.recv(64)
        except OSError:
            answer = b""
    if not answer:
        said = Path(log).read_text(errors="replace").strip()
        print(f"the process of this host has ended{': ' + said if said else ' without a word'}", flush=True)
        return 1
    status = int(answer)
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would make it an exception
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
