"""The worker's turn on the wire: prepared statements, pipelined behind one Sync, on libpq itself.

psycopg's cursors cost 300 us a turn, which is what a turn of four jobs may cost altogether; libpq through ``psycopg.pq`` costs a
third. This is the only place that goes below the cursor. The connection stays an ordinary psycopg connection between two turns.

Parameters travel as text, whose types the casts in our statements fix; rows come back in binary through psycopg's own loaders.
"""

from __future__ import annotations

import re
import select
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from dbqueue.database.dialect import Row

_PLAIN = re.compile(r"[0-9a-zA-Z_-]+").fullmatch


class Statement:
    """One of our texts with ``%(name)s`` as ``$n``, and the order of its parameters."""

    def __init__(self, text: str) -> None:
        order: dict[str, int] = {}
        numbered = re.sub(r"%\((\w+)\)s", lambda m: f"${order.setdefault(m[1], len(order) + 1)}", text)
        self.text = numbered.encode()
        self.names = tuple(order)

    @staticmethod
    @cache
    def of(text: str) -> Statement:
        return Statement(text)


@dataclass(slots=True)
class Flight:
    """Statements that were sent, and what has come of their answer."""

    steps: Sequence[tuple[str, Mapping[str, Any]]]
    pending: deque[str | None]
    """For each answer that is still to come the text that it prepares, or None for rows; the Sync's is the last."""
    blocking: int
    results: list[Any] = field(default_factory=list)
    failed: Any = None


