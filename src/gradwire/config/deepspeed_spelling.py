"""Checks of how a configuration of DeepSpeed is written: names of keys, kinds of values, words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradwire.config.deepspeed_file import AUTO, DeepSpeedFile
from gradwire.config.deepspeed_keys import (
    ANY,
    CODE,
    CONFIG_CODE,
    NUMBER,
    REMOVED,
    REMOVED_SOURCE,
    SECTIONS,
    SEEN,
    SOURCE,
    SWITCH,
    TEXT,
    TOP,
    WHOLE,
)
from gradwire.core.nearest import nearest
from gradwire.doctor.finding import Finding, Outcome

CHECK = "keys"
_DTYPES = ("fp16", "bf16", "fp32")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "gradient_allreduce_op": ("mean", "sum"),
    "zero_optimization.offload_param.device": ("none", "cpu", "nvme"),
    "zero_optimization.offload_optimizer.device": ("none", "cpu", "nvme"),
}
"""Texts that are one of a few words, by dotted names."""


def keys_twice(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Keys that stand twice in one section, which DeepSpeed refuses and other readers of JSON pass by."""
    for name in file.twice:
        what = f"{name} stands twice in one section, and DeepSpeed refuses that"
        yield Finding("error", CHECK, what, f"two keys {name!r}", "Leave one of them out.", CONFIG_CODE)


def removed_keys(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Keys of features that DeepSpeed has no more."""
    for name, remedy in REMOVED.items():
        section, _, last = name.rpartition(".")
        if last in (file.section(section) if section else file.keys):
            what = f"{name} was removed: DeepSpeed {SEEN} refuses it, and older versions read it"
            yield Finding("error", CHECK, what, f"{name} is there", remedy, REMOVED_SOURCE)


def unknown_keys(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Names that DeepSpeed does not know, with the nearest one or the section that they belong to."""
    for name in file.keys:
        if name not in TOP and name not in REMOVED:
            what = f"{name} is a key that DeepSpeed passes by without a word"
            evidence = f"outside of any section DeepSpeed {SEEN} does not read {name!r}"
            yield Finding("warning", CHECK, what, evidence, _meant(name, "", TOP), SOURCE)
    for section, known in SECTIONS.items():
        for name in file.section(section):
            if name not in known and f"{section}.{name}" not in REMOVED:
                what = f"{section} has no key {name}, and DeepSpeed refuses unknown ones there"
                evidence = f"{section}.{name} is there"
                yield Finding("error", CHECK, what, evidence, _meant(name, section, known), CODE)


def _meant(name: str, here: str, known: Mapping[str, str]) -> str:
    """What to do about an unknown key: move it where it is known, or correct it."""
    for section, names in {"": TOP, **SECTIONS}.items():
        if section != here and name in names:
            return f"Move it into {section}." if section else "Move it out of the section, to the outermost level."
    near = nearest(name, {each: each for each in known})
    return f"Did you mean {near}? Correct its name, or leave it out." if near else "Leave it out."


def wrong_kinds(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Values of another kind than DeepSpeed expects. Outside of the sections it takes them without a check."""
    for section, known in {"": TOP, **SECTIONS}.items():
        for name, value in (file.section(section) if section else file.keys).items():
            wanted = known.get(name, ANY)
            if value is None or value == AUTO or _is_of(value, wanted):
                continue
            full = f"{section}.{name}" if section else name
            remedy = f"Write {wanted}, without quotes." if wanted in (SWITCH, WHOLE, NUMBER) else f"Write {wanted}."
            if section and isinstance(value, str) and _is_read_as(value, wanted):
                what = f"{full} is a text: DeepSpeed reads it as {value}, and others that read the file do not"
                yield Finding("warning", CHECK, what, f"{full} = {value!r}", remedy, SOURCE)
                continue
            what = f"{full} is no {wanted.removeprefix('a ').removeprefix('an ')}"
            if wanted == SWITCH:
                what = f"{full} is neither true nor false"
                what += ": every text counts as true" if isinstance(value, str) and not section else ""
            yield Finding("error", CHECK, what, f"{full} = {value!r}", remedy, SOURCE)


def _is_read_as(text: str, wanted: str) -> bool:
    """Whether the models of sections turn a text into what they want.

    >>> _is_read_as("true", SWITCH), _is_read_as("8", WHOLE), _is_read_as("5e8", WHOLE)
    (True, True, False)
    """
    if wanted == SWITCH:
        return text.lower() in ("true", "false")
    return wanted == WHOLE and text.isdecimal()


def _is_of(value: Any, wanted: str) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted == SWITCH:
        return isinstance(value, bool)
    if wanted == WHOLE:
        return is_number and value == value // 1
    if wanted == NUMBER:
        return is_number
    if wanted == TEXT:
        return isinstance(value, str)
    return wanted == ANY or isinstance(value, Mapping)


def words(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Words that are not among those that DeepSpeed knows, and stages that it has not."""
    for name, known in _WORDS.items():
        value = file.at(name)
        if isinstance(value, str) and value.lower() not in known:
            near = nearest(value, {each: each for each in known})
            remedy = f"Write {near}." if near else f"Write {', '.join(known[:-1])} or {known[-1]}."
            what = f"{name} cannot be {value!r}, and DeepSpeed refuses that"
            yield Finding("error", CHECK, what, f"{name} = {value!r}", remedy, SOURCE)
    stage = file.count("zero_optimization.stage")
    if stage is not None and stage not in range(4):
        what = f"ZeRO has no stage {stage}"
        remedy = "Write 0 for no sharding, 1 for optimizer states, 2 for gradients too, 3 for parameters too."
        yield Finding("error", CHECK, what, f"zero_optimization.stage = {stage}", remedy, SOURCE)
    section = file.keys.get("zero_optimization")
    remedy = 'Write "zero_optimization": {"stage": 1}, or the stage that is meant.'
    if isinstance(section, bool):
        what = "zero_optimization is no section but a switch, a form that DeepSpeed warns of"
        yield Finding("warning", CHECK, what, f"zero_optimization = {section}", remedy, SOURCE)
    elif section is not None and not isinstance(section, Mapping):
        what = "zero_optimization is no object, and DeepSpeed refuses that"
        yield Finding("error", CHECK, what, f"zero_optimization = {section!r}", remedy, SOURCE)
