"""Configurations for DeepSpeed, FSDP2 and Megatron: written with reasons, and checked.

`write_deepspeed`, `write_fsdp2` and `write_megatron` write a file for a training of a given shape, each setting with
its reason and its source. `check_deepspeed` and `check_megatron` look at files that somebody else wrote, and find what
`gradwire doctor` calls findings: a severity, what is wrong, the evidence and a remedy.
"""

from gradwire.config.check_deepspeed import check_deepspeed
from gradwire.config.check_megatron import check_megatron
from gradwire.config.setting import ConfigFile, Setting
from gradwire.config.shape import TrainingShape
from gradwire.config.write_deepspeed import write_deepspeed
from gradwire.config.write_fsdp2 import write_fsdp2
from gradwire.config.write_megatron import write_megatron

__all__ = [
    "ConfigFile",
    "Setting",
    "TrainingShape",
    "check_deepspeed",
    "check_megatron",
    "write_deepspeed",
    "write_fsdp2",
    "write_megatron",
]
