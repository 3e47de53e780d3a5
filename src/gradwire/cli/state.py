"""`gradwire state` and `gradwire reshard`: what `gradwire.save` has left in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands

OK = 0


def add_commands(commands: Commands) -> None:
    """Add both to the command line."""
    state = commands.add_parser("state", help="show what gradwire.save has left in a folder")
    state.add_argument("folder", type=Path, metavar="FOLDER")
    state.set_defaults(run=run_state)
    reshard = commands.add_parser("reshard", help="write the newest save in a folder for another number of ranks")
    reshard.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with the files of all ranks")
    reshard.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the run that will load it")
    reshard.set_defaults(run=run_reshard)


def run_state(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire state FOLDER` and return its exit status."""
    from gradwire.core import save_folder

    save_folder.newest(arguments.folder)  # refuses a folder without any
    table = Table(box=None, header_style="bold")
    for heading in ("save", "step", "ranks", "bytes", "files missing here", "method"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "method")
    for manifest in save_folder.manifests(arguments.folder):
        missing = ", ".join(map(str, manifest.missing(arguments.folder))) or "none"
        size = sum(file.size for file in manifest.files)
        name = save_folder.place(arguments.folder, manifest.number).name
        figures = (str(manifest.step), str(manifest.world_size), f"{size:,}", missing)
        table.add_row(name, *figures, str(manifest.head["reducer"]))
    console.print(table, markup=False)
    return OK


def run_reshard(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire reshard FOLDER --ranks N`."""
    from gradwire.core import save_folder

    made = save_folder.reshard_folder(arguments.folder, arguments.ranks)
    where = save_folder.place(arguments.folder, made.number)
    text = f"{where}: the save of step {made.step} for {made.world_size} ranks; each needs its file and the manifest"
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    return OK
