"""What holds the model of a comparison together over its ranks: DistributedDataParallel, or FSDP2."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer

from gradwire.compare.sides import Side


class ModelEngine(ABC):
    """Makes the side of one method. An engine serves one run."""

    @abstractmethod
    def check(self, spec: str, hosts: int) -> None:
        """Refuse a spec that names no method, or one that wants more hosts, before anything is started.

        Raises:
            GradwireError: which says what is wrong with it.
        """

    @abstractmethod
    def wrap(self, model: nn.Module, spec: str, bucket_mb: float) -> nn.Module:
        """The model as its method wants it, what is called in training. Every rank calls this."""

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer, spec: str) -> Side:
        """Put a method on a model that `wrap` returned, and on its optimizer. Every rank calls this."""
