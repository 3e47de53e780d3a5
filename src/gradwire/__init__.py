"""gradwire: train PyTorch models over networks slower than their processors.

ddp = DistributedDataParallel(model)
session = gradwire.attach(ddp, "int4")

Names of `__init__.pyi` are loaded when they are first used, so that `gradwire --help` does not wait for PyTorch.
"""

import lazy_loader

from gradwire.core.version import VERSION

__version__ = VERSION
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
