"""The log of short-lived messages: remote control, events, replies. Written once, read by every queue that takes part.

A message has a number, and the order of numbers is the order of commits (``dialect.post``); a queue has a cursor, which readers
move by compare-and-set, so that two consumers of one queue share its messages. The log and the cursors may be lost with the
server (UNLOGGED; on SQLite a side file that does not wait for the disk), and what expired is deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dbqueue.database.dialect import Dialect, OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Letter
from dbqueue.database.wakeup import BELL
from dbqueue.routing import matches

BATCH = 200
PRUNED = 5_000
"""Messages that one transaction of a prune deletes at most: on SQLite, who posts meanwhile waits for it."""
TRIES = 20
SKIPPED = 1_000
"""Others' messages behind a cursor after which it is moved past them, though none was for its queue: a look reads all that lie there."""

Binding = tuple[str, str, str]
"""Exchange, its type, routing key or pattern."""


@dataclass(frozen=True)
class Item:
    id: int
    exchange: str
    routing_key: str
    head: bytes
    payload: bytes


def control_since(dialect: Dialect, last: int) -> tuple[str, dict[str, object]]:
    """A statement for PostgreSQL, to be sent together with others: the last message (null: none came after ``last``), and whether
    remote control is among those that came."""
    text = dialect.portable(
        "SELECT max(id), bool_or(right(exchange, 7) = '.pidbox') FROM {mail} WHERE id > :last::bigint"
    )
    return text, {"last": last}


