#!/usr/bin/env python3
"""Every message that a user can get, by the source alone, and which of them another version has no more.

A message is a text of several words: what an error, a warning or a parser says, what a console prints, and texts that
are kept in constants or returned, since many of those are said by somebody else. Documentation is left out. Fields of
f-strings are `{}`, so a renamed variable makes no other message.

    tools/messages.py                  list the messages of this tree
    tools/messages.py OLD              compare a folder or a git revision with this tree
    tools/messages.py OLD NEW          compare two of them; fails with status 1 where one is gone

A message that is gone is shown with the most similar of the new ones, where one is similar. Whether that says the same
is for a reader to judge.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SAYS = re.compile(r"(Error|Warning|Lost|Exit|Exception)$|^(warn|error|print|fail|refuse|exit)$")
"""Names of what is called with a message."""
SIMILAR = 0.5
"""From which ratio of common parts on a new message is shown beside one that is gone."""


class Message(NamedTuple):
    """A message.

    Attributes:
        text: with `{}` for each field.
        by: the error or function that says it; "text" where that stands elsewhere.
        where: file and line.
    """

    text: str
    by: str
    where: str


def messages_of(source: str, name: str) -> Iterator[Message]:
    """Yield the messages of a file.

    >>> [message.text for message in messages_of("raise ValueError(f'{n} ranks are ' 'too few')", "file.py")]
    ['{} ranks are too few']
    """
    yield from _within(ast.parse(source), "text", name)


def _within(node: ast.AST, by: str, name: str) -> Iterator[Message]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # documentation
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        by = called if SAYS.search(called) else by
    parts = _parts(node)
    text = " ".join("".join("{}" if isinstance(part, ast.AST) else part for part in parts).split())
    if len(re.findall(r"[^\W\d_]{2,}", text.replace("{}", ""))) >= (3 if by == "text" else 2) and " " in text:
        yield Message(text, by, f"{name}:{getattr(node, 'lineno', 0)}")
    for below in (part for part in parts if isinstance(part, ast.AST)) if parts else ast.iter_child_nodes(node):
        yield from _within(below, by, name)


def _parts(node: ast.AST) -> list[str | ast.AST]:
    """The texts and fields of which a node makes a text; none where it makes none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.sub(r"\{[^{}]*\}", "{}", node.value)]  # fields of str.format too
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in _parts(value)]
    if isinstance(node, ast.FormattedValue):
        return [node.value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_parts(node.left), _parts(node.right)]
        return [*(sides[0] or [node.left]), *(sides[1] or [node.right])] if any(sides) else []
    return []


def messages(tree: str) -> dict[str, Message]:
    """Return all messages by their texts: of a folder, or else of a git revision."""
    if Path(tree).is_dir():
        return _of_folder(Path(tree))
    packed = subprocess.run(["git", "archive", tree, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        return _of_folder(Path(folder))


def _of_folder(folder: Path) -> dict[str, Message]:
    top = folder / "src" if (folder / "src").is_dir() else folder
    found: dict[str, Message] = {}
    for path in sorted(top.rglob("*.py")):
        for message in messages_of(path.read_text(encoding="utf-8"), str(path.relative_to(folder))):
            found.setdefault(message.text, message)
    return found


def compared(old: Mapping[str, Message], new: Mapping[str, Message]) -> Iterator[str]:
    """Yield a paragraph for each message that is gone, with the most similar new one, and for each that is new."""
    appeared = [text for text in new if text not in old]
    for message in (old[text] for text in old if text not in new):
        near = difflib.get_close_matches(message.text, appeared, n=1, cutoff=SIMILAR)
        yield f"gone  {_line(message)}" + "".join(f"\n  now {_line(new[text])}" for text in near)
    yield from (f"new   {_line(new[text])}" for text in appeared)


def _line(message: Message) -> str:
    return f"{message.where} {message.by}: {message.text}"


def main(words: Sequence[str] | None = None) -> int:
    """List or compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("trees", nargs="*", metavar="TREE", help="a folder or a git revision")
    trees = parser.parse_args(words).trees
    if len(trees) > 2:
        parser.error("name at most two trees to compare")
    new = messages(trees[1] if len(trees) == 2 else str(ROOT))
    if not trees:
        print(*map(_line, new.values()), sep="\n")
        return 0
    lines = list(compared(messages(trees[0]), new))
    print(*lines, sep="\n")
    return int(any(line.startswith("gone") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
