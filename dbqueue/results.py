"""Results of Celery tasks, groups and chords. Verbs on the caller's session, which never commit; what is stored is opaque here.

A result has a state and, if it is not kept for ever, an instant at which it is gone for every reader, whether it was pruned by then or
not. A success is final. A chord is counted in its row: whoever counts the last part holds the row's lock until the
transaction ends, and deals with the body in that same transaction, so a chord has one body however its parts return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from zlib import crc32

from dbqueue.clock import to_datetime
from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.postgres import as_text
from dbqueue.database.tables import ChordCount, StoredResult

BELLS = 64
"""Names under which waiting processes sleep: each result rings one of them, so that a process is seldom woken for others' results."""
LAST_PART = 2**31 - 1
"""The place of a part that does not say where it belongs."""
ADDED = -1
"""In place of a place: the part was added to the chord, which says nothing of its return."""
DONE_FOR = 86_400_000_000
"""Microseconds for which it is known that a chord was done, if results are kept for ever."""
AT_ONCE = 1024
"""Ids in one statement."""
TABLES = ("results", "groups", "chords")


def bell(task_id: str) -> str:
    return f"dbqueue.result.{crc32(task_id.encode()) % BELLS}"


def store(dialect: Dialect, session: Session, task_id: str, state: str, meta: bytes, ttl: int | None) -> None:
    dialect.store_result(session, StoredResult(task_id, state, meta, bell(task_id), ttl))


def load(dialect: Dialect, session: Session, task_ids: Iterable[str]) -> dict[str, tuple[str, bytes]]:
    """State and meta of those that are there and have not expired."""
    found: dict[str, tuple[str, bytes]] = {}
    for batch in _batches(list(task_ids)):
        asked, params = dialect.among("task_id", batch)
        rows = session.execute(
            dialect.portable(
                f"SELECT task_id, state, meta FROM {{results}} WHERE {asked} AND (expires_at IS NULL OR expires_at > {{now}})"
            ),
            {**params, "offset": dialect.clock.offset},
        )
        found.update({as_text(row[0]): (as_text(row[1]), bytes(row[2])) for row in rows})
    return found


@dataclass(frozen=True)
class StoredRecord:
    """What the database knows of one result, for people. ``size`` in bytes as stored; ``meta`` only where it is asked for."""

    state: str
    stored_at: datetime
    expires_at: datetime | None
    size: int | None = None
    meta: bytes | None = None

    def __repr__(self) -> str:
        return f"<StoredRecord {self.state} {self.stored_at}>"


def describe(
    dialect: Dialect, session: Session, task_id: str, *, with_size: bool = False, with_meta: bool = False
) -> StoredRecord | None:
    """None: nothing is stored, or it has expired. Without the last two it needs no right to read what the task returned."""
    columns = "state, stored_at, expires_at" + (", length(meta)" if with_size else "") + (", meta" if with_meta else "")
    rows = session.execute(
        dialect.portable(
            f"SELECT {columns} FROM {{results}} WHERE task_id = :task_id AND (expires_at IS NULL OR expires_at > {{now}})"
        ),
        {"task_id": task_id, "offset": dialect.clock.offset},
    )
    if not rows:
        return None
    state, stored_at, expires_at, *rest = rows[0]
    return StoredRecord(
        as_text(state),
        to_datetime(int(stored_at)),
        None if expires_at is None else to_datetime(int(expires_at)),
        int(rest.pop(0)) if with_size else None,
        bytes(rest.pop(0)) if with_meta else None,
    )


def forget(dialect: Dialect, session: Session, task_id: str) -> None:
    session.execute(dialect.portable("DELETE FROM {results} WHERE task_id = :task_id"), {"task_id": task_id})


# -- groups ------------------------------------------------------------------------------------------------------------


def save_group(dialect: Dialect, session: Session, group_id: str, meta: bytes, ttl: int | None) -> None:
    session.execute(
        dialect.portable(
            "INSERT INTO {groups} (group_id, meta, expires_at) SELECT :group_id, :meta, {now} + :ttl WHERE 1 = 1 "
            "ON CONFLICT (group_id) DO UPDATE SET meta = excluded.meta, expires_at = excluded.expires_at"
        ),
        {"group_id": group_id, "meta": meta, "ttl": ttl, "offset": dialect.clock.offset},
    )


def load_group(dialect: Dialect, session: Session, group_id: str) -> bytes | None:
    rows = session.execute(
        dialect.portable(
            "SELECT meta FROM {groups} WHERE group_id = :group_id AND (expires_at IS NULL OR expires_at > {now})"
        ),
        {"group_id": group_id, "offset": dialect.clock.offset},
    )
    return bytes(rows[0][0]) if rows else None


def delete_group(dialect: Dialect, session: Session, group_id: str) -> None:
    session.execute(dialect.portable("DELETE FROM {groups} WHERE group_id = :group_id"), {"group_id": group_id})


