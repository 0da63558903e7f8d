"""Golden vectors: our codec and a reader written from the protocol's text alone agree on every one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash
from trainer_bridge.codec import SCHEMA_HASH, SCHEMA_TEXT, decode_frames
from trainer_bridge.errors import ErrorCode, ProtocolError, reason_of
from trainer_bridge.head import decode_head
from trainer_bridge.messages import ArrayEntry, Kind
from trainer_bridge.payload import BFLOAT16, DTYPES, to_float32, unpack
from trainer_bridge.segment import Segment

HERE = Path(__file__).parent
VECTORS = HERE / "vectors"
INDEX: dict[str, Any] = json.loads((VECTORS / "index.json").read_text())
PROTOCOL = HERE.parents[2] / "docs" / "wire-protocol.md"


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("second_reader", HERE / "second_reader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frames(vector: dict[str, Any]) -> list[bytes]:
    return [(VECTORS / name).read_bytes() for name in vector["frames"]]


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
    defaults = {"features": [], "epoch": 0, "streams": [], "sequence": 0, "reason": ""}
    assert {k: plain(theirs.get(k, defaults.get(k))) for k in vector["body"]} == vector["body"]


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


@pytest.mark.parametrize("name", INDEX["hostile"])
def test_hostile_messages_are_refused_with_the_same_name(name: str, reader: ModuleType) -> None:
    vector = INDEX["hostile"][name]
    with pytest.raises(ProtocolError) as ours:
        decode_frames(frames(vector))
    assert reason_of(ours.value.code) == vector["error"]
    with pytest.raises(reader.RefusedError) as theirs:
        reader.read_data(frames(vector))
    # Where the body has the wrong types, a loose reader may stumble a little later, over something else.
    assert str(theirs.value) == vector["error"] or vector["error"] == "bad_body"


def test_every_error_of_a_message_has_a_vector() -> None:
    shown = {vector["error"] for vector in INDEX["hostile"].values()}
    session = {ErrorCode.BAD_SEQUENCE, ErrorCode.TOO_LARGE}  # see test_session.py and test_codec.py
    assert {reason_of(c) for c in ErrorCode if c < 32 and c not in session} == shown


@pytest.mark.parametrize("name", INDEX["segments"])
def test_segments(name: str, reader: ModuleType) -> None:
    want = INDEX["segments"][name]
    segment, fault = Segment.scan(VECTORS / name, verify=True)
    assert [record.seq for record in segment.records()] == want["records"]
    assert bool(fault) == want["torn"]
    records, end = reader.read_segment((VECTORS / name).read_bytes())
    assert [n for n, _, _ in records] == want["records"]
    assert bool(end) == want["torn"]
    for number, head, payload in records:
        assert reader.read_data([head, payload])["sequence"] == number


def test_the_text_and_the_code_say_the_same() -> None:
    text = PROTOCOL.read_text()
    assert SCHEMA_TEXT in text
    assert xxhash.xxh3_64_intdigest(SCHEMA_TEXT.encode()) == SCHEMA_HASH == INDEX["schema_hash"]
    section = text[text.index("### 3.7 Error codes") : text.index("### 3.8 Ranks")]
    codes = dict(re.findall(r"\| (\d+) \| ([a-z_]+) (?=\|)", section))
    assert {int(number): name for number, name in codes.items()} == {int(c): reason_of(c) for c in ErrorCode}
    kinds = {int(n): name for n, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", text, re.MULTILINE)}
    assert kinds == {int(kind): kind.name for kind in Kind}
    assert all(f"`{code}`" in text for code in [*DTYPES, BFLOAT16])
