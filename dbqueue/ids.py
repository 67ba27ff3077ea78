"""Ids of jobs and tokens of claims: 16 bytes inside, ``uuid.UUID`` at the public doors.

A job's id is made by the client, so that an insert whose answer was lost can be looked up instead of repeated. It is a
UUIDv7 with a counter for the process in place of its first random bits: ids made within one millisecond keep their order,
and index pages are filled from the right (random ids cost up to 2.8 times the WAL). A token is random: it fences one claim.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from itertools import count

_lock = threading.Lock()
_last_ms = 0
_counter = 0

ZERO = bytes(16)


def new_id() -> bytes:
    """A fresh UUIDv7, greater than every id that this process made before."""
    global _last_ms, _counter
    tail = os.urandom(8)
    with _lock:
        now = time.time_ns() // 1_000_000
        if now > _last_ms:
            _last_ms, _counter = now, tail[0] & 0x7F  # a random start, half of the 12 bits left to count
        else:
            _counter += 1
            if _counter > 0xFFF:
                _last_ms, _counter = _last_ms + 1, 0
        stamp, number = _last_ms, _counter
    head = (stamp << 16) | 0x7000 | number
    return head.to_bytes(8, "big") + bytes(((tail[0] & 0x3F) | 0x80,)) + tail[1:]


def _fresh_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child forked while another thread held the lock would wait for ever; ids stay unique by their random tail.
os.register_at_fork(after_in_child=_fresh_lock)


def new_token() -> bytes:
    return os.urandom(16)


_worker_numbers = count(1)


def worker_id(host: str) -> str:
    """Names one worker's life: never reused, so rows claimed by an earlier life are never taken for one's own."""
    return f"{host}:{os.getpid()}:{next(_worker_numbers)}:{os.urandom(4).hex()}"


def as_bytes(value: object) -> bytes:
    """What any driver returns for a stored id, as 16 bytes."""
    if isinstance(value, bytes) and len(value) == 16:
        return value
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        return raw if len(raw) == 16 else uuid.UUID(raw.decode("ascii")).bytes
    return uuid.UUID(str(value)).bytes


def as_uuid(value: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=value)
