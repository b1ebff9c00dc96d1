"""What a run needs before it starts, and which configuration fits."""

from solotune.plan.run import RunPlan as RunPlan
from solotune.plan.run import plan_run as plan_run
from solotune.plan.simulate import Simulated as Simulated
from solotune.plan.simulate import Work as Work
from solotune.plan.simulate import simulate as simulate
from solotune.plan.watch import Step as Step