class Mail:
    """One database's log. Thread-safe; every call is a transaction of its own, on a pooled connection or on the ``session`` that the
    caller has. (On SQLite the log is a file with a connection of its own.)"""

    def __init__(self, database: Database) -> None:
        self._database, self._dialect = database, database.dialect
        self._lock = threading.Lock()
        self._own: OwnSession | None = None

    @contextmanager
    def _session(self, given: OwnSession | None = None) -> Iterator[OwnSession]:
        with self._lock, self._database.errors():
            if self._own is None:
                self._own = self._dialect.mail_session()
            if self._own is not None:
                yield self._own
                return
        if given is not None:
            with self._database.errors():
                yield given
            return
        with self._database.session() as session:
            yield session

    def close(self) -> None:
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own.close()

    def post(self, letter: Letter) -> None:
        with self._session() as session:
            self._dialect.post(session, letter)

    def open(self, queue: str) -> None:
        """The queue reads what is written from now on, unless it has a cursor already."""
        with self._session() as session:
            session.execute(
                self._dialect.portable(
                    "INSERT INTO {cursors} (queue, position) SELECT :queue, COALESCE(max(id), 0) FROM {mail} WHERE 1 = 1 "
                    "ON CONFLICT (queue) DO NOTHING"
                ),
                {"queue": queue},
            )

    def _begin(self, session: OwnSession, queue: str) -> None:
        session.execute(
            self._dialect.portable(
                "INSERT INTO {cursors} (queue, position) VALUES (:queue, 0) ON CONFLICT (queue) DO NOTHING"
            ),
            {"queue": queue},
        )

    def drop(self, queue: str, session: OwnSession | None = None) -> None:
        with self._session(session) as session:
            session.execute(self._dialect.portable("DELETE FROM {cursors} WHERE queue = :queue"), {"queue": queue})

    def read(
        self,
        queue: str,
        bindings: Sequence[Binding],
        limit: int,
        rank: Callable[[Item], int] | None = None,
        session: OwnSession | None = None,
    ) -> list[Item]:
        """Takes up to ``limit`` messages of the queue, best ``rank`` first, and moves its cursor behind them. With a rank that sets
        later messages before earlier ones, all that are there are taken."""
        with self._session(session) as session:
            for _ in range(TRIES):
                at, end, rows = self._look(session, queue, bindings)
                if at is None:  # the server crashed and lost it, and with it all messages that are older than the crash
                    self._begin(session, queue)
                    continue
                mine = [row for row in rows if self._is_for(row, queue, bindings)]
                to = rows[-1].id if rows else at
                skips = len(rows) < BATCH and end - to >= SKIPPED
                to = end if skips else to
                if rank is not None and len({rank(row) for row in mine}) > 1:
                    mine.sort(key=lambda row: (rank(row), row.id))
                elif len(mine) > limit:
                    mine = mine[:limit]
                    to = mine[-1].id
                if not mine and len(rows) < BATCH // 4 and not skips:  # not worth a write
                    return []
                if self._move(session, queue, at, to) and (mine or len(rows) < BATCH):
                    return mine
            return []

    def _look(self, session: OwnSession, queue: str, bindings: Sequence[Binding]) -> tuple[int | None, int, list[Item]]:
        """The queue's cursor (None: it has none), the end of the log, and what lies between them in the exchanges that the queue is
        bound to, one batch at most."""
        exchanges = sorted({exchange for exchange, _, _ in bindings})
        names = {f"e{n}": exchange for n, exchange in enumerate(exchanges)}
        bound = f" OR exchange IN ({', '.join(':' + name for name in names)})" if names else ""
        # The batch is cut inside: a join that is sorted and cut as a whole would read all that lies behind the cursor.
        found = session.execute(
            self._dialect.portable(
                "SELECT c.position, (SELECT max(id) FROM {mail}), m.id, m.exchange, m.routing_key, m.head, m.payload FROM {cursors} c "
                "LEFT JOIN (SELECT id, exchange, routing_key, head, payload FROM {mail} "
                "WHERE id > (SELECT position FROM {cursors} WHERE queue = :queue) "
                f"AND (exchange = '' AND routing_key = :queue{bound}) AND expires_at > {{now}} ORDER BY id LIMIT {BATCH}) m ON 1 = 1 "
                "WHERE c.queue = :queue ORDER BY m.id"
            ),
            {"queue": queue, "offset": self._dialect.clock.offset, **names},
        )
        if not found:
            return None, 0, []
        rows = [row[2:] for row in found if row[2] is not None]
        items = [Item(int(row[0]), str(row[1]), str(row[2]), bytes(row[3]), bytes(row[4])) for row in rows]
        return int(found[0][0]), int(found[0][1] or 0), items

    @staticmethod
    def _is_for(item: Item, queue: str, bindings: Sequence[Binding]) -> bool:
        if not item.exchange:
            return item.routing_key == queue
        return any(
            exchange == item.exchange and matches(kind, pattern, item.routing_key)
            for exchange, kind, pattern in bindings
        )

    def _move(self, session: OwnSession, queue: str, at: int, to: int) -> bool:
        session.execute(
            self._dialect.portable("UPDATE {cursors} SET position = :to WHERE queue = :queue AND position = :at"),
            {"queue": queue, "at": at, "to": to},
        )
        return session.changed == 1

    def size(self, queue: str, bindings: Sequence[Binding]) -> int:
        """How many messages wait; not counted further than one batch."""
        with self._session() as session:
            _, _, rows = self._look(session, queue, bindings)
        return sum(self._is_for(row, queue, bindings) for row in rows)

    def purge(self, queue: str, bindings: Sequence[Binding]) -> int:
        total = 0
        while taken := self.read(queue, bindings, BATCH):
            total += len(taken)
        return total

    def prune(self, session: OwnSession | None = None) -> None:
        """Deletes what expired, batch by batch, each in a transaction of its own; where nothing did, it only reads."""
        clock, after, count = {"offset": self._dialect.clock.offset}, 0, PRUNED
        while count == PRUNED:
            with self._session(session) as own:
                last, count = own.execute(
                    self._dialect.portable(
                        "SELECT max(id), count(*) FROM (SELECT id FROM {mail} WHERE id > :after AND expires_at <= {now} "
                        f"ORDER BY id LIMIT {PRUNED}) expired"
                    ),
                    {"after": after, **clock},
                )[0]
                if count:
                    own.execute(
                        self._dialect.portable(
                            "DELETE FROM {mail} WHERE id > :after AND id <= :last AND expires_at <= {now}"
                        ),
                        {"after": after, "last": last, **clock},
                    )
                    after = last


def bells(exchange: str, routing_key: str) -> tuple[str, ...]:
    """Under which name the readers of such a message sleep: one for each exchange, of the default exchange one for each queue."""
    return (BELL + (exchange or f"={routing_key}"),)
