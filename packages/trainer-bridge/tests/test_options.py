"""Options that cannot work are refused at once, with what can be given; none is let pass in silence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from trainer_bridge import ConfigError, ReceiverConfig, SampleReceiver, SenderConfig, Timing


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            ReceiverConfig,
            {"commit_on": "checkpoints"},
            "commit_on is 'checkpoints': give 'commit' or 'checkpoint'",
        ),
        (ReceiverConfig, {"rank_split": "group"}, "rank_split is 'group': give 'groups' or 'rollouts'"),
        (
            ReceiverConfig,
            {"partial_groups": "delivr", "group_deadline_s": 1.0},
            "partial_groups is 'delivr': give 'wait', 'drop' or 'deliver'",
        ),
        (
            ReceiverConfig,
            {"keep_committed": None},
            "keep_committed is None: give 'all', 'checkpoint' or 'none'",
        ),
        (ReceiverConfig, {"group_size": "4"}, "group_size is '4': give an int or None"),
        (ReceiverConfig, {"group_size": True}, "group_size is True: give an int or None"),
        (ReceiverConfig, {"group_size": np.int64(4)}, r"\(numpy.int64\): give an int or None"),
        (ReceiverConfig, {"group_size": 4, "group_minimum": 5}, "no group of group_size=4 ever has so many"),
        (ReceiverConfig, {"group_size": 0}, "group_size must be at least 1, got 0"),
        (ReceiverConfig, {"group_size": 1 << 17}, "give at most 65536"),
        (ReceiverConfig, {"window": 1 << 40}, "window is 1099511627776: give at most"),
        (ReceiverConfig, {"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        (ReceiverConfig, {"patience_s": math.nan}, "patience_s is nan: give a number or None"),
        (ReceiverConfig, {"insecure": "no"}, "insecure is 'no': give True or False"),
        (ReceiverConfig, {"timing": 1.0}, "timing is 1.0: give a Timing"),
        (
            SenderConfig,
            {"settle": "comitted"},
            "settle is 'comitted': give 'received', 'stored' or 'committed'",
        ),
        (SenderConfig, {"max_payload_bytes": 0}, "max_payload_bytes must be at least 1, got 0"),
        (Timing, {"heartbeat_s": 0}, "heartbeat_s is 0: give seconds, more than 0"),
        (Timing, {"resend_s": math.inf}, "resend_s is inf: give seconds"),
        (Timing, {"peer_timeout_s": 0.5}, "peer_timeout_s is 0.5: give more than heartbeat_s"),
    ],
)
def test_what_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**options)


def test_whole_numbers_are_numbers_and_defaults_are_fine() -> None:
    assert Timing(heartbeat_s=2).heartbeat_s == 2
    assert ReceiverConfig(group_deadline_s=60, partial_groups="drop", patience_s=None).group_size is None
    SenderConfig()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run_state": "stop"}, "run_state is 'stop': give 'run', 'pause', 'drain', 'abort' or None"),
        ({"weights_version": "3"}, "weights_version is '3': give an int or None"),
        ({"weights_version": -2}, "weights_version is -2: give a whole number from 0 to 2147483647"),
        ({"weights_version": 1 << 31}, "give a whole number from 0 to 2147483647"),
        ({"min_version": -5}, "min_version is -5: give a whole number from -1 to"),
        ({"policy_run": 7}, "policy_run is 7: give a str or None"),
        ({"weights_location": b"/w"}, "weights_location is b'/w'"),
    ],
)
def test_what_cannot_be_published_changes_nothing(values: dict[str, Any], said: str) -> None:
    """It went into CONTROL, which no worker could read, and into the checkpoint."""
    with SampleReceiver(config=ReceiverConfig(max_staleness=2)) as receiver:
        before = receiver.publish(run_state="pause", policy_run="run-1", weights_version=4)
        with pytest.raises(ConfigError, match=said):
            receiver.publish(**values)
        after = receiver.publish()
        assert (after.run_state, after.weights_version, after.min_version) == ("pause", 4, 2)
        assert after.generation == before.generation + 1
        assert receiver.publish(min_version=-1).min_version == -1, "no rule, once more"
