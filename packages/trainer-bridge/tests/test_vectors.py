"""Golden vectors: our codec and a reader written from the protocol's text alone agree on every one."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash
from trainer_bridge.bundle import split
from trainer_bridge.codec import SCHEMA_HASH, SCHEMA_TEXT, decode_frames
from trainer_bridge.config import ReceiverConfig
from trainer_bridge.control import ControlBoard
from trainer_bridge.errors import ErrorCode, ProtocolError, reason_of
from trainer_bridge.head import decode_head
from trainer_bridge.messages import BODIES, ArrayEntry, Bundle, DataHead, Kind
from trainer_bridge.payload import BFLOAT16, DTYPES, to_float32, unpack
from trainer_bridge.segment import Segment
from trainer_bridge.session import ReceiverSession
from trainer_bridge.session.refusal_kinds import SESSION_ERRORS

HERE = Path(__file__).parent
VECTORS = HERE / "vectors"
INDEX: dict[str, Any] = json.loads((VECTORS / "index.json").read_text())
PROTOCOL = HERE.parents[2] / "docs" / "wire-protocol.md"


@pytest.fixture(scope="module")
def reader() -> Iterator[ModuleType]:
    """The second reader, imported as a program beside it would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield importlib.import_module("second_reader")


def frames(vector: dict[str, Any]) -> list[bytes]:
    return [
        bytes.fromhex(frame["hex"]).ljust(frame["then_zeros_to"], b"\0")
        if isinstance(frame, dict)
        else (VECTORS / frame).read_bytes()
        for frame in vector["frames"]
    ]


def good_head(name: str) -> bytes:
    return frames(INDEX["messages"][name])[0]


