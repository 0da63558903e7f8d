"""Hugging Face `datasets` and Parquet: every field of a sample in a column, and back, bit for bit.

Written against datasets 5.2.0 and pyarrow 26.0.1. Token arrays are lists of their own dtype (int32 ids and
versions, uint8 mask, float32 logprobs with NaN kept), `turns` is a list of structs, `routed_experts` is flat
with its shape and dtype beside it, `provenance` and `extra` are JSON text; in it, a number that JSON does not
have (NaN, infinities) is `{"float64": "7ff8000000000000"}`, its bits in hex. Nothing is left out, shifted or
padded. For supervised training take the rows with `in_loss` and use `token_ids` and `loss_mask`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from token_tracking.sample import Sample, Scalar, Turn

from trainer_bridge.adapters.loading import load

_BITS = "float64"
_INSTALL = "pyarrow (datasets brings it)"
_ARRAYS = {
    "token_ids": "int32",
    "loss_mask": "uint8",
    "logprobs": "float32",
    "versions": "int32",
    "kept_ids": "int32",
    "kept_offsets": "int64",
}
_TURN = {
    "start": "int64",
    "end": "int64",
    "finish_reason": "string",
    "logprob_kind": "string",
    "temperature": "float64",
    "top_p": "float64",
    "top_k": "int64",
    "min_p": "float64",
    "reward": "float64",
}
_SCALARS = {
    "rollout_id": "string",
    "group_id": "string",
    "attempt": "int64",
    "part": "int64",
    "parts": "int64",
    "task_id": "string",
    "prompt_length": "int64",
    "reward": "float64",
    "in_loss": "bool_",
    "in_baseline": "bool_",
    "status": "string",
    "source": "string",
    "policy_run": "string",
}


def dataset(samples: Iterable[Sample]) -> Any:
    """A `datasets.Dataset` with one row per sample.

    Raises:
        TrainerMissingError: datasets is not installed.
    """
    return load("datasets", "datasets").Dataset(table(samples))


def table(samples: Iterable[Sample]) -> Any:
    """A `pyarrow.Table` with one row per sample.

    Raises:
        TrainerMissingError: pyarrow is not installed.
    """
    pyarrow = load("pyarrow", _INSTALL)
    return pyarrow.Table.from_pylist([_row(sample) for sample in samples], schema=_schema(pyarrow))


def write_parquet(samples: Iterable[Sample], path: str | os.PathLike[str], *, batch: int = 64) -> int:
    """Write samples to a Parquet file as they come, `batch` of them in memory; returns how many.

    Raises:
        TrainerMissingError: pyarrow is not installed.
    """
    pyarrow, parquet = load("pyarrow", _INSTALL), load("pyarrow.parquet", _INSTALL)
    count, rows = 0, list[dict[str, Any]]()
    schema = _schema(pyarrow)
    with parquet.ParquetWriter(os.fspath(path), schema) as writer:
        for sample in samples:
            rows.append(_row(sample))
            if len(rows) == batch:
                count += len(rows)
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows.clear()
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    return count + len(rows)


def read_parquet(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a file that `write_parquet` wrote.

    Raises:
        SampleError: a row contradicts itself.
        TrainerMissingError: pyarrow is not installed.
    """
    with load("pyarrow.parquet", _INSTALL).ParquetFile(os.fspath(path)) as file:
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                yield sample_of(row)


def sample_of(row: dict[str, Any]) -> Sample:
    """The sample of one row of `dataset`, `table` or a Parquet file."""
    fields: dict[str, Any] = {name: row[name] for name in _SCALARS}
    for name, dtype in _ARRAYS.items():
        fields[name] = None if row[name] is None else np.array(row[name], dtype)
    if row["routed_experts"] is not None:
        flat = np.array(row["routed_experts"], row["routed_experts_dtype"])
        fields["routed_experts"] = flat.reshape(row["routed_experts_shape"])
    return Sample(
        turns=tuple(Turn(**turn) for turn in row["turns"]),
        provenance=_mapping(row["provenance"]),
        extra=_mapping(row["extra"]),
        **fields,
    )


def _row(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(sample).items() if name in _SCALARS
    }
    arrays: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(sample).items() if name in _ARRAYS
    }
    experts = sample.routed_experts
    return {
        **row,
        **arrays,
        "turns": [msgspec.structs.asdict(turn) for turn in sample.turns],
        "routed_experts": None if experts is None else experts.ravel().astype(np.int64),
        "routed_experts_shape": None if experts is None else list(experts.shape),
        "routed_experts_dtype": None if experts is None else experts.dtype.name,
        "provenance": _text(sample.provenance),
        "extra": _text(sample.extra),
    }


def _text(values: Mapping[str, Scalar]) -> str:
    """JSON has no NaN and no infinity, and a scalar is never an object: their bits go into one."""
    out: dict[str, Any] = {
        name: {_BITS: struct.pack(">d", value).hex()}
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }
    return msgspec.json.encode(out).decode()


def _mapping(text: str) -> dict[str, Scalar]:
    return {
        name: struct.unpack(">d", bytes.fromhex(value[_BITS]))[0] if isinstance(value, dict) else value
        for name, value in msgspec.json.decode(text, type=dict[str, Scalar | dict[str, str]]).items()
    }


def _schema(pyarrow: Any) -> Any:
    def of(name: str) -> Any:
        return getattr(pyarrow, name)()

    columns = {name: of(kind) for name, kind in _SCALARS.items()}
    columns |= {name: pyarrow.list_(of(kind)) for name, kind in _ARRAYS.items()}
    columns["turns"] = pyarrow.list_(pyarrow.struct([(name, of(kind)) for name, kind in _TURN.items()]))
    columns["routed_experts"] = pyarrow.list_(pyarrow.int64())
    columns["routed_experts_shape"] = pyarrow.list_(pyarrow.int64())
    columns |= {name: pyarrow.string() for name in ("routed_experts_dtype", "provenance", "extra")}
    return pyarrow.schema(list(columns.items()))
