"""What stands between us and a PostgreSQL server, and whether a notification gets through it.

A pooler in transaction mode (PgBouncer's usual one) lends a server's session for one transaction only. So prepared
statements are not where they were made, LISTEN hears nothing, and a session's advisory lock stays behind in a session
that is not ours any more. Nothing here guesses by names: two connections that are open at once are asked which server
process serves them, and the bell is rung the way an enqueue rings it.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import time
from typing import Any

from dbqueue.database.engine import Database
from dbqueue.database.postgres import Postgres
from dbqueue.database.postgres_statements import RING_ONE
from dbqueue.database.wakeup import Listener
from dbqueue.doctor.check import Finding, Patient, Problem, Status, verdict
from dbqueue.errors import ConnectionLost
from dbqueue.settings import RESERVED_PREFIX

ROUNDS = 3
"""How often both connections are asked who serves them: with others about, one answer may come out right by chance."""
HEARD_WITHIN = 1.0
ANSWER_WITHIN = 5.0
"""Seconds until a second connection is believed to wait for a place in the pooler's pool."""

_PREPARED = "say ?pgbouncer=true in the URL, or use PgBouncer 1.22 or newer with max_prepared_statements"
_LISTEN = (
    "set listen_url to a URL that leads to the server directly, or notify = false: workers then look at every poll"
)


def pooling(patient: Patient) -> Finding:
    """Notes ``stop`` where nothing can work."""
    database = patient.database
    first = database.open_session()
    second = None
    try:
        second = database.open_session()
        served: tuple[set[str | None], ...] = set(), set()
        for number in range(ROUNDS * 2):
            served[number % 2].add(_answer((first, second)[number % 2].connection, b"SELECT pg_backend_pid()"))
            if None in served[number % 2]:
                break
        if any(None in pids for pids in served):
            patient.notes.add("stop")
            told = (
                f"a second connection got no answer within {ANSWER_WITHIN:g} s: the pooler's pool has no place for it"
            )
            needed = patient.queue.settings.workers + 3
            return Finding(
                "pooler", Status.FAILURE, told, f"a pool (default_pool_size) of {needed} or more for each worker"
            )
        if served[0] & served[1] or any(len(pids) > 1 for pids in served):
            return _transaction_mode(patient, first, second)
        between = served[0] != {str(first.connection.info.backend_pid)}
        told = "a pooler in session mode" if between else "no pooler: the connection leads to the server"
        return Finding("pooler", Status.OK, told)
    finally:
        for session in (first, second):
            if session is not None:
                with contextlib.suppress(Exception):
                    session.close()


def _answer(connection: Any, statement: bytes) -> str | None:
    """The first field of the answer; None: it did not come in time."""
    wire, until = connection.pgconn, time.monotonic() + ANSWER_WITHIN
    wire.send_query(statement)
    wire.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(wire.socket, selectors.EVENT_READ)
        while wire.is_busy():
            if not selector.select(until - time.monotonic()):
                return None
            wire.consume_input()
    value = None
    while (result := wire.get_result()) is not None:
        value = result.get_value(0, 0) or value
    return None if value is None else bytes(value).decode()


def _transaction_mode(patient: Patient, first: Any, second: Any) -> Finding:
    try:
        first.begin()
        first.rollback()
    except Exception:
        patient.notes.add("stop")
        told = "a pooler in statement mode: it refuses transactions, without which there is no queue"
        return Finding(
            "pooler", Status.FAILURE, told, "pool_mode = transaction or session, or connect to the server directly"
        )
    problems = []
    try:
        for session in (first, second):
            session.connection.execute("SELECT 1", prepare=True)
    except Exception as error:
        told = f"a pooler in transaction mode that loses prepared statements ({type(error).__name__})"
        problems.append(Problem(Status.FAILURE, told, _PREPARED))
    if patient.database.notify and patient.database.listen_url == patient.database.url:
        told = "a pooler in transaction mode, and no listen_url: workers hear no notification"
        problems.append(Problem(Status.WARNING, told, _LISTEN))
    fine = "a pooler in transaction mode; prepared statements and listening are seen to"
    return verdict("pooler", problems, fine)


def notify(patient: Patient) -> Finding:
    """The way of a real wake-up: announced as by a sleeping worker, rung from another connection through the gate of an
    enqueue."""
    database = patient.database
    poll = f"{patient.queue.settings.poll_ms} ms"
    if not database.notify:
        return Finding("notify", Status.OK, f"switched off: workers look for jobs every {poll}")
    queue = f"{RESERVED_PREFIX}doctor.{secrets.token_hex(8)}"
    try:
        sleeper = database.sleeper(patient.session, (queue,))
    except ConnectionLost as error:
        told = f"listen_url cannot be reached ({error}); workers look for jobs every {poll} instead"
        return Finding("notify", Status.WARNING, told, "correct listen_url")
    assert isinstance(sleeper, Listener)
    try:
        sleeper.announce()
        began = time.monotonic()
        rang = _ring(database, patient, queue)
        heard = rang and _heard(sleeper)
        took = time.monotonic() - began
    finally:
        with contextlib.suppress(Exception):
            sleeper.wake()  # through a pooler the lock would stay behind
        sleeper.close()
    if heard:
        return Finding("notify", Status.OK, f"a notification took {took * 1000:.0f} ms")
    if rang:
        told = f"LISTEN was accepted, but no notification arrived within {HEARD_WITHIN:g} s"
    else:
        told = "the session's advisory lock did not hold, so nobody would ring for a sleeping worker"
    remedy = (
        _LISTEN
        if database.listen_url == database.url
        else "let listen_url lead to this very server, and not to a pooler"
    )
    return Finding("notify", Status.WARNING, f"{told}; workers look for jobs every {poll} instead", remedy)


def _ring(database: Database, patient: Patient, queue: str) -> bool:
    assert isinstance(database.dialect, Postgres)
    params = {"salt": database.dialect.names.salt, "queue": queue}
    return bool(patient.session.execute(RING_ONE, params)[0][0])


def _heard(sleeper: Listener) -> bool:
    until = time.monotonic() + HEARD_WITHIN
    number = sleeper.fileno()
    assert number is not None
    with selectors.DefaultSelector() as selector:
        selector.register(number, selectors.EVENT_READ)
        while True:
            if sleeper.heard():
                return True
            if (left := until - time.monotonic()) <= 0:
                return False
            selector.select(left)
