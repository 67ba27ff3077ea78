"""How a sleeping worker learns of new work from the database itself. Correctness rests on the worker's poll; this only makes it quick.

PostgreSQL: NOTIFY takes a lock over the whole cluster at commit, so producers send one only when somebody sleeps (the gate in
``postgres.GATE``). A sleeper announces itself by a shared advisory lock on its queues' keys, held on its LISTEN connection. A
producer that looked before the announcement sends nothing, and its job may be committed only later (with the caller's own
transaction around it that is the common case): so the sleeper remembers a transaction id taken after announcing, and trusts
its sleep only once every transaction that was open then has ended. Until that, it looks again after 2, 4, 8 ... milliseconds.

SQLite: ``PRAGMA data_version`` changes when another connection commits; it reads no page and takes microseconds.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from typing import Any, Protocol

from dbqueue.database.dialect import OwnSession
from dbqueue.database.postgres import Postgres
from dbqueue.database.postgres_statements import GATE_KEY
from dbqueue.database.tables import Names
from dbqueue.database.wire import Statement, literal

KEYS = f"SELECT q.queue, {GATE_KEY.replace('{queue}', 'q.queue')} FROM unnest(%(queues)s::text[]) q(queue)"
ANNOUNCE = "SELECT bool_and(pg_try_advisory_lock_shared(k)) FROM unnest(%(keys)s::bigint[]) k"
WAKE = "SELECT count(*) FILTER (WHERE pg_advisory_unlock_shared(k)) FROM unnest(%(keys)s::bigint[]) k"
OPEN_SINCE = "SELECT pg_current_xact_id()::text::bigint"
OLDEST_OPEN = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"


PATIENCE = 2.0
"""Seconds for an answer on the listening connection. One that fell silent, behind a firewall that forgot it or a proxy that hangs,
must not hold up the loop, which has leases to renew: it is given up like a lost one, and polling serves until there is another."""


BELL = "dbqueue.mail."
"""Begins the names under which readers of the log of short-lived messages sleep. These are rung always, so nothing is announced."""


class Sleeper(Protocol):
    """What the worker's wait needs: something to select on or an interval to look in, and the announcement of sleep."""

    announced: bool
    settled: bool

    @property
    def interval(self) -> float | None:
        """Seconds until the next call of ``heard`` while waiting; None: ``fileno`` becomes readable instead."""

    def fileno(self) -> int | None: ...
    def heard(self) -> bool: ...

    def rung(self) -> set[str] | None:
        """The names that were rung since the last call, of those it listens to; None: that cannot be told."""

    def announce(self) -> None: ...
    def look(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class DataVersion:
    """SQLite, on the worker's own connection: its own commits do not count as news, and it must be outside a transaction."""

    BUSY, QUIET = 0.004, 0.012
    BUSY_FOR = 1.0
    """Seconds after news: a look costs 0.1 ms of CPU, nearly all of it for waking up, so where nothing happens they are fewer."""
    announced = settled = True

    def __init__(self, session: OwnSession, also: OwnSession | None = None) -> None:
        self._connection = session.connection
        self._also = also  # the side file of short-lived messages; ours to close
        self._seen, self._news_at = self._version(), time.monotonic()

    @property
    def interval(self) -> float:
        return self.BUSY if time.monotonic() - self._news_at < self.BUSY_FOR else self.QUIET

    def _version(self) -> tuple[int, ...]:
        connections = [self._connection] if self._also is None else [self._connection, self._also.connection]
        return tuple(int(connection.execute("PRAGMA data_version").fetchone()[0]) for connection in connections)

    def fileno(self) -> int | None:
        return None

    def heard(self) -> bool:
        version = self._version()
        changed, self._seen = version != self._seen, version
        if changed:
            self._news_at = time.monotonic()
        return changed

    def rung(self) -> None:
        """A file has one version."""

    def announce(self) -> None: ...
    def look(self) -> None: ...
    def wake(self) -> None: ...

    def close(self) -> None:
        if self._also is not None:
            self._also.close()


class Listener:
    """PostgreSQL: a connection of its own, direct (a transaction pooler would lose LISTEN and the session's locks)."""

    interval = None

    def __init__(self, dialect: Postgres, names: Names, url: Any, queues: tuple[str, ...]) -> None:
        self._connection = dialect.connect(url)
        self._salt = names.salt
        self._keys: list[int] = []
        self.announced = self.settled = False
        self._since = 0
        self._names: dict[bytes, str] = {}
        self._rung: set[str] = set()
        self._heard = False
        try:
            self.also(queues)
        except BaseException:
            self._connection.close()
            raise

    def also(self, queues: tuple[str, ...]) -> None:
        """Hears of these too; the sleep is to be announced anew."""
        self.wake()
        rows = self._run(KEYS, {"queues": list(queues), "salt": self._salt})
        for name, key in rows:
            channel = f"dbqueue_{int(key) & 0xFFFFFFFFFFFFFFFF:x}"
            self._names[channel.encode()] = name
            self._run(f'LISTEN "{channel}"')
        self._keys += [int(key) for queue, key in rows if not queue.startswith(BELL)]

    def _run(self, statement: str, params: Mapping[str, Any] | None = None) -> list[tuple[str, ...]]:
        """The rows as texts. Below the cursor, which would wait for ever. Raises the driver's error, also after PATIENCE."""
        from psycopg import OperationalError, errors, pq

        wire, compiled = self._connection.pgconn, Statement.of(statement)
        wire.send_query_params(compiled.text, [literal((params or {})[name]) for name in compiled.names])
        poll, until, results = select.poll(), time.monotonic() + PATIENCE, []
        poll.register(wire.socket, select.POLLIN)
        while True:
            while wire.flush() or wire.is_busy():
                if not poll.poll(max(0.0, until - time.monotonic()) * 1_000):
                    raise OperationalError("no answer on the listening connection")
                wire.consume_input()
            result = wire.get_result()
            if result is None:
                break
            results.append(result)
        result = results[-1]
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise errors.error_from_result(result)
        self._take_notices()  # what came in the middle of the statement ``heard`` would not find on the wire
        return [
            tuple(result.get_value(row, column).decode() for column in range(result.nfields))
            for row in range(result.ntuples)
        ]

    def fileno(self) -> int | None:
        return int(self._connection.fileno())

    def _take_notices(self) -> None:
        while (notice := self._connection.pgconn.notifies()) is not None:
            self._heard = True
            name = self._names.get(notice.relname)
            if name is not None:  # else the session was another's before, in a pooler
                self._rung.add(name)

    def heard(self) -> bool:
        self._connection.pgconn.consume_input()
        self._take_notices()
        heard, self._heard = self._heard, False
        return heard

    def rung(self) -> set[str]:
        rung, self._rung = self._rung, set()
        return rung

    def announce(self) -> None:
        """One try for the locks, and no waiting: a producer may hold one for a moment, or for ever if it died inside its statement.
        Refused: ``announced`` stays False, nobody rings for us, and the caller tries again later."""
        if not self._keys:
            self.announced = self.settled = True
        elif self._run(ANNOUNCE, {"keys": self._keys})[0][0] == "t":
            self.announced, self.settled = True, False
            self._since = int(self._run(OPEN_SINCE)[0][0])
        else:
            self._run("SELECT pg_advisory_unlock_all()")

    def look(self) -> None:
        """Settled once every transaction that was open at the announcement has ended. The worker claims after each look."""
        self.settled = int(self._run(OLDEST_OPEN)[0][0]) > self._since

    def wake(self) -> None:
        """Producers need not ring any more."""
        if self.announced and self._keys:
            self.announced = self.settled = False
            self._run(WAKE, {"keys": self._keys})

    def close(self) -> None:
        self._connection.close()
