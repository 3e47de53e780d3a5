"""Data from elsewhere against the types they should have: one checker for files, saved states and messages.

The types are those of annotations (dataclasses, structs, lists and mappings of these), and msgspec checks them. What
does not fit is refused with a sentence that says where it stands and what it should be.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from gradwire.core.errors import GradwireError

T = TypeVar("T")

_UNSEEN = object()

_meets = threading.RLock()


def _renew_lock() -> None:
    """A thread that held it is not there in a forked process."""
    global _meets
    _meets = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


_WORDS = (
    (r"`int` >= (\d+)", r"a whole number from \1"),
    (r"`float` > 0.0", "a positive number"),
    (r"`float` >= 0.0", "a number that is not negative"),
    (r"`(int|float)` .*|Number out of range", "a number of a sensible size"),
    (r"`array` of .*length (>= )?(\d+).*", r"a list of \2"),
    (r"`int\b.*", "a whole number"),
    (r"`float\b.*", "a number"),
    (r"`str\b.*", "a text"),
    (r"`bool\b.*", "true or false"),
    (r"`array\b.*", "a list"),
    (r"`object\b.*", "a mapping"),
    (r"`Tensor\b.*", "a tensor"),
)
"""What msgspec expects, in its words and in ours."""


class _Reads(type):
    """Whatever `read` returns is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


class Read(metaclass=_Reads):
    """A type that is read in a way of its own: a value becomes what `read` returns.

    Where a value cannot be read, `read` raises a ValueError of the word "Expected" and what it should be.
    """

    @staticmethod
    def read(value: Any) -> object:
        """Return what a value becomes."""
        raise NotImplementedError


def thread_safe(kind: type[T]) -> type[T]:
    """Return a type that msgspec knows by now, so that several threads may read values of it.

    msgspec 0.22 collects the fields of a struct or a dataclass when it first meets it. A second thread that meets it at
    that moment finds half of them, which ends the process by a segmentation fault. Here one thread waits for the other.

    >>> msgspec.convert({"a": 1.5}, thread_safe(dict[str, float]))
    {'a': 1.5}
    """
    with _meets:
        msgspec.msgpack.Decoder(kind)
    return kind


def checked(
    data: object, kind: type[T], where: str, refusal: type[GradwireError], joint: str = ".", remedy: str = ""
) -> T:
    """Return data as a value of a type; fields that the type does not have are left out.

    Args:
        data: lists and mappings of numbers, texts and tensors.
        kind: the type.
        where: what the data are called in the sentence that refuses them.
        refusal: the class of that error.
        joint: what stands between `where` and the name of a field.
        remedy: what the sentence ends with.

    >>> checked({"rates": [1, "fast"]}, dict[str, list[int]], "plan", GradwireError)
    Traceback (most recent call last):
        ...
    gradwire.core.errors.GradwireError: plan[...][1] should be a whole number
    """
    try:
        return msgspec.convert(data, thread_safe(kind), dec_hook=_read, str_keys=True)
    except msgspec.ValidationError as error:
        raise refusal(sentence(error, where, joint, data) + remedy) from error
    except AttributeError as error:  # msgspec takes a tensor for a mapping, since it can be indexed
        raise refusal(f"{where} has a tensor where a mapping should be{remedy}") from error


def facts(needed: Mapping[str, Any], **optional: Any) -> Any:
    """Return the type of mappings that have at least some fields, by their types.

    Args:
        needed: what they must have.
        optional: what they may have.

    >>> checked({"name": "digits", "size": 3}, facts({"name": str}), "task", GradwireError).name
    'digits'
    """
    return msgspec.defstruct("Facts", [*needed.items(), *((name, kind, None) for name, kind in optional.items())])


def _read(kind: Any, value: Any) -> object:
    return kind.read(value) if issubclass(kind, Read) else value


def sentence(complaint: Exception, where: str = "it", joint: str = "s ", data: object = _UNSEEN) -> str:
    """What msgspec says against data, in our words.

    Args:
        complaint: msgspec's.
        where: what the data are called.
        joint: what stands between `where` and the name of a field.
        data: what was read, where it is at hand.

    >>> sentence(ValueError("Object missing required field `seed` - at `$.runs[0]`"), "plan", ".")
    "plan.runs[0] has no 'seed'"
    >>> sentence(ValueError("Expected `int`, got `str` - at `$.seed`"))
    'its seed should be a whole number, not a text'
    """
    what, _, place = str(complaint).partition(" - at `")
    path = place.partition("$")[2].removesuffix("`")
    here = where + joint + path[1:] if path.startswith(".") else where + path
    if what.startswith("Object missing"):
        return f"{here} has no {what.split('`')[1]!r}"
    if what.startswith("Object contains unknown"):
        return f"{here} has {what.split('`')[1]!r}, which is unknown"
    if what.startswith("Invalid value"):
        return f"{here} is {what.removeprefix('Invalid value ')}, which is unknown"
    if (wanted := _wanted(what)) is None:
        return f"{here}: {what}"
    keys = "have keys that are each " if place.startswith("key") else "be "
    return f"{here} should {keys}{wanted}{_not_told(what) if data is _UNSEEN else _not(data, path)}"


def _wanted(what: str) -> str | None:
    """What a value should be; None where msgspec says something else of it."""
    words = what.removeprefix("Expected ")
    return _ours(words) or (words if words != what else None)


def _ours(words: str) -> str | None:
    for theirs, ours in _WORDS:
        if found := re.fullmatch(theirs, words):
            return found.expand(ours)
    return None


def _not_told(what: str) -> str:
    """What stands there instead, as far as msgspec says so."""
    found = _ours(what.partition(", got ")[2])
    return f", not {found}" if found else ""


def _not(data: Any, path: str) -> str:
    """What stands there instead, where the path is known: msgspec leaves out the keys of mappings."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "..." or isinstance(data, Tensor):
            return ""
        data = data[name or int(index)]
    return f", not {shown(data)}"


def shown(value: object) -> str:
    """A value in few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def printable(text: str) -> str:
    """A text from elsewhere without what would move a terminal's cursor; its lines stay lines.

    >>> printable("bad\\x1b[2J\\rgood")
    'bad?[2J?good'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
