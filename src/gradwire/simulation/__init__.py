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

from gradwire.simulation.failures import Failing as Failing
from gradwire.simulation.options import SimulateOptions as SimulateOptions
from gradwire.simulation.result import Interval as Interval
from gradwire.simulation.result import SimulatedRun as SimulatedRun
from gradwire.simulation.result import StepShares as StepShares
from gradwire.simulation.simulate import refuse_idle as refuse_idle
from gradwire.simulation.simulate import scale as scale
from gradwire.simulation.simulate import simulate as simulate
from gradwire.simulation.simulate import simulate_model as simulate_model
