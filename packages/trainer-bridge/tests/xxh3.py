"""XXH3, 64 bits, seed 0, in plain Python: for readers that have nothing but the standard library.

After the specification of xxHash (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). Slow: 15 MB/s.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

MASK = 2**64 - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MX1, MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
STRIPE, BLOCK = 64, 1024
START = (P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0])


def xxh3_64(data: bytes) -> int:
    """The hash as a number; on the wire it stands little endian."""
    size = len(data)
    if size > 240:
        return _long(data)
    if size > 128:
        return _medium(data)
    if size > 16:
        return _short(data)
    if size > 8:
        low = _u64(data, 0) ^ _u64(SECRET, 24) ^ _u64(SECRET, 32)
        high = _u64(data, size - 8) ^ _u64(SECRET, 40) ^ _u64(SECRET, 48)
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche(size + swapped + high + _fold(low, high))
    if size > 3:
        h = _u32(data, size - 4) + (_u32(data, 0) << 32) ^ _u64(SECRET, 8) ^ _u64(SECRET, 16)
        h ^= _rotated(h, 49) ^ _rotated(h, 24)
        h = h * MX2 & MASK
        h = (h ^ (h >> 35) + size) * MX2 & MASK
        return h ^ h >> 28
    if size:
        h = data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8
        return _xxh64_avalanche(h ^ _u32(SECRET, 0) ^ _u32(SECRET, 4))
    return _xxh64_avalanche(_u64(SECRET, 56) ^ _u64(SECRET, 64))


def _short(data: bytes) -> int:
    size = len(data)
    total = size * P64[0]
    for n in range((size - 1) // 32 + 1):
        total += _mix(data, 16 * n, 32 * n) + _mix(data, size - 16 * (n + 1), 32 * n + 16)
    return _avalanche(total)


def _medium(data: bytes) -> int:
    size = len(data)
    total = _avalanche(size * P64[0] + sum(_mix(data, 16 * n, 16 * n) for n in range(8)))
    total += sum(_mix(data, 16 * n, 16 * (n - 8) + 3) for n in range(8, size // 16))
    return _avalanche(total + _mix(data, size - 16, 119))


def _long(data: bytes) -> int:
    lanes = list(START)
    last = (len(data) - 1) // STRIPE  # the last stripe is read from the end, and may overlap the one before
    for n in range(last):
        within = n % (BLOCK // STRIPE)
        _accumulate(lanes, data, STRIPE * n, 8 * within)
        if within == BLOCK // STRIPE - 1:
            for i, key in enumerate(struct.unpack_from("<8Q", SECRET, 128)):
                lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ key) * P32[0] & MASK
    _accumulate(lanes, data, len(data) - STRIPE, 121)
    total = len(data) * P64[0]
    for i in range(4):
        at = 11 + 16 * i
        total += _fold(lanes[2 * i] ^ _u64(SECRET, at), lanes[2 * i + 1] ^ _u64(SECRET, at + 8))
    return _avalanche(total)


def _accumulate(lanes: list[int], data: bytes, at: int, secret: int) -> None:
    values: Sequence[int] = struct.unpack_from("<8Q", data, at)
    for i, (value, key) in enumerate(zip(values, struct.unpack_from("<8Q", SECRET, secret), strict=True)):
        key ^= value
        lanes[i ^ 1] = (lanes[i ^ 1] + value) & MASK
        lanes[i] = (lanes[i] + (key & 0xFFFFFFFF) * (key >> 32)) & MASK


def _mix(data: bytes, at: int, secret: int) -> int:
    low = _u64(data, at) ^ _u64(SECRET, secret)
    return _fold(low, _u64(data, at + 8) ^ _u64(SECRET, secret + 8))


def _fold(a: int, b: int) -> int:
    product = a * b
    return product & MASK ^ product >> 64


def _avalanche(h: int) -> int:
    h &= MASK
    h = (h ^ h >> 37) * MX1 & MASK
    return h ^ h >> 32


def _xxh64_avalanche(h: int) -> int:
    h = (h ^ h >> 33) * P64[1] & MASK
    h = (h ^ h >> 29) * P64[2] & MASK
    return h ^ h >> 32


def _rotated(h: int, by: int) -> int:
    return (h << by | h >> 64 - by) & MASK


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")
