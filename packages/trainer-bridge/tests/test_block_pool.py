"""Memory that is used again, and never while anyone can still read it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_bridge.block_pool import SLAB_BYTES, BlockPool
from trainer_bridge.zmq_sockets import send_message


def place(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def filled(pool: BlockPool, value: int, nbytes: int = 100_000) -> memoryview:
    return pool.join([bytes([value]) * nbytes], nbytes)


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    pool = BlockPool()
    first = filled(pool, 1)
    where = place(first)
    view = np.frombuffer(first, np.uint8)[10:20].view("u2")
    del first
    second = filled(pool, 2)
    assert place(second) != where
    assert (view == 0x0101).all()
    del view
    assert place(filled(pool, 3)) == where
    assert bytes(second[:3]) == b"\x02\x02\x02"


def test_a_buffer_is_read_only() -> None:
    buffer = filled(BlockPool(), 1)
    with pytest.raises(TypeError):
        buffer[0] = 1
    assert not np.frombuffer(buffer, np.uint8).flags.writeable


def test_what_libzmq_still_has_to_send_is_not_overwritten() -> None:
    """pyzmq#1364, vllm-project/vllm#50053: the buffer looked free, and was still on its way."""
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.setsockopt(zmq.SNDHWM, 0)
    pull.setsockopt(zmq.RCVHWM, 1)
    push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    pool = BlockPool()
    for n in range(100):
        send_message(push, (b"head", filled(pool, n)))
    for n in range(100):
        payload = pull.recv_multipart()[1]
        assert payload == bytes([n]) * 100_000
    push.close(0)
    pull.close(0)
    context.term()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300_000), st.booleans()), max_size=60))
def test_no_two_live_buffers_share_memory(steps: list[tuple[int, bool]]) -> None:
    pool = BlockPool(idle_bytes=1 << 20)
    live: list[tuple[memoryview, int]] = []
    for n, (nbytes, drop) in enumerate(steps):
        if drop and live:
            live.pop(n % len(live))
        live.append((filled(pool, n, nbytes), n))
        for buffer, value in live:
            assert buffer[0] == buffer[-1] == value


def test_unused_memory_is_bounded() -> None:
    pool = BlockPool(idle_bytes=SLAB_BYTES)
    live = [filled(pool, 1, 1 << 20) for _ in range(100)]
    del live
    assert sum(len(slabs) for slabs in pool._open.values()) == 1  # pyright: ignore[reportPrivateUsage]
    assert not pool._lent  # pyright: ignore[reportPrivateUsage]


def test_many_threads_take_and_give_back() -> None:
    pool = BlockPool()
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            buffers = [filled(pool, value, 20_000) for _ in range(3)]
            wrong.extend(n for n, each in enumerate(buffers) if each[0] != value or each[-1] != value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert not pool._lent  # pyright: ignore[reportPrivateUsage]
