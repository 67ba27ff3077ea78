"""Exchanges, queues, bindings and consumers: what a broker knows beside its messages, and where a message goes.

A queue's name is data: publishing to the default exchange needs no row here. A row says what was declared about a queue, which
may expire, carry a time to live, or be *brief*: transient messages go to the log of short-lived ones (``mail``) instead of
becoming jobs. Every function is a verb on the caller's session; the texts are the same on every database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, repeat

from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.tables import FINISHED_COLUMNS
from dbqueue.ids import ZERO, as_bytes
from dbqueue.states import Kind, State

DIRECT, TOPIC, FANOUT = "direct", "topic", "fanout"
FIRST, BATCH = 100, 5_000
"""Rows that one statement of a purge deletes at most. Most queues hold none, and for so few as the first one takes, no planner reads the
whole table."""


@dataclass(frozen=True)
class Exchange:
    name: str
    type: str
    durable: bool = True
    auto_delete: bool = False
    arguments: str = "{}"


@dataclass(frozen=True)
class Queue:
    """What is declared of a queue; durations in milliseconds."""

    name: str
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    expires_ms: int | None = None
    message_ttl_ms: int | None = None
    arguments: str = "{}"

    @property
    def brief(self) -> bool:
        return self.auto_delete or self.exclusive


@dataclass(frozen=True)
class Route:
    """One queue that a message goes to."""

    queue: str
    message_ttl_ms: int | None = None
    brief: bool = False
    durable: bool = True

    def takes_letter(self, *, transient: bool) -> bool:
        """Whether such a message goes to the log. Nothing in a queue that is not durable outlives the broker, with AMQP either."""
        return self.brief and (transient or not self.durable)


# -- exchanges ---------------------------------------------------------------------------------------------------------


def find_exchange(dialect: Dialect, session: Session, name: str) -> Exchange | None:
    rows = session.execute(
        dialect.portable("SELECT type, durable, auto_delete, arguments FROM {exchanges} WHERE name = :name"),
        {"name": name},
    )
    return Exchange(name, str(rows[0][0]), bool(rows[0][1]), bool(rows[0][2]), str(rows[0][3])) if rows else None


def declare_exchange(dialect: Dialect, session: Session, exchange: Exchange) -> None:
    session.execute(
        dialect.portable(
            "INSERT INTO {exchanges} (name, type, durable, auto_delete, arguments) "
            "VALUES (:name, :type, :durable, :auto_delete, :arguments) ON CONFLICT (name) DO NOTHING"
        ),
        {
            "name": exchange.name, "type": exchange.type, "durable": exchange.durable, "auto_delete": exchange.auto_delete,
            "arguments": exchange.arguments,
        },
    )  # fmt: skip


def delete_exchange(dialect: Dialect, session: Session, name: str, *, if_unused: bool = False) -> bool:
    unused = " AND NOT EXISTS (SELECT 1 FROM {bindings} WHERE exchange = :name)" if if_unused else ""
    session.execute(dialect.portable("DELETE FROM {exchanges} WHERE name = :name" + unused), {"name": name})
    if session.changed != 1:
        return False
    session.execute(dialect.portable("DELETE FROM {bindings} WHERE exchange = :name"), {"name": name})
    return True


# -- queues ------------------------------------------------------------------------------------------------------------


def find_queue(dialect: Dialect, session: Session, name: str) -> Route | None:
    rows = session.execute(
        dialect.portable("SELECT message_ttl_ms, brief, durable FROM {queues} WHERE name = :name"), {"name": name}
    )
    return Route(name, rows[0][0], bool(rows[0][1]), bool(rows[0][2])) if rows else None


def declare_queue(dialect: Dialect, session: Session, queue: Queue) -> bool:
    """Returns whether it is new. What exists stays as it was declared first."""
    session.execute(
        dialect.portable(
            "INSERT INTO {queues} (name, durable, auto_delete, exclusive, brief, expires_ms, message_ttl_ms, arguments, used_at) "
            "VALUES (:name, :durable, :auto_delete, :exclusive, :brief, :expires_ms, :message_ttl_ms, :arguments, {now}) "
            "ON CONFLICT (name) DO NOTHING"
        ),
        {
            "name": queue.name, "durable": queue.durable, "auto_delete": queue.auto_delete, "exclusive": queue.exclusive,
            "brief": queue.brief, "expires_ms": queue.expires_ms, "message_ttl_ms": queue.message_ttl_ms,
            "arguments": queue.arguments, "offset": dialect.clock.offset,
        },
    )  # fmt: skip
    return session.changed == 1


def touch_queue(dialect: Dialect, session: Session, name: str) -> None:
    """It was used just now: what expires when it is unused begins anew."""
    session.execute(
        dialect.portable("UPDATE {queues} SET used_at = {now} WHERE name = :name AND expires_ms IS NOT NULL"),
        {"name": name, "offset": dialect.clock.offset},
    )


def delete_queue(dialect: Dialect, session: Session, name: str) -> int:
    """With its bindings and messages; returns how many of those were waiting."""
    for table in ("bindings", "consumers"):
        session.execute(dialect.portable(f"DELETE FROM {{{table}}} WHERE queue = :name"), {"name": name})
    route = find_queue(dialect, session, name)  # not before a write: in a caller's transaction see ``take_lock``
    session.execute(dialect.portable("DELETE FROM {queues} WHERE name = :name"), {"name": name})
    # What goes to the queue of a reply is a letter: such a queue, deleted with each client, is not worth a look at all later jobs.
    return purge(dialect, session, name, later=route is None or not route.takes_letter(transient=False))


def delete_in_steps(dialect: Dialect, run: Run, name: str, route: Route | None) -> int:
    """As ``delete_queue``, with a transaction for each batch of its messages before. ``route``: what was declared about it."""
    holds_jobs = route is None or not route.takes_letter(transient=False)
    gone = purge_in_steps(dialect, run, name) if holds_jobs else 0
    return gone + run(lambda session: delete_queue(dialect, session, name))


# Two statements, so that each finds its own index: the claimable messages by queue; those that wait for their time, of all queues,
# among themselves.
_READY = "queue = :name AND ready_at IS NOT NULL AND head IS NOT NULL ORDER BY priority, ready_at, id"
_LATER = "queue = :name AND state = 0 AND ready_at IS NULL AND head IS NOT NULL ORDER BY run_at, id"


def purge(dialect: Dialect, session: Session, name: str, *, later: bool = True) -> int:
    """Deletes the messages that wait in the queue, never a job of the queue that is no message. ``later``: those of a later time too."""
    return purge_in_steps(dialect, lambda verb: verb(session), name, later=later)


Run = Callable[[Callable[[Session], int]], int]
"""Runs a verb, in a transaction of its own."""


def purge_in_steps(dialect: Dialect, run: Run, name: str, *, later: bool = True) -> int:
    """As ``purge``, one batch for each call of ``run``: a hundred thousand messages are no matter of one transaction."""
    total = 0
    for waiting in (_READY, _LATER) if later else (_READY,):
        for most in chain([FIRST], repeat(BATCH)):
            gone = run(partial(_purge_some, dialect, name, waiting, most))
            total += gone
            if gone < most:
                break
    return total


def _purge_some(dialect: Dialect, name: str, waiting: str, most: int, session: Session) -> int:
    # What is locked is being claimed, or deleted by another purge, which would wait for this one in its turn.
    session.execute(
        dialect.portable(
            "DELETE FROM {jobs} WHERE state = 0 AND id "
            f"{{among}} SELECT id FROM {{jobs}} WHERE {waiting} LIMIT {most} {{skip_locked}} {{end}}"
        ),
        {"name": name},
    )
    return session.changed


_UNEXPIRED = "queue = :name AND (expires_at IS NULL OR expires_at > (SELECT {now}))"


def size(dialect: Dialect, session: Session, name: str) -> int:
    """Messages that wait in the queue, those that are not due yet included. It reads them all."""
    rows = session.execute(
        dialect.portable(
            f"SELECT count(*) FROM (SELECT 1 FROM {{jobs}} WHERE {_UNEXPIRED} AND ready_at IS NOT NULL "
            f"UNION ALL SELECT 1 FROM {{jobs}} WHERE {_UNEXPIRED} AND state = 0 AND ready_at IS NULL) waiting"
        ),
        {"name": name, "offset": dialect.clock.offset},
    )
    return int(rows[0][0])


def ready(dialect: Dialect, session: Session, name: str, most: int) -> int:
    """Messages that can be had from the queue now; not counted further than ``most``."""
    rows = dialect.read_in_order(
        session,
        dialect.portable(
            f"SELECT count(*) FROM (SELECT 1 FROM {{jobs}} WHERE {_UNEXPIRED} AND ready_at IS NOT NULL "
            f"ORDER BY priority, ready_at, id LIMIT {int(most)}) counted"
        ),
        {"name": name, "offset": dialect.clock.offset},
    )
    return int(rows[0][0])


# -- bindings and routes -----------------------------------------------------------------------------------------------


def bind(dialect: Dialect, session: Session, exchange: str, queue: str, routing_key: str) -> None:
    session.execute(
        dialect.portable(
            "INSERT INTO {bindings} (exchange, queue, routing_key) VALUES (:exchange, :queue, :routing_key) "
            "ON CONFLICT (exchange, queue, routing_key) DO NOTHING"
        ),
        {"exchange": exchange, "queue": queue, "routing_key": routing_key},
    )


def unbind(dialect: Dialect, session: Session, exchange: str, queue: str, routing_key: str) -> None:
    session.execute(
        dialect.portable(
            "DELETE FROM {bindings} WHERE exchange = :exchange AND queue = :queue AND routing_key = :routing_key"
        ),
        {"exchange": exchange, "queue": queue, "routing_key": routing_key},
    )


def is_bound(dialect: Dialect, session: Session, exchange: str, queue: str, routing_key: str) -> bool:
    return bool(
        session.execute(
            dialect.portable(
                "SELECT 1 FROM {bindings} WHERE exchange = :exchange AND queue = :queue AND routing_key = :routing_key"
            ),
            {"exchange": exchange, "queue": queue, "routing_key": routing_key},
        )
    )


def bindings_of(dialect: Dialect, session: Session, queue: str) -> list[tuple[str, str, str]]:
    """(exchange, its type, routing key) of each binding of the queue."""
    rows = session.execute(
        dialect.portable(
            "SELECT b.exchange, COALESCE(e.type, 'direct'), b.routing_key FROM {bindings} b "
            "LEFT JOIN {exchanges} e ON e.name = b.exchange WHERE b.queue = :queue"
        ),
        {"queue": queue},
    )
    return [(str(row[0]), str(row[1]), str(row[2])) for row in rows]


def all_bindings(dialect: Dialect, session: Session) -> list[tuple[str, str, str]]:
    """(queue, exchange, routing key)."""
    rows = session.execute(dialect.portable("SELECT queue, exchange, routing_key FROM {bindings}"))
    return [(str(row[0]), str(row[1]), str(row[2])) for row in rows]


def routes(dialect: Dialect, session: Session, exchange: str, routing_key: str) -> list[Route]:
    """The queues that a message to ``exchange`` goes to, each once. An exchange that was never declared routes nowhere."""
    rows = session.execute(
        dialect.portable(
            "SELECT e.type, b.routing_key, b.queue, q.message_ttl_ms, COALESCE(q.brief, :no), COALESCE(q.durable, :yes) FROM {exchanges} e "
            "JOIN {bindings} b ON b.exchange = e.name LEFT JOIN {queues} q ON q.name = b.queue "
            "WHERE e.name = :exchange AND (e.type <> 'direct' OR b.routing_key = :routing_key)"
        ),
        {"exchange": exchange, "routing_key": routing_key, "no": False, "yes": True},
    )
    found = {
        row[2]: Route(row[2], row[3], bool(row[4]), bool(row[5]))
        for row in rows
        if matches(row[0], row[1], routing_key)
    }
    return list(found.values())


def matches(exchange: str, pattern: str, routing_key: str) -> bool:
    """Whether a binding with ``pattern`` to an exchange of this type takes a message with ``routing_key``."""
    if exchange == FANOUT:
        return True
    if exchange == TOPIC:
        return _topic(pattern, routing_key)
    return pattern == routing_key


@lru_cache(maxsize=4_096)
def _topic(pattern: str, routing_key: str) -> bool:
    """AMQP's patterns: ``*`` is one word, ``#`` any number of words, none included."""
    return _words(tuple(pattern.split(".")), tuple(routing_key.split(".")))


