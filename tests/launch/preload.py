"""What the toy job's ranks, agents and coordinators import."""

# ruff: noqa: F401 - importing is all that this does
import scipy.optimize
import torch.distributed.elastic.agent.server.local_elastic_agent
import torch.distributed.launcher.api
import torch.distributed.run
from torch.testing._internal.distributed.fake_pg import FakeStore

import odyssey_megatron.cli
import odyssey_megatron.launch.agent.agent
import odyssey_megatron.launch.run
import odyssey_megatron.policy.costs.profile
import odyssey_megatron.policy.decide
import odyssey_megatron.rebuild.groups
