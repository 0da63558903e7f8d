"""For tests of what uses the bridge: made-up samples, a network with faults, and one in virtual time.

`FaultProxy` stands between real senders and a real receiver, in any process; `VirtualNetwork` joins them
inside one process, where a minute takes milliseconds. Both lose, repeat, hold back, damage and cut by a seed.
"""

from __future__ import annotations

from trainer_bridge.testing.faults import FaultCounts, Faults
from trainer_bridge.testing.proxy import FaultProxy
from trainer_bridge.testing.samples import VOCABULARY, differences, make_rollout, make_sample
from trainer_bridge.testing.virtual import VirtualNetwork

__all__ = [
    "VOCABULARY",
    "FaultCounts",
    "FaultProxy",
    "Faults",
    "VirtualNetwork",
    "differences",
    "make_rollout",
    "make_sample",
]
