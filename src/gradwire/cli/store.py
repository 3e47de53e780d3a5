"""`gradwire store`: where workers of elastic training meet."""

from __future__ import annotations

import argparse

from rich.console import Console

from gradwire.cli.commands import Commands

OK = 0


def add_commands(commands: Commands) -> None:
    """Add it to the command line."""
    store = commands.add_parser("store", help="hold the store at which workers of gradwire.sync.Elastic meet")
    store.add_argument(
        "--port", type=int, default=29400, metavar="N", help="to listen on, 0 for one that is free (default: 29400)"
    )
    store.set_defaults(run=run_store)


def run_store(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire store --port N`."""
    import socket

    from gradwire.sync.elastic import serve

    def announce(port: int) -> None:
        console.print(f"store: {socket.gethostname()}:{port}", highlight=False, soft_wrap=True, markup=False)

    serve(arguments.port, announce)
    return OK
