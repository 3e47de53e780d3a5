"""What DeepSpeed's own models say of a configuration, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from gradwire.config.deepspeed_file import AUTO, DeepSpeedFile
from gradwire.doctor.finding import Finding, Outcome, Unchecked

_MODELS: Mapping[str, tuple[str, ...]] = {
    "zero_optimization": ("deepspeed.runtime.zero.config:DeepSpeedZeroConfig",),
    "bf16": ("deepspeed.runtime.precision_config:DeepSpeedBF16Config",),
    "fp16": ("deepspeed.runtime.precision_config:DeepSpeedFP16Config",),
    "comms_logger": ("deepspeed.comm.config:CommsLoggerConfig",),
    "compile": ("deepspeed.runtime.compiler:CompileConfig", "deepspeed.compile.config:CompileConfig"),
    "hybrid_engine": ("deepspeed.runtime.config:HybridEngineConfig",),
    "tensorboard": ("deepspeed.monitor.config:TensorBoardConfig",),
    "wandb": ("deepspeed.monitor.config:WandbConfig",),
    "csv_monitor": ("deepspeed.monitor.config:CSVConfig",),
}
"""The model of each section, and where older versions have it."""


def refused_by_the_installed_one(file: DeepSpeedFile) -> Iterator[Outcome]:
    """What the models of the installed DeepSpeed refuse. They know names of their own version, which ours may lack."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        yield Unchecked("DeepSpeed's own models", "DeepSpeed is not installed here")
        return
    for section, places in _MODELS.items():
        keys = file.section(section)
        if not keys:
            continue
        model = _first(places)
        if model is None:
            yield Unchecked(f"DeepSpeed's own model of {section}", f"DeepSpeed {version} has none where it is known")
            continue
        for place, message in _refusals(model, keys):
            name = ".".join([section, *place])
            what = f"DeepSpeed {version} refuses {name}: {message}"
            evidence = f"its own model of {section} says so"
            yield Finding("error", "DeepSpeed's models", what, evidence, "Correct it, or leave it out.")


def _first(places: tuple[str, ...]) -> Any:
    """The first class of these that there is. DeepSpeed greets whoever imports it, which nobody asked for."""
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError), _quiet():
            return getattr(importlib.import_module(module), name)
    return None


def _refusals(model: Any, keys: Mapping[str, Any]) -> Iterator[tuple[list[str], str]]:
    """Where a model refuses something, and with which words."""
    try:
        with _quiet():
            model(**{name: value for name, value in keys.items() if value != AUTO})
    except Exception as error:  # DeepSpeed raises its own kinds besides pydantic's, and what it says is what is wanted
        listed = getattr(error, "errors", None)
        if callable(listed):
            for each in listed():  # pyright: ignore[reportUnknownVariableType, reportGeneralTypeIssues]
                yield [str(part) for part in each["loc"]], str(each["msg"])  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        else:
            yield [], str(error)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
