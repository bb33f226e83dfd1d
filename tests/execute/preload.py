"""What jobs of emulated accelerators are forked from: ``JobServer.start(["tests.execute.preload"])``.

In that process, and in no other that merely imports ``tests.execute.emulation``, ``odyssey run`` asks
``EmulationPlanner``.
"""

import tests.launch.preload  # noqa: F401 - what all jobs of processes import
from odyssey_megatron.policy import planner
from tests.execute.emulation import EmulationPlanner

planner.PolicyPlanner = EmulationPlanner  # type: ignore[misc]
