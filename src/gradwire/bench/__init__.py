"""How fast collectives, exchanges and methods are on the network at hand: `gradwire bench`, from Python.

`measure` is called on the ranks of a group that is there, and `launch` starts ranks of its own: on the hosts of an
emulated network, or on this machine as it is. Both return `BenchTable`s.

>>> from gradwire import bench
>>> options = bench.BenchOptions(collectives=("all_reduce",), methods=("int4",), max_bytes="1M", hosts=2)
>>> [len(options.sizes), options.rate]
[9, '100mbit']
"""

from gradwire.bench.errors import BenchError
from gradwire.bench.launch import launch
from gradwire.bench.measure import measure
from gradwire.bench.options import BenchOptions
from gradwire.bench.results import BenchLink, BenchRow, BenchTable, read_tables, write_tables
from gradwire.bench.sweep import SweepSetting, sweep_plan
from gradwire.bench.timing import CallTimes

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
