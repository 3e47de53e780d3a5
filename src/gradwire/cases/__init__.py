"""Case studies with formulas and published figures, and calculators of what a setting saves.

| name | what it is |
|---|---|
| `case_study`, `STUDIES` | a published training: bytes, memory and time with formulas, and what was reported |
| `CaseStudy`, `Figure`, `spoken` | what that is made of; a number in its unit |
| `step_volumes`, `Volume`, `SYMBOLS` | bytes that a GPU sends in a step, by kind; what symbols stand for |
| `MEMORY` | the formula of each part of memory |
| `window_bytes`, `utilisation` | islands that average their models every few steps |
| `savings`, `Saving`, `CALCULATORS` | what precision, density, fewer averages and accumulation save |
| `compressed_steps`, `local_steps`, `ExtraSteps`, `ASSUMPTIONS` | steps that theory adds, and what it assumes |
| `declared_delta` | the share of a gradient's energy that a method keeps of any gradient |
| `parameter_shapes` | the matrices of a transformer by name, for `gradwire.cost` |
"""

from gradwire.cases.convergence import ASSUMPTIONS as ASSUMPTIONS
from gradwire.cases.convergence import ExtraSteps as ExtraSteps
from gradwire.cases.convergence import compressed_steps as compressed_steps
from gradwire.cases.convergence import declared_delta as declared_delta
from gradwire.cases.convergence import local_steps as local_steps
from gradwire.cases.figure import CaseStudy as CaseStudy
from gradwire.cases.figure import Figure as Figure
from gradwire.cases.figure import spoken as spoken
from gradwire.cases.islands import parameter_shapes as parameter_shapes
from gradwire.cases.islands import utilisation as utilisation
from gradwire.cases.islands import window_bytes as window_bytes
from gradwire.cases.savings import CALCULATORS as CALCULATORS
from gradwire.cases.savings import Saving as Saving
from gradwire.cases.savings import savings as savings
from gradwire.cases.studies import STUDIES as STUDIES
from gradwire.cases.studies import case_study as case_study
from gradwire.cases.volumes import MEMORY as MEMORY
from gradwire.cases.volumes import SYMBOLS as SYMBOLS
from gradwire.cases.volumes import Volume as Volume
from gradwire.cases.volumes import step_volumes as step_volumes
