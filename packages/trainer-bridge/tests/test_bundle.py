"""Several messages in one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_tracking.sample import Sample
from trainer_bridge import bundle
from trainer_bridge.block_pool import BlockPool
from trainer_bridge.bundle import Bundler
from trainer_bridge.codec import Draft, Frames, decode_frames, draft, draft_all
from trainer_bridge.head import decode_head
from trainer_bridge.messages import Bundle
from trainer_bridge.payload import RUN_BYTES, Buffer
from trainer_bridge.testing import make_sample

PRODUCER = b"p" * 16


def apart(frames: tuple[Buffer, Buffer]) -> list[tuple[bytes, Buffer]]:
    read = decode_head(frames[0])
    assert isinstance(read, Bundle)
    return list(bundle.split(read, frames))


def numbered(drafts: list[Draft]) -> list[Frames]:
    return [each.numbered(PRODUCER, 1, n + 1, 0) for n, each in enumerate(drafts)]


def gathered(messages: list[Frames], *, most: int = 1 << 30) -> tuple[int, list[Buffer]]:
    """How many go out together, and as what."""
    bundler = Bundler(most)
    count = 0
    while count < len(messages) and bundler.takes(messages[count]):
        count += 1
    return count, list(bundler.frames(BlockPool()))


def lies_in(inner: Buffer, outer: Buffer) -> bool:
    return np.shares_memory(np.frombuffer(inner, np.uint8), np.frombuffer(outer, np.uint8))


@given(
    messages=st.lists(st.tuples(st.binary(max_size=200), st.binary(max_size=20_000)), min_size=1, max_size=8)
)
def test_what_went_in_comes_out(messages: list[tuple[bytes, bytes]]) -> None:
    assert apart(bundle.join([Frames(*message) for message in messages], BlockPool())) == messages


def test_what_comes_out_keeps_no_much_larger_bundle_alive() -> None:
    """256 waiting rollouts of 0.6 kB kept 106 MB of bundles alive."""
    payloads = [bytes(600), bytes(60_000), bytes(300_000), bytes(1_000_000)]
    frames = bundle.join([Frames(b"h", payload) for payload in payloads], BlockPool())
    views = [payload for _, payload in apart(frames) if isinstance(payload, memoryview)]
    assert [len(view) for view in views] == [300_000, 1_000_000]
    assert all(lies_in(view, frames[1]) for view in views)


@pytest.mark.parametrize("tokens", [16, 700, 4096, 32_768])
def test_the_rollouts_of_one_call_travel_together_without_a_copy(tokens: int) -> None:
    samples = [make_sample(n, tokens=tokens + n) for n in range(5)]
    messages = numbered(draft_all([[sample] for sample in samples], pool=BlockPool()))
    count, frames = gathered(messages)
    assert count == len(frames[1:]) * 5
    assert all(lies_in(each.payload, frames[1]) for each in messages)
    found = [decode_frames(each).samples[0] for each in apart((frames[0], frames[1]))]
    assert [each.token_ids.tobytes() for each in found] == [each.token_ids.tobytes() for each in samples]


def test_memory_of_one_run_ends_where_a_bundle_does() -> None:
    samples = [make_sample(n, tokens=32_768) for n in range(16)]
    messages = numbered(draft_all([[sample] for sample in samples], pool=BlockPool()))
    count, frames = gathered(messages)
    assert 1 < count < 16
    assert len(frames[1]) <= RUN_BYTES < len(frames[1]) + len(messages[0].payload) + 64
    assert gathered(messages[count:])[0] > 1, "the next run begins with the first that did not fit"


def test_a_message_that_went_before_leaves_the_others_together() -> None:
    """What is sent again is seldom all of it: the middle one was received."""
    samples: list[Sample] = [make_sample(n, tokens=32_768) for n in range(5)]
    messages = numbered(draft_all([[sample] for sample in samples], pool=BlockPool()))
    assert gathered([messages[0], messages[1], messages[3], messages[4]])[0] == 2
    assert gathered([messages[0], messages[2]])[0] == 1
    assert gathered([messages[1], messages[0]])[0] == 1


def test_small_ones_of_several_calls_travel_together_and_large_ones_alone() -> None:
    small = numbered([draft([make_sample(n, tokens=100)]) for n in range(4)])
    large = numbered([draft([make_sample(n, tokens=32_768)], pool=BlockPool()) for n in range(2)])
    assert gathered(small)[0] == 4
    assert gathered(large)[0] == 1
    assert gathered([*small, *large])[0] == 4
    assert gathered([*large, *small])[0] == 1


def test_a_bundle_has_an_end() -> None:
    small = Frames(b"h" * 100, b"p" * 1000)
    assert gathered([small] * 100)[0] == 64
    assert gathered([Frames(b"h", bytes(100_000))] * 10)[0] == 5
    assert gathered([Frames(bytes(100_000), b"")] * 10)[0] == 2
    assert gathered([small] * 10, most=3500)[0] == 3, "the receiver takes no larger frame"
    assert gathered([Frames(b"h", bytes(5000))] * 2, most=1000)[0] == 1, (
        "too large for it is for others to say"
    )
