"""Rollout samples to any trainer over ZeroMQ: acknowledged, deduplicated, bounded; control back."""

from __future__ import annotations

from trainer_bridge.aio import AsyncSampleSender
from trainer_bridge.config import ReceiverConfig, SenderConfig, Timing
from trainer_bridge.control import ControlState
from trainer_bridge.errors import (
    AddressError,
    BackpressureError,
    BridgeError,
    ClosedError,
    ConfigError,
    ConnectError,
    ErrorCode,
    ForkedError,
    NotDurableError,
    ProtocolError,
    RefusedError,
    SpoolError,
    UnsendableError,
)
from trainer_bridge.lease import Lease
from trainer_bridge.observer import SampleObserver
from trainer_bridge.receiver import SampleReceiver
from trainer_bridge.receiver_loop import ReceiverEvent
from trainer_bridge.sender import SampleSender
from trainer_bridge.sender_loop import SenderEvent
from trainer_bridge.stats import ProducerStats, Receipt, ReceiverStats, SenderStats
from trainer_bridge.stored import read_samples

__all__ = [
    "AddressError",
    "AsyncSampleSender",
    "BackpressureError",
    "BridgeError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "ControlState",
    "ErrorCode",
    "ForkedError",
    "Lease",
    "NotDurableError",
    "ProducerStats",
    "ProtocolError",
    "Receipt",
    "ReceiverConfig",
    "ReceiverEvent",
    "ReceiverStats",
    "RefusedError",
    "SampleObserver",
    "SampleReceiver",
    "SampleSender",
    "SenderConfig",
    "SenderEvent",
    "SenderStats",
    "SpoolError",
    "Timing",
    "UnsendableError",
    "read_samples",
]