# -- chords ------------------------------------------------------------------------------------------------------------


def set_chord_size(dialect: Dialect, session: Session, group_id: str, size: int, ttl: int | None) -> None:
    """Said before the last part is published. A chord whose body was dealt with begins anew: a frozen one may be applied again."""
    session.execute(
        dialect.portable(
            "INSERT INTO {chords} AS c (group_id, size, expires_at) SELECT :group_id, :size, {now} + :ttl WHERE 1 = 1 "
            "ON CONFLICT (group_id) DO UPDATE SET size = excluded.size, expires_at = excluded.expires_at, done = :no, "
            "returned = CASE WHEN c.done = :yes THEN 0 ELSE c.returned END, extra = CASE WHEN c.done = :yes THEN 0 ELSE c.extra END"
        ),
        {"group_id": group_id, "size": size, "ttl": ttl, "no": False, "yes": True, "offset": dialect.clock.offset},
    )


def add_to_chord(dialect: Dialect, session: Session, group_id: str, task_id: str, ttl: int | None) -> None:
    """One part more than its size says, once for each task; the caller is a part itself, so the chord cannot be complete."""
    key = {"group_id": group_id}
    session.execute(
        dialect.portable(
            "INSERT INTO {chords} (group_id, expires_at) SELECT :group_id, {now} + :ttl WHERE 1 = 1 "
            "ON CONFLICT (group_id) DO UPDATE SET expires_at = excluded.expires_at"
        ),
        {**key, "ttl": ttl, "offset": dialect.clock.offset},
    )
    session.execute(
        dialect.portable(
            "INSERT INTO {chord_parts} (group_id, task_id, part, meta) SELECT :group_id, :task_id, :part, :meta WHERE 1 = 1 "
            "ON CONFLICT DO NOTHING"
        ),
        {**key, "task_id": task_id, "part": ADDED, "meta": b""},
    )
    if session.changed == 1:
        session.execute(dialect.portable("UPDATE {chords} SET extra = extra + 1 WHERE group_id = :group_id"), key)


def count_part(
    dialect: Dialect, session: Session, group_id: str, task_id: str, part: int, meta: bytes, ttl: int | None
) -> ChordCount:
    return dialect.count_part(session, group_id, task_id, part, meta, ttl)


def chord_parts(dialect: Dialect, session: Session, group_id: str) -> list[bytes]:
    """What the parts returned, in the order of the header."""
    rows = session.execute(
        dialect.portable(
            "SELECT meta FROM {chord_parts} WHERE group_id = :group_id AND part > :added ORDER BY part, task_id"
        ),
        {"group_id": group_id, "added": ADDED},
    )
    return [bytes(row[0]) for row in rows]


def end_chord(dialect: Dialect, session: Session, group_id: str) -> bool:
    """Its body was dealt with: what comes later counts no more. False: somebody said so before."""
    key = {"group_id": group_id}
    session.execute(
        dialect.portable(
            "UPDATE {chords} SET done = :yes, expires_at = coalesce(expires_at, {now} + :kept) "
            "WHERE group_id = :group_id AND done = :no"
        ),
        {**key, "yes": True, "no": False, "kept": DONE_FOR, "offset": dialect.clock.offset},
    )
    ended = session.changed == 1
    session.execute(dialect.portable("DELETE FROM {chord_parts} WHERE group_id = :group_id"), key)
    return ended


# -- what has expired --------------------------------------------------------------------------------------------------


def prune(dialect: Dialect, session: Session, limit: int) -> int:
    """Deletes up to ``limit`` rows of each kind that have expired, skipping what others hold; returns how many."""
    now, pruned = dialect.now(session), 0  # no clock in the condition: an index compares with a value only
    for table, key in (("results", "task_id"), ("groups", "group_id"), ("chords", "group_id")):
        rows = session.execute(
            dialect.portable(
                f"SELECT {key} FROM {{{table}}} WHERE expires_at <= :now ORDER BY expires_at LIMIT {limit} {{skip_locked}}"
            ),
            {"now": now},
        )
        gone = [as_text(row[0]) for row in rows]
        for name in ("chords", "chord_parts") if table == "chords" else (table,):
            _delete(dialect, session, name, key, gone)
        pruned += len(gone)
    return pruned


def _delete(dialect: Dialect, session: Session, table: str, key: str, gone: Sequence[str]) -> None:
    for batch in _batches(gone):
        asked, params = dialect.among(key, batch)
        session.execute(dialect.portable(f"DELETE FROM {{{table}}} WHERE {asked}"), params)


def _batches(values: Sequence[str]) -> Iterator[Sequence[str]]:
    return (values[start : start + AT_ONCE] for start in range(0, len(values), AT_ONCE))
