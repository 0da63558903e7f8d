"""Any message of any kind, with the values that hurt most, ends neither a receiver nor one of its peers."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bridge.codec import SCHEMA, Data, Frames, decode_data, draft
from trainer_bridge.config import Timing
from trainer_bridge.errors import UnsendableError
from trainer_bridge.head import decode_head, encode_head
from trainer_bridge.memory_transport import MemoryClient
from trainer_bridge.messages import KINDS, Bundle, DataHead, Hello, Message, PartBody, Welcome
from trainer_bridge.payload import DTYPES, Array, pack
from trainer_bridge.seqset import SeqSet
from trainer_bridge.session import ObserverSession, SenderSession, Stream
from trainer_bridge.session.handshake import FEATURES, SCHEMAS
from trainer_bridge.session.rank import RankSession
from trainer_bridge.testing import make_sample
from trainer_bridge.wire_types import Id

Scenes = Callable[..., AbstractContextManager[Any]]

PEERS = (b"a" * 16, b"b" * 16)
"""Few, so that messages meet each other's."""


def values(of: Any) -> st.SearchStrategy[Any]:
    """Of a type of `messages.py`: the ends of its range and a little in between."""
    origin, args = typing.get_origin(of), typing.get_args(of)
    if of is Id:
        return st.sampled_from(PEERS)
    if origin is typing.Annotated:
        return bounded(args[0], args[1])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values, args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        return messages(of)
    plain = {
        int: st.sampled_from([0, 1, -1, 2**31, -(2**63), 2**64 - 1]),
        float: st.floats(),
        str: st.sampled_from(["", "x", "ü\n\x00", "x" * 5000]),
        bytes: st.sampled_from([b"", b"x", bytes(5000)]),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[of]


def bounded(of: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if of is int:
        low = -(2**63) if meta.ge is None else int(meta.ge)
        high = 2**64 - 1 if meta.le is None else int(meta.le)
        near = (n for n in (low, low + 1, 1, 2, 3, 7, high - 1, high) if low <= n <= high)
        return st.sampled_from(sorted(set(near)))
    most = meta.max_length or 0
    if of is str:
        return st.sampled_from(["", "w", "\U0001f525" * most])
    item = values(typing.get_args(of)[0])
    few = st.lists(item, min_size=meta.min_length or 0, max_size=3)
    return st.one_of(few, item.map(lambda each: [each] * most)).map(tuple)


def messages(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any that a decoder takes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


def sessions(kind: type[Any]) -> st.SearchStrategy[Any]:
    """The same, mostly within a session that stands."""
    return st.builds(
        lambda message, session: msgspec.structs.replace(message, session=session),
        messages(kind),
        st.sampled_from([1, 1, 2, 2**63 - 1]),
    )


def greetings() -> st.SearchStrategy[Hello]:
    """HELLOs that are welcome, mostly."""
    small = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 2**63 - 1]))
    return st.builds(
        Hello,
        session=st.sampled_from([1, 1, 2, 2**63 - 1]),
        role=st.sampled_from(["producer", "producer", "observer", "rank"]),
        peer=st.sampled_from(PEERS),
        name=st.sampled_from(["w", "\U0001f525" * 256]),
        minor_min=st.just(0),
        minor_max=st.sampled_from([0, 255]),
        schemas=st.just(SCHEMAS),
        features=st.just(FEATURES),
        epoch=st.sampled_from([1, 2, 2**32 - 1]),
        streams=st.lists(small, max_size=3).map(tuple),
    )


_DRAFTS = [draft([make_sample(rollout, tokens=8)]) for rollout in range(4)]
_HEAD = _DRAFTS[0].head


def rollouts() -> st.SearchStrategy[list[bytes]]:
    """DATA that is good but for its place, as [head, payload]."""
    return st.builds(
        lambda which, producer, epoch, sequence: [
            (frames := _DRAFTS[which].numbered(producer, epoch, sequence, 0)).head,
            bytes(frames.payload),
        ],
        st.integers(0, 3),
        st.sampled_from(PEERS),
        st.sampled_from([0, 1, 2, 2**32 - 1]),
        st.sampled_from([0, 1, 2, 3, 40, 256, 257, 2**63 - 1]),
    )


def odd_rollouts() -> st.SearchStrategy[list[bytes]]:
    """DATA whose hashes, lengths and table are right, with arrays of any type and shape."""
    shapes = st.sampled_from([(), (0,), (1,), (8,), (9,), (2, 4), (7, 1, 1)])
    arrays = st.builds(np.ones, shapes, st.sampled_from(list(DTYPES.values())))
    fields = {f"0/{name}": arrays for name in ("token_ids", "loss_mask", "logprobs", "versions")}
    more = {f"0/{name}": arrays for name in ("kept_ids", "kept_offsets", "routed_experts")}
    good = decode_data(_HEAD, _DRAFTS[0].payload).samples[0]
    right = {name: st.just(getattr(good, name.removeprefix("0/"))) for name in fields}
    tables = st.one_of(
        st.fixed_dictionaries(fields, optional=more), st.fixed_dictionaries(right, optional=more)
    )
    parts = st.one_of(st.just(_HEAD.parts[0]), messages(PartBody))
    return st.builds(packed, tables, parts, st.sampled_from([1, 2, 3]))


