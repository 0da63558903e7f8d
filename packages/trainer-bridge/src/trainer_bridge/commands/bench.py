"""`trainer-bridge bench`."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO

import msgspec
import numpy as np
from token_tracking.sample import Sample

from trainer_bridge.address import leaves_machine, to_connect
from trainer_bridge.clock import Clock, SystemClock
from trainer_bridge.commands.output import interruptible, stop_flag, write_json, write_line
from trainer_bridge.config import ReceiverConfig, SenderConfig
from trainer_bridge.errors import BridgeError, ConnectError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.receiver import SampleReceiver
from trainer_bridge.sender import SampleSender
from trainer_bridge.testing.samples import make_sample

SIZES = (4096, 32768)
POOL = 16
POLL_S = 0.2
POLICY_RUN = "trainer-bridge bench"
"""What a receiver that throws samples away publishes: a real trainer must not be fed by a benchmark."""
MARK = "bench-mark"
"""Task of the sample that makes the receiver say what it has used."""
CONTROL_S = 2.0
"""The receiver's control state comes right behind WELCOME; it is waited for this long."""
UNSETTLED = 256
ROUND_TRIPS = 100


class Row(msgspec.Struct, kw_only=True):
    """One line of the table."""

    tokens: int
    nbytes: int
    """Arrays of one sample."""
    per_s: float
    mb_per_s: float
    sender_us: float
    """CPU time per sample, all threads."""
    receiver_us: float | None
    """None: it runs elsewhere, and says so itself."""
    ack_ms: float
    """From `send` to the commit's acknowledgement, nothing else under way: median."""
    ack_p99_ms: float


def serve(bind: str, *, as_json: bool, insecure: bool, keys: CurveKeys | None) -> int:
    """Take a benchmark's samples and throw them away; Ctrl-C ends it."""
    config = ReceiverConfig(insecure=insecure, patience_s=None)
    with stop_flag() as stop, SampleReceiver(bind, config=config, keys=keys) as receiver:
        receiver.publish(policy_run=POLICY_RUN)
        if as_json:
            write_json({"event": "listening", "address": receiver.address})
        else:
            write_line(f"listening on {receiver.address}; {_how_to_connect(receiver.address)}")
        samples, cpu_s = 0, _cpu_s()
        while not stop.set:
            lease = receiver.next(POLL_S)
            if lease is None:
                continue
            marked = lease.samples[0].task_id == MARK
            lease.commit()
            samples += not marked
            if marked:
                used_s = _cpu_s() - cpu_s
                if as_json:
                    write_json({"event": "mark", "samples": samples, "cpu_s": used_s})
                elif samples > 1:
                    write_line(f"{samples} samples, {used_s / samples * 1e6:.0f} us of CPU each")
                samples, cpu_s = 0, _cpu_s()
    return 0


def bench(
    address: str | None, *, seconds: float, as_json: bool, insecure: bool, keys: CurveKeys | None
) -> int:
    """Measure how fast samples go: on this machine, or to a `bench --serve` elsewhere.

    One sender and one receiver, acknowledgements on, no spool. For comparisons with other ways of moving
    samples, repeated and interleaved, run benchmarks/trainer_bridge.py from a clone of the repository.
    """
    with interruptible(), _receiver(address) as (where, marks):
        told = threading.Event()
        config = SenderConfig(insecure=insecure, max_unsettled=UNSETTLED)
        with SampleSender(
            where,
            producer="bench",
            config=config,
            keys=keys,
            on_event=lambda event: told.set() if event.kind == "control" else None,
        ) as sender:
            _check_is_bench(sender, where, told)
            rows = [_measure(sender, tokens, seconds, marks) for tokens in SIZES]
    if as_json:
        write_json({"event": "bench", "address": where, "rows": [msgspec.structs.asdict(r) for r in rows]})
        return 0
    write_line(f"{'tokens':>7} {'bytes':>8} {'samples/s':>10} {'MB/s':>7} {'CPU us: sender':>15} "
               f"{'receiver':>9} {'ack ms':>7} {'p99':>7}")  # fmt: skip
    for row in rows:
        receiver = "-" if row.receiver_us is None else f"{row.receiver_us:.0f}"
        write_line(
            f"{row.tokens:>7} {row.nbytes:>8} {row.per_s:>10,.0f} {row.mb_per_s:>7,.0f} "
            f"{row.sender_us:>15.0f} {receiver:>9} {row.ack_ms:>7.2f} {row.ack_p99_ms:>7.2f}"
        )
    write_line("one run on a machine that may be busy: for comparisons see benchmarks/trainer_bridge.py")
    return 0