def plain(value: Any) -> Any:
    """As the index writes it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def test_the_script_still_writes_the_same_bytes(tmp_path: Path, programs: Path) -> None:
    subprocess.run([sys.executable, str(programs / "make_vectors.py"), str(tmp_path)], check=True)
    want = {p.name: p.read_bytes() for p in VECTORS.iterdir()}
    got = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(want) == sorted(got)
    assert [name for name in want if want[name] != got[name]] == []


@pytest.mark.parametrize("name", INDEX["messages"])
def test_session_messages(name: str, reader: ModuleType) -> None:
    vector = INDEX["messages"][name]
    (head,) = frames(vector)
    ours = decode_head(head)
    assert type(ours).__name__.upper() == vector["kind"]
    for field, value in vector["body"].items():
        assert _json(getattr(ours, field)) == value
    kind, theirs = reader.read_head(head)
    assert kind == vector["kind"]
    assert {k: plain(theirs[k]) for k in vector["body"]} == vector["body"]
    assert reader.read_message([head]) == theirs


def _json(value: Any) -> Any:
    if hasattr(value, "__struct_fields__"):
        return {name: _json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    return plain(value)


@pytest.mark.parametrize("name", INDEX["data"])
def test_data_is_read_by_us(name: str) -> None:
    vector = INDEX["data"][name]
    data = decode_frames(frames(vector))
    head = data.head
    assert (head.producer.hex(), head.epoch, head.sequence, head.created_ns, head.group_size) == (
        vector["producer"], vector["epoch"], vector["sequence"], vector["created_ns"], vector["group_size"],
    )  # fmt: skip
    for sample, want in zip(data.samples, vector["samples"], strict=True):
        for field, value in want.items():
            got = getattr(sample, field)
            if isinstance(got, np.ndarray):
                assert {
                    "dtype": got.dtype.str[1:],
                    "shape": list(got.shape),
                    "hex": got.tobytes().hex(),
                } == value
            else:
                assert _json(got) == value
                assert json.dumps(_json(got)) == json.dumps(value)  # -0.0, and 1 is not 1.0


@pytest.mark.parametrize("name", INDEX["data"])
def test_data_is_read_by_a_stranger(name: str, reader: ModuleType) -> None:
    vector = INDEX["data"][name]
    body = reader.read_data(frames(vector))
    assert body["producer"].hex() == vector["producer"]
    for field in ("epoch", "sequence", "created_ns", "group_size"):
        assert body[field] == vector[field]
    shared = {
        "rollout_id": body["rollout_id"].hex(),
        "group_id": body["group_id"].hex(),
        "attempt": body["attempt"],
        "task_id": body["task_id"],
        "parts": len(body["parts"]),
    }
    for number, (part, want) in enumerate(zip(body["parts"], vector["samples"], strict=True)):
        got = {**part, **shared, "part": number}
        for field, value in want.items():
            if isinstance(got[field], dict) and "raw" in got[field]:
                assert {k: got[field][k] for k in ("dtype", "shape")} == {
                    k: value[k] for k in ("dtype", "shape")
                }
                assert got[field]["raw"].hex() == value["hex"]
            else:
                assert got[field] == value


@pytest.mark.parametrize("name", INDEX["payloads"])
def test_payloads_of_every_dtype(name: str, reader: ModuleType) -> None:
    vector = INDEX["payloads"][name]
    (payload,) = frames(vector)
    table = [ArrayEntry(*entry[:2], tuple(entry[2]), *entry[3:]) for entry in vector["table"]]
    assert {entry.dtype for entry in table} == {*DTYPES, BFLOAT16}
    ours = unpack(table, payload)
    theirs = reader.read_arrays(vector["table"], payload)
    for entry, want in zip(table, vector["hex"], strict=True):
        assert ours[entry.name].tobytes().hex() == theirs[entry.name]["raw"].hex() == want
        assert list(ours[entry.name].shape) == theirs[entry.name]["shape"]
    four = to_float32(ours["bf2/four"])
    assert four.shape == (2, 2)
    assert (float(four[0, 0]), float(four[1, 0]), bool(np.isnan(four[1, 1]))) == (1.0, np.inf, True)
    assert np.signbit(four[0, 1])


def read_by_us(frames: list[bytes]) -> None:
    """Any message, alone."""
    message = decode_head(frames[0]) if frames else None
    if isinstance(message, Bundle):
        split(message, frames)
    elif message is None or isinstance(message, DataHead):
        decode_frames(frames)
    elif len(frames) != 1:
        raise ProtocolError(ErrorCode.WRONG_FRAME_COUNT, "only DATA and BUNDLE have two")


def placed_by_us(hello: bytes, frames: list[bytes]) -> None:
    """DATA on the connection of a peer that greeted."""
    session = ReceiverSession(receiver=bytes(16), config=ReceiverConfig(), board=ControlBoard())
    greeting, head = decode_head(hello), decode_head(frames[0])
    assert isinstance(head, DataHead)
    session.on_message(b"peer", greeting, 0.0)
    session.on_data(b"peer", head, 0.0)


def read_by_a_stranger(reader: ModuleType, frames: list[bytes], after: str) -> None:
    body = reader.read_message(frames)
    if after:
        reader.check_place(reader.read_head(good_head(after))[1], body)


@pytest.mark.parametrize("name", INDEX["hostile"])
def test_hostile_messages_are_refused_with_the_same_name(name: str, reader: ModuleType) -> None:
    vector = INDEX["hostile"][name]
    after = vector["after"]
    if after:
        read_by_us(frames(vector))  # there is nothing wrong with it as such
    with pytest.raises(ProtocolError) as ours:
        placed_by_us(good_head(after), frames(vector)) if after else read_by_us(frames(vector))
    assert reason_of(ours.value.code) == vector["error"]
    with pytest.raises(reader.RefusedError) as theirs:
        read_by_a_stranger(reader, frames(vector), after)
    # Which of the two comes first depends on whether a reader looks at the types as it goes.
    excused = {"depth-bomb": "too_deep"}
    assert str(theirs.value) == excused.get(name, vector["error"])


def test_every_error_of_a_message_and_every_kind_has_a_vector() -> None:
    shown = {vector["error"] for vector in INDEX["hostile"].values()}
    assert {reason_of(code) for code in ErrorCode if code < SESSION_ERRORS} <= shown
    starts = {(*name.replace("-", ".").split("."),)[0] for name in INDEX["hostile"]}
    assert {kind.name.lower() for kind in Kind} <= starts


@pytest.mark.parametrize("name", INDEX["bundles"])
def test_bundles_come_apart_and_each_message_is_judged_alone(name: str, reader: ModuleType) -> None:
    vector = INDEX["bundles"][name]
    bundle = decode_head(frames(vector)[0])
    assert isinstance(bundle, Bundle)
    pieces = [[bytes(frame) for frame in each] for each in split(bundle, frames(vector))]
    theirs = reader.read_message(frames(vector))
    for error, ours, other in zip(vector["errors"], pieces, theirs, strict=True):
        if error is None:
            assert decode_frames(ours).head.sequence == other["sequence"]
        else:
            with pytest.raises(ProtocolError) as refused:
                decode_frames(ours)
            assert reason_of(refused.value.code) == other == error


def test_the_second_reader_needs_the_standard_library_alone() -> None:
    own = {"second_reader", "second_bodies", "xxh3"}
    imported: set[str] = set()
    for name in own:
        for node in ast.walk(ast.parse((HERE / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - own <= sys.stdlib_module_names
    assert imported >= {"struct", "xxh3"}


def test_its_hash_is_the_real_one(reader: ModuleType) -> None:
    data = np.random.default_rng(0).bytes(70_000)
    for size in (*range(1025), 2047, 2048, 2049, 4096, 65_537, len(data)):
        assert reader.xxh3_64(data[:size]) == xxhash.xxh3_64_intdigest(data[:size]), size


@pytest.mark.parametrize("name", INDEX["segments"])
def test_segments(name: str, reader: ModuleType) -> None:
    want = INDEX["segments"][name]
    segment, fault = Segment.scan(VECTORS / name, verify=True)
    assert [record.seq for record in segment.records()] == want["records"]
    assert bool(fault) == want["torn"]
    assert [each.first for each in segment.damage] == [
        n for n in range(segment.first, segment.last + 1) if n not in want["records"]
    ]
    records, end = reader.read_segment((VECTORS / name).read_bytes())
    assert [n for n, _, _ in records] == want["records"]
    assert bool(end) == want["torn"]
    for number, head, payload in records:
        assert reader.read_data([head, payload])["sequence"] == number


def test_the_text_and_the_code_say_the_same() -> None:
    text = PROTOCOL.read_text()
    assert SCHEMA_TEXT in text
    assert xxhash.xxh3_64_intdigest(SCHEMA_TEXT.encode()) == SCHEMA_HASH == INDEX["schema_hash"]
    section = text[text.index("### 3.7 Error codes") : text.index("### 3.8 ")]
    codes = dict(re.findall(r"\| (\d+) \| ([a-z_]+) (?=\|)", section))
    assert {int(number): name for number, name in codes.items()} == {int(c): reason_of(c) for c in ErrorCode}
    kinds = {int(n): name for n, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", text, re.MULTILINE)}
    assert kinds == {int(kind): kind.name for kind in Kind}
    assert all(f"`{code}`" in text for code in [*DTYPES, BFLOAT16])
    rows = re.findall(r"^\| \d+ \| ([A-Z]+) \| [^|]+ \| `([^`]+)`", text, re.MULTILINE)
    assert {name for name, _ in rows} == {kind.name for kind in Kind} - {"DATA"}
    for name, body in rows:
        flat = re.sub(r"\{[^}]*\}", "", body)
        while flat != (flat := re.sub(r"\[[^\[\]]*\]", "", flat)):
            pass
        assert (
            tuple(field.split()[0] for field in flat.split(", ")) == BODIES[Kind[name]].__struct_fields__
        ), name
