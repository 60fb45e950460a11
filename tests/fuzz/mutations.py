"""Damage files at random, but the same in every run: case `number` of a kind always has the same bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

_SIZES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
_NUMBER_FORMATS = ("<B", "<H", ">H", "<I", ">I")

_TOKENS = (
    *(b"\0", b"\r", b"\n", b'"', b"'", b",", b"{", b"}", b"[", b"]", b"- ", b": ", b"#", b"\\", b"/", b"../"),
    *(b"&a ", b"*a", b"<<: *a", b"!!python/object/apply:os.system ", b"!x", b"---\n", b"? ", b"|\n", b"~"),
    *(b"null", b"true", b"-1", b"0", b"1e999", b".nan", b".inf", b"9" * 400, b"0x", b"1_0", b"2026-01-01"),
    *(b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"\xc2\x85", b"\xe2\x80\xae", b"\x1b]0;x\x07"),
    *(b"[" * 5_000, b'{"a":' * 2_000, b"a" * 5_000, b"https://user:password@host/x", b"/dev/zero"),
)
"""Texts with a meaning in YAML, JSON, CSV or file systems."""

Operation = Callable[[bytearray, Sequence[bytes], random.Random], None]


def mutated(seeds: Sequence[bytes], kind: str, number: int) -> bytes:
    """Return case `number`: one of the seeds with one to eight mutations."""
    source = random.Random(f"{kind} {number}")
    data = bytearray(seeds[number % len(seeds)])
    for _ in range(source.choice((1, 1, 1, 2, 3, 8))):
        source.choice(_OPERATIONS)(data, seeds, source)
    return bytes(data)


def _position(data: bytearray, source: random.Random) -> int:
    """Return a position, in half of the cases among the first bytes, where most formats have their header."""
    end = len(data) if source.random() < 0.5 else min(len(data), 128)
    return source.randrange(end) if end else 0


def _flip_bit(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    if data:
        data[_position(data, source)] ^= 1 << source.randrange(8)


def _replace_bytes(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    start = _position(data, source)
    length = source.randint(1, 16)
    data[start : start + length] = source.randbytes(len(data[start : start + length]))


def _write_number(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    kind = source.choice(_NUMBER_FORMATS)
    size = struct.calcsize(kind)
    start = _position(data, source)
    if start + size <= len(data):
        data[start : start + size] = struct.pack(kind, source.choice(_SIZES) % 256**size)


def _cut(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    del data[_position(data, source) :]


def _remove(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    start = _position(data, source)
    del data[start : start + source.randint(1, 64)]


def _repeat(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    start = _position(data, source)
    part = bytes(data[start : start + source.randint(1, 256)])
    data[start:start] = part * source.choice((1, 2, 100))


def _insert_token(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    start = _position(data, source)
    data[start:start] = source.choice(_TOKENS)


def _splice(data: bytearray, seeds: Sequence[bytes], source: random.Random) -> None:
    other = source.choice(seeds)
    start = _position(data, source)
    data[start:] = other[_position(bytearray(other), source) :]


_OPERATIONS: tuple[Operation, ...] = (
    *(_flip_bit, _replace_bytes, _write_number, _cut, _remove, _repeat, _insert_token, _splice),
)