def _how_to_connect(address: str) -> str:
    if leaves_machine(address):
        return f"on the other machine: trainer-bridge bench {to_connect(address)} (with --key or --insecure)"
    return f"on this machine: trainer-bridge bench {address}; for others, --bind tcp://0.0.0.0:PORT and keys"


@contextmanager
def _receiver(address: str | None) -> Generator[tuple[str, IO[str] | None]]:
    """Where to send, and where the receiver says what it used. Without an address, one is started."""
    if address is not None:
        yield address, None
        return
    command = [sys.executable, "-m", "trainer_bridge", "bench", "--serve", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise BridgeError("the receiver of the benchmark has no output")
            first = process.stdout.readline()
            if not first:
                raise ConnectError("the receiver of the benchmark did not start; its message is above")
            yield str(json.loads(first)["address"]), process.stdout
        finally:
            process.terminate()


def _check_is_bench(sender: SampleSender, where: str, told: threading.Event) -> None:
    told.wait(CONTROL_S)
    if sender.control.policy_run != POLICY_RUN:
        raise ConnectError(
            f"{where} is no benchmark's receiver, and made-up samples would go to a trainer: start "
            "`trainer-bridge bench --serve --bind ...` there"
        )


def _measure(sender: SampleSender, tokens: int, seconds: float, marks: IO[str] | None) -> Row:
    clock = SystemClock()
    pool = [make_sample(n, tokens=tokens) for n in range(POOL)]
    ids = _ids(tokens)
    for _ in range(POOL * 4):  # memory and sockets have been in use once
        sender.send(_renamed(pool[0], next(ids)))
    _mark(sender, next(ids), marks)
    began_s, cpu_s, count = clock.monotonic_s(), _cpu_s(), 0
    while not count or clock.monotonic_s() - began_s < seconds:
        sender.send(_renamed(pool[count % POOL], next(ids)))
        count += 1
    sender.wait_settled(60.0)
    took_s, used_s = clock.monotonic_s() - began_s, _cpu_s() - cpu_s
    there_s = _mark(sender, next(ids), marks)
    waits = sorted(_round_trip(sender, _renamed(pool[0], next(ids)), clock) for _ in range(ROUND_TRIPS))
    first = pool[0]
    arrays = (first.token_ids, first.loss_mask, first.logprobs, first.versions)
    nbytes = sum(array.nbytes for array in arrays)
    return Row(
        tokens=tokens,
        nbytes=nbytes,
        per_s=count / took_s,
        mb_per_s=count * nbytes / took_s / 1e6,
        sender_us=used_s / count * 1e6,
        receiver_us=None if there_s is None else there_s / count * 1e6,
        ack_ms=statistics.median(waits) * 1e3,
        ack_p99_ms=waits[int(len(waits) * 0.99)] * 1e3,
    )


def _ids(tokens: int) -> Generator[str]:
    """Rollout ids that no other benchmark of the same receiver uses."""
    rng = np.random.default_rng([tokens, int.from_bytes(bytes.fromhex(SystemClock().new_id()), "big")])
    start = rng.bytes(10).hex()
    number = 0
    while True:
        yield f"{start}{number:012x}"
        number += 1


def _renamed(sample: Sample, rollout_id: str) -> Sample:
    return msgspec.structs.replace(sample, rollout_id=rollout_id)


def _round_trip(sender: SampleSender, sample: Sample, clock: Clock) -> float:
    began_s = clock.monotonic_s()
    sender.send(sample)
    sender.wait_settled(60.0)
    return clock.monotonic_s() - began_s


def _mark(sender: SampleSender, rollout_id: str, marks: IO[str] | None) -> float | None:
    """CPU seconds that the receiver used since the last mark; None: it is elsewhere."""
    sender.send(msgspec.structs.replace(make_sample(0), rollout_id=rollout_id, task_id=MARK))
    sender.wait_settled(60.0)
    return None if marks is None else float(json.loads(marks.readline())["cpu_s"])


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
