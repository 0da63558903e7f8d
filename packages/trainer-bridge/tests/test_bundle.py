"""Several small messages in one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trainer_bridge import bundle
from trainer_bridge.block_pool import BlockPool
from trainer_bridge.codec import Frames
from trainer_bridge.head import decode_head
from trainer_bridge.messages import Bundle


@given(
    messages=st.lists(st.tuples(st.binary(max_size=200), st.binary(max_size=20_000)), min_size=1, max_size=8)
)
def test_what_went_in_comes_out_in_memory_of_its_own(messages: list[tuple[bytes, bytes]]) -> None:
    head, body = bundle.join([Frames(*message) for message in messages], BlockPool())
    read = decode_head(head)
    assert isinstance(read, Bundle)
    found = list(bundle.split(read, (head, body)))
    assert found == messages
    # 256 waiting rollouts of 0.6 kB kept 106 MB of bundles alive.
    assert all(type(frame) is bytes for each in found for frame in each)


def test_a_bundle_has_an_end() -> None:
    small = Frames(b"h" * 100, b"p" * 1000)
    assert bundle.takes(small, 0, 0)
    assert not bundle.takes(small, bundle.BUNDLE_MESSAGES, 0)
    assert not bundle.takes(small, 1, bundle.BUNDLE_BYTES)
    assert not bundle.takes(Frames(b"h", bytes(bundle.BUNDLED_BYTES)), 0, 0)
