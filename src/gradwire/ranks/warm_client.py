"""Stands for a rank that a warm process runs: `warm_client.py SOCKET LOG WORD...`. See `gradwire.ranks.warm`.

Run as a file, never imported: importing the package would import PyTorch, which is what this is there to avoid.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main() -> int:
    """Hand the job over, wait, and end as the rank ended."""
    path, log, *words = sys.argv[1:]
    job = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
            # Told to end, it tells the rank, which may still say where it was, and ends after it.
            signal.signal(signal.SIGTERM, lambda number, frame: connection.shutdown(socket.SHUT_WR))
            message = json.dumps(job).encode() + b"\0"
            sent = socket.send_fds(connection, [message], [1, 2])
            connection.sendall(message[sent:])
            answer = connection.recv(64)
        except OSError:
            answer = b""
    if not answer:
        said = Path(log).read_text(errors="replace").strip()
        print(f"the process of this host has ended{': ' + said if said else ' without a word'}", flush=True)
        return 1
    status = int(answer)
    if os.WIFSIGNALED(status):
        for number in (signal.SIGINT, signal.SIGTERM):  # else Python would make the first an exception
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
