"""How fast collectives, exchanges and methods are on the network at hand: `gradwire bench`, from Python.

`measure` is called on the ranks of a group that is there, and `launch` starts ranks of its own: on the hosts of an
emulated network, or on this machine as it is. Both return `BenchTable`s.

>>> from gradwire import bench
>>> options = bench.BenchOptions(collectives=("all_reduce",), methods=("int4",), max_bytes="1M", hosts=2)
>>> [len(options.sizes), options.rate]
[9, '100mbit']
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