def packed(arrays: dict[str, Array], part: PartBody, sequence: int) -> list[bytes]:
    table, payload = pack(arrays.items())
    head = msgspec.structs.replace(
        _HEAD,
        producer=PEERS[0],
        epoch=1,
        sequence=sequence,
        parts=(part,),
        arrays=table,
        payload_nbytes=len(payload),
        payload_hash=xxhash.xxh3_64_intdigest(payload),
    )
    return [encode_head(head), bytes(payload)]


def heads() -> st.SearchStrategy[Message]:
    """One of any kind but BUNDLE."""
    kinds = [kind for kind in KINDS if kind not in (Bundle, DataHead, Hello)]
    data = messages(DataHead).map(lambda head: msgspec.structs.replace(head, schema=SCHEMA))
    return st.one_of(greetings(), greetings(), messages(Hello), data, *map(sessions, kinds))


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(
        st.tuples(st.integers(0, 2), st.one_of(heads(), heads(), rollouts())), min_size=1, max_size=24
    )
)
def test_the_receiver_goes_on_whatever_its_peers_say(scene: Scenes, said: list[tuple[int, Any]]) -> None:
    with scene() as it:
        clients = [MemoryClient(it.server) for _ in range(3)]
        for client in clients:
            it.say(client, Hello(1, "producer", PEERS[0], "w", 0, 0, SCHEMAS, FEATURES, 1, ((1, 1),)))
        for which, message in said:
            try:
                it.say(clients[which], message)
            except UnsendableError:
                continue  # larger than a head may be
        it.serves(9)
        for client in clients:
            assert all(len(encode_head(message)) <= 1 << 20 for message in it.heard(client))


@settings(max_examples=60, deadline=None)
@given(said=st.lists(odd_rollouts(), min_size=1, max_size=8))
def test_the_receiver_goes_on_whatever_arrays_are_of(scene: Scenes, said: list[list[bytes]]) -> None:
    with scene() as it:
        client = MemoryClient(it.server)
        it.say(client, Hello(1, "producer", PEERS[0], "w", 0, 0, SCHEMAS, FEATURES, 1, ((1, 1),)), *said)
        it.serves(9)


def greeted(session: Any) -> list[Message]:
    session.connected(0.0)
    (greeting,) = session.take_messages()
    assert isinstance(greeting, Hello)
    welcome = Welcome(greeting.session, PEERS[1], 0, "sample/1", FEATURES, 64, 1 << 29, "", (), 9, 1 << 20)
    session.on_message(welcome, 0.0)
    return session.take_messages()


def can_be_said(messages: Sequence[Message]) -> None:
    for message in messages:
        assert decode_head(encode_head(message)) == message


anything = st.lists(heads(), min_size=1, max_size=24)


@settings(max_examples=80, deadline=None)
@given(said=anything)
def test_a_sender_goes_on_whatever_its_receiver_says(said: list[Message]) -> None:
    session = SenderSession(
        producer=PEERS[0],
        name="w",
        streams=[Stream(1, 1), Stream(2, 5)],
        last=20,
        settled=SeqSet(),
        window=8,
        settle="committed",
        timing=Timing(),
    )
    greeted(session)
    for at, message in enumerate(said):
        session.on_message(message, float(at))
        session.tick(float(at))
        for _ in range(3):
            seq = session.next_to_send()
            if seq is not None:
                assert 1 <= seq <= 20
                session.mark_sent(seq, 100, float(at))
        can_be_said(session.take_messages())
        assert 0 <= session.unsettled <= 20
        assert session.in_flight <= 8 + 3
    if session.state not in ("refused", "finished"):
        session.disconnected()
        greeted(session)
        assert session.state == "open"


@settings(max_examples=80, deadline=None)
@given(said=anything)
def test_an_observer_and_a_rank_go_on_whatever_their_receiver_says(said: list[Message]) -> None:
    rank = RankSession(process=PEERS[0], rank=1, timing=Timing())
    data = decode_of(draft([make_sample(1, tokens=8)]).numbered(PEERS[0], 1, 1, 0))
    for session in (ObserverSession(observer=PEERS[0], name="o", timing=Timing()), rank):
        greeted(session)
        for at, message in enumerate(said):
            if session is rank:
                rank.ask(2, 1)
                rank.on_data(data, float(at))
            session.on_message(message, float(at))
            session.tick(float(at))
            if session is rank and rank.granted is not None:
                named = sum(len(group.rollouts) for group in rank.granted.share.groups)
                assert len(rank.granted.rollouts) == named
                rank.done(rank.granted.share.step, committed=False, reason="x" * 5000)
            can_be_said(session.take_messages())
        if session.state not in ("refused", "ended"):
            session.disconnected()
            greeted(session)
            assert session.state == "open"


def decode_of(frames: Frames) -> Data:
    head = decode_head(frames.head)
    assert isinstance(head, DataHead)
    return decode_data(head, frames.payload)
