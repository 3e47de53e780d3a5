"""What training takes on ranks that need not exist: steps, stragglers, failures, servers, by a seed.

| name | what it is |
|---|---|
| `SimulateOptions` | what is trained, on which ranks and links, and what goes wrong |
| `simulate`, `scale` | what training by a method takes; the same for more and more ranks |
| `simulate_model` | the same for a model of your own |
| `refuse_idle` | refuses options that no method of a list has a use for |
| `SimulatedRun`, `StepShares`, `Interval` | what a step takes and for what, and how often to write checkpoints |
| `Failing` | the best interval between checkpoints, and those of Young (1974) and Daly (2006) |
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
