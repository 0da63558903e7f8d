"""Rollout samples to any trainer over ZeroMQ: acknowledged, deduplicated, bounded; control back."""

from __future__ import annotations

from trainer_bridge.aio import AsyncSampleSender
from trainer_bridge.batch import Batch
from trainer_bridge.collate import Collator
from trainer_bridge.config import ReceiverConfig, SenderConfig, Timing
from trainer_bridge.control import ControlState
from trainer_bridge.dataset import SampleDataset
from trainer_bridge.dead_letters import DeadLetter
from trainer_bridge.errors import (
    AddressError,
    AuthError,
    BackpressureError,
    BatchError,
    BridgeError,
    CallbackError,
    ClosedError,
    ConfigError,
    ConnectError,
    DamagedError,
    ErrorCode,
    ForkedError,
    NoDataError,
    NotDurableError,
    ProtocolError,
    RefusedError,
    SpoolError,
    StepAbortedError,
    StuckError,
    TorchMissingError,
    UnsendableError,
)
from trainer_bridge.keys import CurveKeys
from trainer_bridge.lease import BatchLease, Lease
from trainer_bridge.leased import LeasedGroup, LeasedRollout
from trainer_bridge.observer import SampleObserver
from trainer_bridge.rank_receiver import RankReceiver
from trainer_bridge.receiver import SampleReceiver
from trainer_bridge.receiver_events import ReceiverEvent
from trainer_bridge.sender import SampleSender
from trainer_bridge.sender_loop import SenderEvent
from trainer_bridge.stats import ProducerStats, Receipt, ReceiverStats, SenderStats
from trainer_bridge.stored import read_samples

__all__ = [
    "AddressError",
    "AsyncSampleSender",
    "AuthError",
    "BackpressureError",
    "Batch",
    "BatchError",
    "BatchLease",
    "BridgeError",
    "CallbackError",
    "ClosedError",
    "Collator",
    "ConfigError",
    "ConnectError",
    "ControlState",
    "CurveKeys",
    "DamagedError",
    "DeadLetter",
    "ErrorCode",
    "ForkedError",
    "Lease",
    "LeasedGroup",
    "LeasedRollout",
    "NoDataError",
    "NotDurableError",
    "ProducerStats",
    "ProtocolError",
    "RankReceiver",
    "Receipt",
    "ReceiverConfig",
    "ReceiverEvent",
    "ReceiverStats",
    "RefusedError",
    "SampleDataset",
    "SampleObserver",
    "SampleReceiver",
    "SampleSender",
    "SenderConfig",
    "SenderEvent",
    "SenderStats",
    "SpoolError",
    "StepAbortedError",
    "StuckError",
    "Timing",
    "TorchMissingError",
    "UnsendableError",
    "read_samples",
]
