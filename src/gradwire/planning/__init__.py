"""What a transformer will need and take on a cluster: memory, step time, and the layouts that are fastest.

| name | what it is |
|---|---|
| `Transformer`, `model` | sizes of a model; by name, or from a Hugging Face config.json |
| `Hardware`, `hardware` | a kind of GPU and its links; by name, or from a TOML file |
| `hardware_here`, `with_links` | this machine's rates, measured now; links of a link profile |
| `ParallelLayout` | how the model is spread over GPUs |
| `device_memory` | bytes of the fullest GPU, by kind |
| `held_by_training` | bytes that training a module holds on a rank under DDP or FSDP2, with a method |
| `step_time` | seconds of a step, as parts that sum to it |
| `Efficiencies` | the fractions of data sheets' rates that training reaches |
| `plan` | the fastest layouts that fit, why their neighbours lose, and what would help |
| `scale` | plans for more and more GPUs |
| `write`, `configurations`, `written_by` | files for torchrun, DeepSpeed or Megatron, and which layouts have some |
"""

from gradwire.planning.configuration import configurations as configurations
from gradwire.planning.configuration import write as write
from gradwire.planning.configuration import written_by as written_by
from gradwire.planning.hardware import Hardware as Hardware
from gradwire.planning.hardware import hardware as hardware
from gradwire.planning.held import HeldTraining as HeldTraining
from gradwire.planning.held import held_by_training as held_by_training
from gradwire.planning.here import hardware_here as hardware_here
from gradwire.planning.here import with_links as with_links
from gradwire.planning.layout import ParallelLayout as ParallelLayout
from gradwire.planning.memory import DeviceMemory as DeviceMemory
from gradwire.planning.memory import device_memory as device_memory
from gradwire.planning.models import model as model
from gradwire.planning.rates import Efficiencies as Efficiencies
from gradwire.planning.reasons import Neighbour as Neighbour
from gradwire.planning.reasons import PlannedLayout as PlannedLayout
from gradwire.planning.search import ScalingPlan as ScalingPlan
from gradwire.planning.search import plan as plan
from gradwire.planning.search import scale as scale
from gradwire.planning.step_time import StepTime as StepTime
from gradwire.planning.step_time import step_time as step_time
from gradwire.planning.transformer import Transformer as Transformer
