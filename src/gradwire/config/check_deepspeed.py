"""Is a configuration of DeepSpeed right? Checks of keys, batches, precision, sharding, communication and optimizers.

DeepSpeed checks the keys of a few sections, and the rest when the engine starts on all ranks, where a mistake costs a
place in the queue. A key outside of any section that it does not know it passes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradwire.config import deepspeed_rules, deepspeed_spelling
from gradwire.config.deepspeed_file import DeepSpeedFile, read_deepspeed
from gradwire.config.installed_deepspeed import refused_by_the_installed_one
from gradwire.doctor.finding import Examination, Outcome

Check = Callable[[DeepSpeedFile], Iterator[Outcome]]

CHECKS: tuple[Check, ...] = (
    deepspeed_spelling.keys_twice,
    deepspeed_spelling.removed_keys,
    deepspeed_spelling.unknown_keys,
    deepspeed_spelling.wrong_kinds,
    deepspeed_spelling.words,
    deepspeed_rules.batches,
    deepspeed_rules.filled_in_later,
    deepspeed_rules.two_precisions,
    deepspeed_rules.precision_that_is_off,
    deepspeed_rules.master_weights,
    deepspeed_rules.data_types,
    deepspeed_rules.keys_of_stage_3,
    deepspeed_rules.offload,
    deepspeed_rules.gradient_norm,
    deepspeed_rules.quantized_communication,
    deepspeed_rules.partition_size,
    deepspeed_rules.bucket_sizes,
    deepspeed_rules.scaling_of_gradients,
    deepspeed_rules.dtype_of_communication,
    deepspeed_rules.optimizers,
    deepspeed_rules.measuring_left_on,
    refused_by_the_installed_one,
)
"""Each looks at the whole configuration, and yields what it finds."""


def check_deepspeed(
    given: Mapping[str, Any] | str | Path, world_size: int | None = None, gpus_per_node: int | None = None
) -> Examination:
    """Check a configuration of DeepSpeed, and tell what is wrong, the worst first.

    Values of `"auto"` are left to whoever fills them in. Where DeepSpeed is installed, its own models are asked too.

    Args:
        given: a path, or what `json.load` made of it.
        world_size: ranks of data parallelism; without it, what depends on them is told as not checked.
        gpus_per_node: ranks that share a node; the same.

    Raises:
        SpecError: the file is no JSON object, or a number is no size.
        OSError: the file cannot be read.

    >>> found = check_deepspeed({"train_batch_size": 64, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, 8)
    >>> print(found.findings[0].text())
    ERROR    fp16 and bf16 are both on, and DeepSpeed refuses that
             evidence: fp16.enabled and bf16.enabled are true
             remedy:   Turn one of them off. Take bf16 where the GPU has it: its range needs no loss scaler.
             source:   https://www.deepspeed.ai/docs/config-json/
    """
    file = read_deepspeed(given, world_size, gpus_per_node)
    subject = "configuration of DeepSpeed" if isinstance(given, Mapping) else f"{given}, of DeepSpeed"
    return Examination.of((each for check in CHECKS for each in check(file)), subject)
