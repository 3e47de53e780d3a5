from .errors import BenchError
from .launch import launch
from .measure import measure
from .options import BenchOptions
from .results import BenchLink, BenchRow, BenchTable, read_tables, write_tables
from .sweep import SweepSetting, sweep_plan
from .timing import CallTimes

__all__ = [
    "BenchError",
    "BenchLink",
    "BenchOptions",
    "BenchRow",
    "BenchTable",
    "CallTimes",
    "SweepSetting",
    "launch",
    "measure",
    "read_tables",
    "sweep_plan",
    "write_tables",
]
