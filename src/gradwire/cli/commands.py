"""How a command is added to the command line."""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""What commands are added to; argparse has no public name for it."""


def add_device(command: argparse.ArgumentParser, unset: str = "what the model lies on") -> None:
    """Add --device to a command that predicts training.

    Args:
        command: which.
        unset: what is taken where it is not given.
    """
    device = f"what ranks compute on: on a GPU more is coded and sent at a time (default: {unset})"
    command.add_argument("--device", choices=("cpu", "cuda"), help=device)


def add(
    commands: Commands, name: str, *, help: str, description: str, epilog: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a command whose help ends with a text that is shown as it is written; return its parser.

    Args:
        commands: the others.
        name: of the command.
        help: a line, for the list of all commands.
        description: what its own help begins with.
        epilog: what that ends with.
        options: further ones of the parser.
    """
    shown = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(
        name, help=help, description=description, epilog=epilog, formatter_class=shown, **options
    )
