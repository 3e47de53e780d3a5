"""NCCL's algorithms and protocols, one setting of the environment each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradwire.bench.errors import BenchError
from gradwire.core.nearest import meant
from gradwire.doctor.kinds import ALGORITHM_NAMES, PROTOCOL_NAMES

EVERYWHERE = ("Ring", "Tree")
"""The others need a switch that adds up, or serve some collectives only: NCCL fails where one is forced that cannot."""


class SweepSetting(NamedTuple):
    """What NCCL is told, in processes of its own: it reads its variables once.

    Attributes:
        algorithm, protocol: the values of NCCL_ALGO and NCCL_PROTO; "" leaves the choice to NCCL.
    """

    algorithm: str = ""
    protocol: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the ranks.

        >>> SweepSetting("Ring", "LL128").variables, SweepSetting().variables
        ({'NCCL_ALGO': 'Ring', 'NCCL_PROTO': 'LL128'}, {})
        """
        named = {"NCCL_ALGO": self.algorithm, "NCCL_PROTO": self.protocol}
        return {name: value for name, value in named.items() if value}


def sweep_plan(
    algorithms: Sequence[str] = EVERYWHERE, protocols: Sequence[str] = PROTOCOL_NAMES
) -> tuple[SweepSetting, ...]:
    """Return the settings of a sweep: first what NCCL chooses by itself, then each algorithm with each protocol.

    Args:
        algorithms: of NCCL 2.30, see `ALGORITHM_NAMES`.
        protocols: see `PROTOCOL_NAMES`.

    Raises:
        BenchError: a name that NCCL does not have, with the nearest one: NCCL would end with an error.

    >>> [setting.variables for setting in sweep_plan(["Tree"], ["Simple"])]
    [{}, {'NCCL_ALGO': 'Tree', 'NCCL_PROTO': 'Simple'}]
    """
    for what, names, known in (("algorithm", algorithms, ALGORITHM_NAMES), ("protocol", protocols, PROTOCOL_NAMES)):
        for name in names:
            if name not in known:
                raise BenchError(f"NCCL has no {what} {name!r}: {meant(name, known)}")
    return (SweepSetting(), *(SweepSetting(each, protocol) for each in algorithms for protocol in protocols))
