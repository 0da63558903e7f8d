"""Both ends of the protocol as state machines: no socket, no clock, no thread.

They take decoded messages and instants (float seconds, any origin) and say what to send. Everything that
makes the protocol correct under loss, repetition and reordering is in here and is tested without a network.
"""

from __future__ import annotations

from trainer_bridge.session.handshake import negotiate
from trainer_bridge.session.observer import ObserverSession
from trainer_bridge.session.peers import Accepted, Identity
from trainer_bridge.session.receiver import ReceiverSession
from trainer_bridge.session.sender import SenderSession
from trainer_bridge.session.streams import Stream

__all__ = [
    "Accepted",
    "Identity",
    "ObserverSession",
    "ReceiverSession",
    "SenderSession",
    "Stream",
    "negotiate",
]