class Wire:
    """One connection's. What it has prepared lives as long as the connection."""

    def __init__(self, connection: Any) -> None:
        from psycopg import adapt, errors, pq

        self._connection, self._wire = connection, connection.pgconn
        self._transformer = adapt.Transformer(connection)
        self._errors, self._status = errors, pq.ExecStatus
        self._prepared: dict[str, bytes] = {}
        self._numbers = count(1)

    def run(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[int, list[Row]]]:
        """Runs the statements as one implicit transaction, committed by the Sync that ends them; returns row count and rows of each.
        Raises the driver's error; then nothing of it was committed, unless the connection itself was lost."""
        return self.land(self.launch(steps))

    def ask(self, text: str, params: Mapping[str, Any]) -> list[Row]:
        """A single statement's rows. A pipeline of one would cost a third more."""
        statement, wire = Statement.of(text), self._wire
        values = [literal(params[name]) for name in statement.names]
        if self._connection.prepare_threshold is None:
            wire.send_query_params(statement.text, values, None, None, 1)
        else:
            name = self._prepared.get(text)
            if name is None:
                return self.run([(text, params)])[0][1]  # which prepares it
            wire.send_query_prepared(name, values, None, 1)
        try:
            return self._read(_answer(self._connection))[1]
        except self._errors.InvalidSqlStatementName:
            self._prepared.clear()
            return self.run([(text, params)])[0][1]

    def launch(self, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> Flight:
        """The first half of ``run``: sends without waiting. Until it has landed, nothing else may use the connection."""
        wire, named = self._wire, self._connection.prepare_threshold is not None
        # All values first: one that cannot be sent must not leave half a pipeline behind.
        statements = [(text, Statement.of(text)) for text, _ in steps]
        values = [[literal(params[n]) for n in s.names] for (_, s), (_, params) in zip(statements, steps, strict=True)]
        blocking, wire.nonblocking = wire.nonblocking, 1
        wire.enter_pipeline_mode()
        expected: list[str | None] = []
        try:
            for (text, statement), row in zip(statements, values, strict=True):
                if named:
                    wire.send_query_prepared(self._prepare(text, statement, expected), row, None, 1)
                else:  # a pooler may give each transaction another server: nothing has a name
                    wire.send_query_params(statement.text, row, None, None, 1)
                expected.append(None)
            wire.pipeline_sync()
            wire.flush()
        except BaseException:
            wire.finish()  # half a pipeline is of no use to anybody
            raise
        return Flight(steps, deque([*expected, "Sync"]), blocking)

    def has_landed(self, flight: Flight) -> bool:
        """Takes what has come of the answer, and never waits. False: there is more to come."""
        self._wire.flush()
        self._wire.consume_input()
        return self._collect(flight)

    def land(self, flight: Flight) -> list[tuple[int, list[Row]]]:
        """The second half of ``run``: waits for the answer."""
        try:
            results = self._land(flight)
        except self._errors.InvalidSqlStatementName:
            # After a ROLLBACK psycopg deallocates all that is prepared on its connection, ours too.
            self._prepared.clear()
            results = self._land(self.launch(flight.steps))
        return [self._read(result) for result in results]

    def _land(self, flight: Flight) -> list[Any]:
        """Waits on the socket, never inside libpq: its own wait holds the interpreter's lock."""
        wire = self._wire
        try:
            if not self._collect(flight):
                poll = select.poll()
                poll.register(wire.socket, select.POLLIN | select.POLLOUT)
                while wire.flush():
                    poll.poll()
                    wire.consume_input()
                poll.modify(wire.socket, select.POLLIN)
                while not self._collect(flight):
                    poll.poll()
                    wire.consume_input()
        except BaseException as error:
            if not isinstance(
                error, Exception
            ):  # interrupted: the rest of the answer would be taken for the next one's
                wire.finish()
            raise
        finally:
            if wire.status == 0:
                wire.exit_pipeline_mode()
                wire.nonblocking = flight.blocking
        if flight.failed is not None:
            raise self._errors.error_from_result(flight.failed)
        return flight.results

    def _collect(self, flight: Flight) -> bool:
        wire, pending = self._wire, flight.pending
        while pending:
            if wire.is_busy():
                return False
            result = wire.get_result()
            if result is None:  # the end of one statement's results
                continue
            preparing = pending.popleft()
            if result.status in (self._status.FATAL_ERROR, self._status.PIPELINE_ABORTED):
                flight.failed = flight.failed or result
                if preparing is not None:
                    self._prepared.pop(preparing, None)
            elif preparing is None:
                flight.results.append(result)
        return True

    def _prepare(self, text: str, statement: Statement, expected: list[str | None]) -> bytes:
        name = self._prepared.get(text)
        if name is None:
            name = self._prepared[text] = b"dbqueue_%d" % next(self._numbers)
            self._wire.send_prepare(name, statement.text)
            expected.append(text)
        return name

    def _read(self, result: Any) -> tuple[int, list[Row]]:
        count = result.command_tuples or 0
        if result.status != self._status.TUPLES_OK or not result.ntuples:
            return count, []
        self._transformer.set_pgresult(result, set_loaders=True)
        return count, self._transformer.load_rows(0, result.ntuples, tuple)


IN_TRANSACTION = 2
"""libpq's transaction status."""


def finds_row(connection: Any, text: str, params: Mapping[str, Any]) -> bool | None:
    """Whether a statement brings a row, on a psycopg connection that is somebody else's: it is not prepared, and nothing of it is kept.
    The waiting is the driver's own; without its cursor it costs the client half. None: nothing was sent, for the cursor has more to do
    here: begin the transaction, sync a pipeline, write texts in another encoding."""
    wire = connection.pgconn
    if (
        wire.transaction_status != IN_TRANSACTION
        or wire.pipeline_status
        or wire.parameter_status(b"client_encoding") != b"UTF8"
    ):
        return None
    statement = Statement.of(text)
    values = [literal(params[name]) for name in statement.names]
    with connection.lock:
        wire.send_query_params(statement.text, values, None, None, 1)
        return bool(_answer(connection).ntuples)


def _answer(connection: Any) -> Any:
    """Of the one statement that was sent. The driver waits, in its own way: an interrupted wait cancels the statement."""
    from psycopg import errors, generators, pq

    result = connection.wait(generators.execute(connection.pgconn))[-1]
    if result.status in (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.PIPELINE_ABORTED):
        raise errors.error_from_result(result)
    return result


def literal(value: Any) -> bytes | None:
    """PostgreSQL's text form of what our statements take: numbers, texts, bytes, flags and lists of them."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, list):
        return array(value).encode()
    if "\0" in value:  # libpq would end the text there without a word
        raise ValueError("a text for PostgreSQL cannot contain NUL")
    return bytes(value.encode())


def array(items: Sequence[Any]) -> str:
    """PostgreSQL's text form of a list of numbers, texts or bytes."""
    if items and type(items[0]) is bytes and None not in items:
        return '{"\\\\x' + '","\\\\x'.join([item.hex() for item in items]) + '"}'
    return "{" + ",".join([_element(item) for item in items]) + "}"


def _element(item: str | int | bytes | None) -> str:
    if item is None:
        return "NULL"
    if isinstance(item, bytes):
        return '"\\\\x' + item.hex() + '"'
    if isinstance(item, int):
        return str(item)
    if _PLAIN(item) and item.upper() != "NULL":
        return item
    if "\0" in item:
        raise ValueError("a text for PostgreSQL cannot contain NUL")
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