def _words(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    if not pattern:
        return not words
    if pattern[0] == "#":
        return _words(pattern[1:], words) or (bool(words) and _words(pattern, words[1:]))
    return bool(words) and pattern[0] in ("*", words[0]) and _words(pattern[1:], words[1:])


def take_lock(dialect: Dialect, session: Session) -> None:
    """A write that changes nothing, before the first read in a caller's transaction: on SQLite a read would take a snapshot that a
    later write may find too old."""
    if not dialect.probes:
        return
    session.execute(
        dialect.portable("UPDATE {jobs} SET updated_at = updated_at WHERE id = :id"), {"id": dialect.bind_id(ZERO)}
    )


# -- consumers ---------------------------------------------------------------------------------------------------------


def add_consumer(dialect: Dialect, session: Session, tag: str, queue: str, worker: str, alive_us: int) -> None:
    params = {
        "tag": tag,
        "queue": queue,
        "worker": worker,
        "alive": alive_us,
        "offset": dialect.clock.offset,
        "yes": True,
    }
    session.execute(
        dialect.portable(
            "INSERT INTO {consumers} (tag, queue, worker, alive_until) VALUES (:tag, :queue, :worker, {now} + :alive) "
            "ON CONFLICT (tag) DO UPDATE SET alive_until = excluded.alive_until"
        ),
        {name: params[name] for name in ("tag", "queue", "worker", "alive", "offset")},
    )
    session.execute(
        dialect.portable("UPDATE {queues} SET consumed = :yes WHERE name = :queue AND NOT consumed"),
        {"yes": True, "queue": queue},
    )


def keep_consumers(dialect: Dialect, session: Session, worker: str, alive_us: int) -> None:
    session.execute(
        dialect.portable("UPDATE {consumers} SET alive_until = {now} + :alive WHERE worker = :worker"),
        {"worker": worker, "alive": alive_us, "offset": dialect.clock.offset},
    )


def remove_consumer(dialect: Dialect, session: Session, tag: str, queue: str) -> bool:
    """Returns whether its queue is to go with it: auto_delete, and nobody else consumes."""
    session.execute(dialect.portable("DELETE FROM {consumers} WHERE tag = :tag"), {"tag": tag})
    touch_queue(dialect, session, queue)
    rows = session.execute(
        dialect.portable(
            "SELECT 1 FROM {queues} q WHERE q.name = :queue AND q.auto_delete AND NOT EXISTS "
            "(SELECT 1 FROM {consumers} c WHERE c.queue = q.name AND c.alive_until > {now})"
        ),
        {"queue": queue, "offset": dialect.clock.offset},
    )
    return bool(rows)


def consumer_count(dialect: Dialect, session: Session, queue: str) -> int:
    rows = session.execute(
        dialect.portable("SELECT count(*) FROM {consumers} WHERE queue = :queue AND alive_until > {now}"),
        {"queue": queue, "offset": dialect.clock.offset},
    )
    return int(rows[0][0])


def abandoned_queues(dialect: Dialect, session: Session, grace_us: int) -> list[str]:
    """Queues that nobody consumes and that expired, or that outlived their last consumer or owner by ``grace_us``."""
    rows = session.execute(
        dialect.portable(
            "SELECT q.name FROM {queues} q LEFT JOIN (SELECT queue, max(alive_until) AS until FROM {consumers} GROUP BY queue) c "
            "ON c.queue = q.name WHERE (q.expires_ms IS NOT NULL OR q.exclusive OR (q.auto_delete AND q.consumed)) "
            "AND CASE WHEN COALESCE(c.until, 0) > q.used_at THEN c.until ELSE q.used_at END "
            "+ COALESCE(q.expires_ms * 1000, :grace) <= {now}"
        ),
        {"grace": grace_us, "offset": dialect.clock.offset},
    )
    return [str(row[0]) for row in rows]


def forget_dead_consumers(dialect: Dialect, session: Session, grace_us: int) -> None:
    session.execute(
        dialect.portable("DELETE FROM {consumers} WHERE alive_until + :grace <= {now}"),
        {"grace": grace_us, "offset": dialect.clock.offset},
    )


@dataclass(frozen=True)
class Expired:
    """A message that waited past its time to live."""

    id: bytes
    head: bytes
    at: int
    since: int
    """Microseconds by now."""


def expired_messages(dialect: Dialect, session: Session, after: int, limit: int) -> list[Expired]:
    """The first of those that expired at ``after`` or later."""
    rows = session.execute(
        dialect.portable(
            "SELECT id, head, expires_at, (SELECT {now}) - expires_at FROM {jobs} "
            "WHERE state = 0 AND expires_at >= :after AND expires_at <= (SELECT {now}) "
            f"ORDER BY expires_at LIMIT {int(limit)}"
        ),
        {"after": after, "offset": dialect.clock.offset},
    )
    return [Expired(bytes(row[0]), bytes(row[1] or b""), int(row[2]), int(row[3])) for row in rows]


# -- revoked tasks -----------------------------------------------------------------------------------------------------
#
# What was revoked is remembered for a while, whatever becomes of the messages: a task id as it is, a stamp as a JSON array of its
# header and its value. Both stand in the column ``task_id``.


@dataclass(frozen=True)
class Waiting:
    """A message that waited in a queue when it was revoked."""

    task_id: str
    target: str
    queue: str
    head: bytes
    payload: bytes


def revoke(dialect: Dialect, session: Session, keys: Iterable[str], life_us: int) -> None:
    """Remembers for ``life_us`` microseconds that what these task ids or stamps belong to is not to run."""
    for key in sorted(set(keys)):  # in one order: two callers must not wait for each other
        session.execute(
            dialect.portable(
                "INSERT INTO {revoked} (task_id, until) VALUES (:task_id, {now} + :life) "
                "ON CONFLICT (task_id) DO UPDATE SET until = excluded.until"
            ),
            {"task_id": key, "life": life_us, "offset": dialect.clock.offset},
        )


def revoked_stamps(dialect: Dialect, session: Session) -> list[str]:
    rows = session.execute(
        dialect.portable("SELECT task_id FROM {revoked} WHERE until > {now} AND substr(task_id, 1, 1) = '['"),
        {"offset": dialect.clock.offset},
    )
    return [str(row[0]) for row in rows]


def some_revoked(dialect: Dialect, limit: int) -> tuple[str, dict[str, object]]:
    """A statement, to be sent together with others: up to ``limit`` of the revoked tasks. What a claim before it could see, and was
    revoked before it was written, is among them if they are not so many."""
    text = dialect.portable(f"SELECT task_id FROM {{revoked}} WHERE until > {{now}} LIMIT {limit}")
    return text, {"offset": dialect.clock.offset}


def revoked_among(dialect: Dialect, session: Session, task_ids: Sequence[str]) -> set[str]:
    """Which of these tasks were revoked. One small statement for what a claim brings."""
    found: set[str] = set()
    for first in range(0, len(task_ids), _MOST_ASKED):
        asked = task_ids[first : first + _MOST_ASKED]
        size = 1 << (len(asked) - 1).bit_length()  # few texts, which stay prepared
        names = {f"t{n}": asked[min(n, len(asked) - 1)] for n in range(size)}
        rows = session.execute(
            dialect.portable(
                f"SELECT task_id FROM {{revoked}} WHERE task_id IN ({', '.join(':' + name for name in names)}) AND until > {{now}}"
            ),
            names | {"offset": dialect.clock.offset},
        )
        found.update(str(row[0]) for row in rows)
    return found


def forget_revoked(dialect: Dialect, session: Session) -> None:
    session.execute(dialect.portable("DELETE FROM {revoked} WHERE until <= {now}"), {"offset": dialect.clock.offset})


def waiting_messages(dialect: Dialect, session: Session, task_id: str) -> list[bytes]:
    """Ids of the messages of this task that nobody has claimed."""
    rows = session.execute(
        dialect.portable("SELECT id FROM {jobs} WHERE task_id = :task_id AND state = 0 AND head IS NOT NULL"),
        {"task_id": task_id},
    )
    return [as_bytes(row[0]) for row in rows]


def waiting_heads(
    dialect: Dialect, session: Session, part: bytes, after: bytes, limit: int
) -> list[tuple[bytes, bytes]]:
    """(id, head) of messages that nobody has claimed and whose head holds ``part``, in the order of their ids, from behind ``after``."""
    # COALESCE: the index of task ids would be read whole, and sorted, for each page.
    rows = dialect.read_in_order(
        session,
        dialect.portable(
            "SELECT id, head FROM {jobs} WHERE id > :after AND state = 0 AND COALESCE(task_id, '') <> '' AND {instr}(head, :part) > 0 "
            f"ORDER BY id LIMIT {int(limit)}"
        ),
        {"after": dialect.bind_id(after), "part": part},
    )
    return [(as_bytes(row[0]), bytes(row[1])) for row in rows]


def cancel_revoked(dialect: Dialect, session: Session, job_id: bytes) -> Waiting | None:
    """Ends a waiting message as cancelled; None: it has been claimed, or has ended. A write comes first: the row is locked, and what
    is read afterwards holds."""
    same, now = {"id": dialect.bind_id(job_id)}, {"offset": dialect.clock.offset}
    session.execute(
        dialect.portable("UPDATE {jobs} SET updated_at = {now} WHERE id = :id AND state = 0 AND head IS NOT NULL"),
        same | now,
    )
    if session.changed != 1:
        return None
    session.execute(dialect.portable(_CANCEL_REVOKED), same | now)
    row = session.execute(
        dialect.portable("SELECT task_id, target, queue, head, payload FROM {jobs} WHERE id = :id"), same
    )[0]
    session.execute(dialect.portable("DELETE FROM {jobs} WHERE id = :id"), same)
    return Waiting(str(row[0]), str(row[1]), str(row[2]), bytes(row[3]), bytes(row[4]))


_MOST_ASKED = 64
_AS_IT_WAS = ", ".join(
    name for name in FINISHED_COLUMNS if name not in ("state", "finished_at", "token", "error_kind", "error_summary")
)
_CANCEL_REVOKED = (
    f"INSERT INTO {{finished}} ({_AS_IT_WAS}, error_kind, state, finished_at) "
    f"SELECT {_AS_IT_WAS}, '{Kind.REVOKED}', {int(State.CANCELLED)}, {{now}} FROM {{jobs}} WHERE id = :id"
)
