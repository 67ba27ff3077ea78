"""The rights that docs/operations.md gives to each role: enough for its work, refused beyond it, and not one too
many."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import celery
import kombu
import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, Lock, ids, owners, results, routing, schedules
from dbqueue.clock import SECOND
from dbqueue.database.engine import Database
from dbqueue.database.tables import Letter, Names
from dbqueue.doctor.privileges import ROLES, Right, grants, place
from dbqueue.errors import ConnectionLost, DatabaseError, EnqueueFailed
from dbqueue.runtime.beat import Beat
from dbqueue.runtime.deliver import Delivery
from dbqueue.runtime.worker import WorkerOptions, run_worker
from dbqueue.states import Kind, State
from tests.doors.conftest import ROOT
from tests.factory import Job, claim_turn, make, new_job, now
from tests.servers import Server
from tests.sql.broker import VERBS, Overheard
from tests.transport.shops import Shop
from tests.waiting import wait_for

POSTGRES = pytest.mark.databases("postgres")
NAMES = Names("dbqueue_", "public")
DOCUMENT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def documented(role: str) -> list[str]:
    """The statements of the document for one role."""
    block = re.search(rf"```sql\n(CREATE ROLE dbqueue_{role} .*?)```", DOCUMENT, re.DOTALL)
    assert block is not None
    return [" ".join(statement.split()) + ";" for statement in block[1].split(";") if statement.strip()]


class Admin:
    """The owner of the tables, and the users that log in."""

    def __init__(self, url: str) -> None:
        self.url, self.queue = url, DBQueue(url)
        self.queue.migrate()
        self.database = self.queue.database
        self._connection = psycopg.connect(url, autocommit=True)
        self._roles: list[str] = []

    def execute(self, statement: str) -> None:
        self._connection.execute(statement)

    def user(self, *roles: str) -> str:
        """Makes the documented roles and a user who is in all of them, and returns its URL."""
        for role in roles:
            for statement in documented(role):
                self.execute(statement)
            self._roles.append(f"dbqueue_{role}")
        user = f"user_{os.getpid()}_{len(self._roles)}"
        given = ", ".join(f"dbqueue_{role}" for role in roles)
        self.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x' IN ROLE {given}")
        self._roles.append(user)
        parts = urlsplit(self.url)
        return parts._replace(netloc=f"{user}:x@{parts.hostname}:{parts.port}").geturl()

    def close(self) -> None:
        for role in self._roles:
            self.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        self._connection.close()
        self.queue.close()


@pytest.fixture
def admin(postgres: Server, database_url: str) -> Iterator[Admin]:
    admin = Admin(database_url)
    yield admin
    admin.close()


@contextmanager
def refused() -> Iterator[None]:
    """By the server, and for want of a right."""
    with pytest.raises((DatabaseError, EnqueueFailed)) as caught:
        yield
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, psycopg.Error):
        error = error.__cause__
    assert isinstance(error, psycopg.errors.InsufficientPrivilege), caught.value


# -- what each role does -----------------------------------------------------------------------------------------------
# Each step is a call by itself, so that one that is refused does not hide the others.

Step = Callable[[], object]


def publishing(queue: DBQueue) -> list[Step]:
    url = queue.database.url.render_as_string(hide_password=False)

    def joined() -> None:
        with psycopg.connect(url) as connection, dbqueue.using(connection):
            connection.execute("SELECT 1")
            queue.send("mail", {}, key="joined")
            queue.send("mail", {})

    def many() -> None:
        queue.write([new_job(queue="mail", key=key) for key in ("a", "b", None)])

    def lost() -> None:  # as after a connection that broke before its answer
        queue.database.read(lambda session: queue.database.dialect.exists(session, ids.new_id()))

    single = (lambda: queue.send("mail", {}, key="k"), lambda: queue.send("mail", {}, key="k", delay=60))
    return [*single, many, joined, lost]


def working(queue: DBQueue) -> list[Step]:
    database = queue.database
    dialect = database.dialect

    def claim_and_settle() -> None:
        with database.session() as session:
            claimed = dialect.turn(session, claim_turn(4, queues=("mail",))).claimed
            jobs = [Job(row.id, row.token, {"queue": "mail"}) for row in claimed] or [
                Job(ids.new_id(), ids.new_token(), {"queue": "x"})
            ]
            dialect.renew(session, [jobs[0].held], SECOND)
            turn = claim_turn(queues=("mail",))
            turn.settlements = [jobs[0].settlement(State.SUCCEEDED)]
            dialect.turn(session, turn)
            for job, state in zip(jobs[1:], (State.PENDING, State.DEAD, State.BLOCKED), strict=False):
                dialect.settle(session, [job.settlement(state, Kind.FAILED)])

    def nobodys() -> Job:
        return Job(ids.new_id(), ids.new_token(), {"queue": "x"})

    def with_session(verb: Callable[[Any], object]) -> Step:
        return lambda: database.run(verb)

    return [
        database.ready,
        claim_and_settle,
        with_session(lambda session: dialect.settle(session, [nobodys().settlement(State.DEAD)])),
        with_session(lambda session: dialect.renew(session, [nobodys().held], SECOND)),
        with_session(lambda session: dialect.release_unknown(session, "me", [])),
        with_session(lambda session: dialect.prune(session, [State.SUCCEEDED], 1, 10)),
        lambda: _upkeep(database),
    ]  # fmt: skip


def _upkeep(database: Database) -> None:
    with database.session() as session:
        database.dialect.upkeep(session, 100, ("mail",))


def publishing_messages(queue: DBQueue) -> list[Step]:
    """As Celery's `delay` does: with a declaration, here of a queue that nobody declared before."""
    url = queue.database.url.render_as_string(hide_password=False)

    def publish(joined: bool = False) -> None:
        name = kombu.uuid()
        target = kombu.Queue(name, kombu.Exchange(name), name)
        with kombu.Connection(f"dbqueue+{url}") as connection:
            for _ in range(2):
                kombu.Producer(connection).publish({}, exchange=name, routing_key=name, declare=[target], expiration=60)
                connection.declared_entities.clear()
            if joined:
                with psycopg.connect(url) as own, dbqueue.using(own):
                    kombu.Producer(connection).publish({}, exchange=name, routing_key=name, declare=[target])

    *_, lost = publishing(queue)
    return [publish, lambda: publish(joined=True), lost]


def consuming(queue: DBQueue) -> list[Step]:
    """Every verb of the broker's, which a worker's threads would only complain about, and a job's as a worker has them."""
    database = queue.database
    verbs = [
        *(verb for name, verb in VERBS.items() if name != "delete_exchange"),
        lambda d, s: routing.revoke(d, s, ["task"], SECOND),
        routing.forget_revoked,
        lambda d, s: Overheard(d, s).post(Letter("events", "task", b"{}", b"", -SECOND, ())),
        VERBS["mail_prune"],  # once more, with a letter that expired
    ]
    return [lambda verb=verb: database.run(lambda s: verb(database.dialect, s)) for verb in verbs]  # type: ignore[misc]


def storing(queue: DBQueue) -> list[Step]:
    """What a worker's children do with results."""
    return of_results(queue, [
        lambda d, s: results.store(d, s, "t", "SUCCESS", b"{}", SECOND),
        lambda d, s: results.load(d, s, ["t"]),
        lambda d, s: results.forget(d, s, "t"),
        lambda d, s: results.save_group(d, s, "g", b"{}", SECOND),
        lambda d, s: results.load_group(d, s, "g"),
        lambda d, s: results.delete_group(d, s, "g"),
        lambda d, s: results.set_chord_size(d, s, "g", 2, SECOND),
        lambda d, s: results.add_to_chord(d, s, "g", "t", SECOND),
        lambda d, s: results.count_part(d, s, "g", "t", 0, b"{}", SECOND),
        lambda d, s: results.chord_parts(d, s, "g"),
        lambda d, s: results.end_chord(d, s, "g"),
        lambda d, s: results.set_chord_size(d, s, "expired", 2, -SECOND),
        lambda d, s: results.prune(d, s, 10),
    ])  # fmt: skip


def waiting(queue: DBQueue) -> list[Step]:
    """What a client does that sends groups and chords and waits for them."""
    return of_results(queue, [
        lambda d, s: results.load(d, s, ["t"]),
        lambda d, s: results.save_group(d, s, "g", b"{}", SECOND),
        lambda d, s: results.load_group(d, s, "g"),
        lambda d, s: results.set_chord_size(d, s, "g", 2, SECOND),
    ])  # fmt: skip


def of_results(queue: DBQueue, verbs: list[Callable[[Any, Any], object]]) -> list[Step]:
    database = queue.database
    return [database.ready, *(lambda verb=verb: database.run(lambda s: verb(database.dialect, s)) for verb in verbs)]  # type: ignore[misc]


def deciding(queue: DBQueue, admin: Admin) -> list[Step]:
    def each(state: State, verb: Callable[[Any, Any], object]) -> Step:
        def step() -> None:
            job_id = ids.as_uuid(make(admin.database, state).id)
            record = queue.get_job(job_id, with_payload=True)
            assert record is not None
            verb(job_id, record)

        return step

    return [
        each(State.RUNNING, lambda job_id, _: queue.cancel(job_id)),
        each(State.BLOCKED, lambda job_id, _: queue.retry(job_id)),
        each(State.DEAD, lambda job_id, _: queue.retry(job_id)),
        each(State.UNKNOWN, lambda job_id, record: queue.resolve(job_id, "discarded", record.updated_at)),
        lambda: queue.purge(["dead"]),
        lambda: queue.database.run(lambda s: routing.delete_exchange(queue.database.dialect, s, "none")),
        queue.jobs,
        queue.queues,
    ]


def locking(queue: DBQueue) -> list[Step]:
    """Each with a name of its own: where a right was taken away, the lock of an earlier step may be held still."""

    def both(verb: Callable[[Lock], object], ttl: float = 30) -> Step:
        def step() -> None:
            lock = queue.lock(f"report {ids.new_token().hex()}", ttl)
            assert lock.acquire()
            verb(lock)
            lock.release()

        return step

    return [
        both(lambda lock: lock.renew()),
        both(lambda lock: lock.acquire()),
        both(lambda lock: queue.database.clock.advance(1), ttl=0.5),  # the row of a lock that ended goes all the same
    ]


def beating(queue: DBQueue) -> list[Step]:
    """What a beat sends; its own loop would take a refusal for trouble of the connection."""
    database = queue.database
    dialect = database.dialect
    if not queue._declared:
        queue.periodic("declared", "0 0 1 1 *", "mail", 1)

    def plan(session: Any) -> None:
        moves = [schedules.plan(entry, 0) for entry in schedules.unplanned(dialect, session, "", 10)]
        dialect.move_cursors(session, moves)

    return [
        queue.start_schedules,
        lambda: database.read(lambda session: schedules.look(dialect, session, [""])),
        lambda: database.read(lambda session: schedules.ahead(dialect, session, [""], 0)),
        lambda: database.run(plan),
        lambda: database.run(lambda session: schedules.due(dialect, session, "", 2**62, 10)),
        lambda: database.run(lambda session: dialect.insert_due(session, [new_job(key="k"), new_job(key="k")])),
    ]  # fmt: skip


def owning(queue: DBQueue) -> list[Step]:
    """What a beat does beside that for the entries of a Celery app."""
    database = queue.database
    dialect = database.dialect
    entries = [schedules.Definition(owner="shop", name=name, spec="* * * * *") for name in ("some", "other")]
    return [
        lambda: database.run(lambda session: owners.take(dialect, session, "shop", "beat", entries)),
        lambda: database.run(lambda session: owners.take(dialect, session, "shop", "beat", entries[:1])),
        lambda: database.run(lambda session: owners.owner_of(dialect, session, "shop")),
    ]


def scheduling(queue: DBQueue) -> list[Step]:
    return [
        lambda: queue.schedule("some", "* * * * *", "mail", 1),
        lambda: queue.schedule("some", "0 * * * *", "mail", 1),
        lambda: queue.pause_schedule("some"),
        lambda: queue.resume_schedule("some"),
        lambda: queue.reset_schedule("some"),
        lambda: queue.unschedule("none"),
        lambda: queue.get_schedule("some"),
        queue.schedules,
    ]


def reading(queue: DBQueue) -> list[Step]:
    url = queue.database.url.render_as_string(hide_password=False)

    def view() -> None:
        with closing(psycopg.connect(url)) as connection:
            try:
                connection.execute("SELECT * FROM dbqueue_all_jobs").fetchall()
            except psycopg.errors.InsufficientPrivilege as error:
                raise DatabaseError from error

    def result() -> None:
        queue.database.read(lambda s: results.describe(queue.database.dialect, s, "t"))

    return [
        result,
        queue.jobs,
        queue.queues,
        queue.counts,
        queue.schedules,
        lambda: queue.get_job(ids.as_uuid(ids.new_id())),
        view,
    ]


def steps_of(role: str, queue: DBQueue, admin: Admin) -> list[Step]:
    if role == "operator":
        return [*deciding(queue, admin), *scheduling(queue), *consuming(queue), *locking(queue), *storing(queue)]
    if role == "celery_worker":
        return [*working(queue), *publishing_messages(queue), *consuming(queue)]
    if role == "celery_beat":
        return [*publishing_messages(queue), *beating(queue), *owning(queue)]
    of_others = {
        "publisher": publishing, "worker": working, "reader": reading, "celery_publisher": publishing_messages, "locker": locking,
        "beat": beating, "scheduler": scheduling, "results_worker": storing, "results_client": waiting,
    }  # fmt: skip
    return of_others[role](queue)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_document_has_the_rights_that_the_doctor_asks_for(role: str) -> None:
    create, usage, *given = documented(role)
    assert create == f"CREATE ROLE dbqueue_{role} NOLOGIN;"
    assert usage == f"GRANT USAGE ON SCHEMA public TO dbqueue_{role};"
    assert given == list(grants(ROLES[role], NAMES, f"dbqueue_{role}"))


@POSTGRES
@pytest.mark.req("D5", "D10")
def test_a_publisher(admin: Admin) -> None:
    url = admin.user("publisher")
    with closing(DBQueue(url)) as queue:
        for step in publishing(queue):
            step()
        assert admin.queue.counts() == {"pending": 6}
        job_id = admin.queue.jobs()[0].id
        for call in (
            lambda: queue.claim("mail", "me"),
            lambda: queue.cancel(job_id),
            lambda: queue.purge(["dead"]),
            lambda: queue.get_job(job_id, with_payload=True),
            queue.jobs,
        ):
            with refused():
                call()
        with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT payload FROM dbqueue_jobs")
    assert admin.queue.counts() == {"pending": 6}


@POSTGRES
@pytest.mark.req("D5")
def test_a_publisher_whose_connection_is_anothers(admin: Admin) -> None:
    """Inside `using` it is the connection's user who writes."""
    url = admin.user("publisher")
    with psycopg.connect(url) as connection:
        with dbqueue.using(connection):
            admin.queue.send("mail", {})
        connection.commit()
        admin.execute("REVOKE INSERT ON dbqueue_jobs FROM dbqueue_publisher")
        with dbqueue.using(connection), refused():
            admin.queue.send("mail", {})
        connection.rollback()
    assert admin.queue.counts() == {"pending": 1}


@POSTGRES
@pytest.mark.req("D9", "D12")
def test_a_worker(admin: Admin) -> None:
    """A real one, which runs, retries, buries, blocks and takes back; handlers that enqueue need a publisher's rights,
    too."""
    url = admin.user("worker")
    for target in ("well", "gone", "bad"):
        make(admin.database, target=target, queue="mail", max_attempts=2)
    make(admin.database, State.RUNNING, target="well", queue="mail", lease_until=now(admin.database) - SECOND)
    make(admin.database, target="well", queue="mail", ready_at=None)
    with closing(DBQueue(url, retry_base=0.001, retry_max=0.001)) as queue:

        @queue.job(max_attempts=2, timeout=5, queue="mail", name="well")
        def well() -> None: ...

        @queue.job(max_attempts=2, timeout=5, queue="mail", name="bad")
        def bad() -> None:
            raise ValueError

        admin.execute("UPDATE dbqueue_jobs SET fingerprint = NULL")
        assert run_worker(queue, WorkerOptions(once=True)) == 0
        with refused():
            queue.send("mail", {})
        for step in working(queue):
            step()
    states = admin.queue.counts()
    assert sum(states.values()) == 5
    assert states.get("blocked", 0) >= 1
    assert "running" not in states


@POSTGRES
def test_a_worker_that_publishes(admin: Admin) -> None:
    with closing(DBQueue(admin.user("worker", "publisher"))) as queue:
        for step in (*publishing(queue), *working(queue)):
            step()


@POSTGRES
@pytest.mark.req("A7")
def test_a_locker(admin: Admin) -> None:
    with closing(DBQueue(admin.user("locker"))) as queue:
        for step in locking(queue):
            step()
        for call in (lambda: queue.send("mail", {}), lambda: queue.claim("mail", "me"), queue.jobs):
            with refused():
                call()


@POSTGRES
@pytest.mark.req("A6")
def test_an_outbox_needs_a_publisher_and_a_worker(admin: Admin) -> None:
    with closing(DBQueue(admin.user("publisher"))) as queue:
        outbox = queue.outbox("receipts")
        outbox.enqueue(1, key="k")
        assert outbox.enqueue(1, key="k").duplicate
        with refused():
            outbox.run_once("me", print)


@POSTGRES
@pytest.mark.req("A6")
def test_a_worker_delivers_an_outbox(admin: Admin) -> None:
    for _ in range(2):
        admin.queue.outbox("receipts").enqueue(1)
    got: list[Any] = []
    with closing(DBQueue(admin.user("worker"))) as queue:
        assert queue.outbox("receipts").run_once("me", lambda message: got.append(message.payload))
        deliveries = (Delivery("receipts", lambda message: got.append(message.payload), __name__, "none"),)
        assert run_worker(queue, WorkerOptions(once=True, outboxes=deliveries)) == 0
    assert got == [1, 1]


@POSTGRES
@pytest.mark.req("H7")
def test_an_operator(admin: Admin) -> None:
    with closing(DBQueue(admin.user("operator"))) as queue:
        for step in (
            *steps_of("operator", queue, admin),
            *publishing(queue),
            *working(queue),
            *beating(queue),
            *publishing_messages(queue),
        ):
            step()
        assert queue.migrate() == [], "there is nothing to do"
        with refused():
            queue.database.run(lambda session: session.execute("ALTER TABLE dbqueue_jobs ADD COLUMN mine text"))


@POSTGRES
@pytest.mark.req("C1", "D10")
def test_a_publisher_of_celery(admin: Admin) -> None:
    """It sends tasks, and neither takes nor reads any; nor does it speak to workers."""
    url = admin.user("celery_publisher")
    app = celery.Celery("shop", broker=f"dbqueue+{url}", set_as_current=False)
    app.conf.task_default_queue = "shop"
    task_id = app.send_task("shop.add", (1, 2), countdown=1, expires=60).id
    assert [record.task_id for record in admin.queue.jobs(queue="shop")] == [task_id]
    with kombu.Connection(f"dbqueue+{url}") as connection:
        channel = connection.default_channel
        for call in (
            lambda: channel.basic_get("shop"),
            lambda: channel.queue_purge("shop"),
            lambda: channel.queue_delete("shop"),
            lambda: channel.queue_unbind("shop", "shop", "shop"),
            lambda: app.control.ping(timeout=0.1),
            lambda: app.control.revoke(task_id),
            lambda: channel.basic_consume("shop", False, print, "tag"),
        ):
            with refused():
                call()
        with psycopg.connect(url) as own, pytest.raises(psycopg.errors.InsufficientPrivilege):
            own.execute("SELECT head FROM dbqueue_jobs")
    app.close()
    assert admin.queue.counts() == {"pending": 1}


@POSTGRES
@pytest.mark.req("C1", "C3")
def test_a_worker_of_celery(admin: Admin, tmp_path: Path) -> None:
    """A real one with all it has: retries, remote control, events, revoked tasks, an early end. It complains about nothing."""
    url = f"dbqueue+{admin.user('celery_worker')}"
    shop = Shop(tmp_path, url, {"lease": 5})
    app = celery.Celery("shop", broker=url, backend="rpc://", set_as_current=False)
    app.conf.update(task_default_queue="shop", task_send_sent_event=True)
    try:
        worker = shop.worker("-E", size=1)
        assert len(app.control.ping(timeout=3, limit=1)) == 1
        app.control.revoke("nobody's")
        app.send_task("shop.flaky", ("x",))
        shop.wait_for_note("try x 1", 30)
        app.send_task("shop.slow", ("a", 0.5))
        shop.wait_for_note("start a", 30)
        app.control.shutdown()
        assert worker.wait(30) == 0
        wait_for(lambda: admin.queue.counts("shop") == {"acked": 3}, 10)
        assert not [line for line in shop.logs[0].read_text().splitlines() if "ERROR" in line]
    finally:
        shop.close()
        app.close()


@POSTGRES
@pytest.mark.req("C9", "D10")
def test_a_worker_that_stores_and_a_client_that_waits(admin: Admin, tmp_path: Path) -> None:
    """Real ones. The client can take back nothing, and a reader sees that there is a result, but not which."""
    worker_url = f"dbqueue+{admin.user('celery_worker', 'results_worker')}"
    client_url = f"dbqueue+{admin.user('celery_publisher', 'results_client')}"
    shop = Shop(tmp_path, worker_url, {}, backend=worker_url)
    app = celery.Celery("shop", broker=client_url, backend=client_url, set_as_current=False)
    app.conf.update(task_default_queue="shop")
    try:
        shop.worker(size=1)
        result = app.send_task("shop.add", (1, 2))
        assert result.get(timeout=60) == 3
        header = [app.signature("shop.add", (n, n)) for n in range(3)]
        assert celery.chord(header, app.signature("shop.total"), app=app).apply_async().get(timeout=60) == 6
        app.GroupResult("g", [result]).save()
        assert app.GroupResult.restore("g").get(timeout=60) == [3]
        for call in (result.forget, lambda: app.backend.mark_as_failure(result.id, ValueError())):
            with refused():
                call()
        assert result.get(timeout=60) == 3
        with psycopg.connect(admin.user("reader")) as own, pytest.raises(psycopg.errors.InsufficientPrivilege):
            own.execute("SELECT meta FROM dbqueue_results")
        assert not [line for line in shop.logs[0].read_text().splitlines() if "ERROR" in line]
    finally:
        shop.close()
        app.backend.place.database.close()
        app.close()


@POSTGRES
@pytest.mark.req("D10")
def test_a_reader(admin: Admin) -> None:
    job_id = ids.as_uuid(make(admin.database).id)
    with closing(DBQueue(admin.user("reader"))) as queue:
        for step in reading(queue):
            step()
        assert [record.id for record in queue.jobs()] == [job_id]
        for call in (
            lambda: queue.get_job(job_id, with_payload=True),
            lambda: queue.cancel(job_id),
            lambda: queue.send("mail", {}),
            lambda: queue.claim("default", "me"),
            lambda: queue.purge(["dead"]),
        ):
            with refused():
                call()
    assert admin.queue.counts() == {"pending": 1}


@POSTGRES
@pytest.mark.req("D10", "A1")
def test_who_writes_schedules_and_who_fires_them(admin: Admin) -> None:
    url = admin.user("scheduler")
    with closing(DBQueue(url)) as queue:
        for step in scheduling(queue):
            step()
        queue.schedule("often", "@every 1s", "mail", {"number": 7})
        with refused():
            queue.run_schedule("often")  # it is an enqueue: for publishers
        with refused():
            queue.send("mail", 1)
        with refused():
            queue.claim("mail", "me")
    user = urlsplit(url).username
    admin.execute(f"REVOKE dbqueue_scheduler FROM {user}")
    for statement in documented("beat"):
        admin.execute(statement)
    admin._roles.insert(0, "dbqueue_beat")
    admin.execute(f"GRANT dbqueue_beat TO {user}")
    with closing(DBQueue(url)) as queue:
        queue.periodic("declared", "@every 1s", "mail", 1)
        queue.start_schedules()
        beat = Beat(queue.database, name="beat", poll=0.05)
        beat.start()
        try:
            wait_for(lambda: beat.step() >= 0 and beat.fired >= 3)
            beat._connection.lost(ConnectionLost("cut"))  # it claimed nothing that it would have to hand back
            before = beat.fired
            wait_for(lambda: beat.step() >= 0 and beat.fired >= before + 2)
        finally:
            beat.close()
        for call in (
            lambda: queue.unschedule("often"),
            lambda: queue.claim("mail", "me"),
            lambda: queue.jobs(),
            lambda: queue.purge(["dead"]),
        ):
            with refused():
                call()
    assert admin.queue.counts("mail")["pending"] >= 5


def single(rights: tuple[Right, ...]) -> Iterator[tuple[str, str]]:
    """Each right by itself, and each column of one: (what to revoke, on which table)."""
    for right in rights:
        for column in right.columns:
            yield f"{right.verb} ({column})", right.table
        if not right.columns:
            yield right.verb, right.table


@POSTGRES
@pytest.mark.parametrize("role", ROLES)
def test_no_right_is_one_too_many(admin: Admin, role: str) -> None:
    url = admin.user(role)
    for verb, table in single(ROLES[role]):
        admin.execute(f"REVOKE {verb} ON {place(table, [verb], NAMES)} FROM dbqueue_{role}")
        with closing(DBQueue(url)) as queue:
            assert any(fails(step) for step in steps_of(role, queue, admin)), f"{verb} on {table} is not needed"
        admin.execute(f"GRANT {verb} ON {place(table, [verb], NAMES)} TO dbqueue_{role}")
    with closing(DBQueue(url)) as queue:
        assert not any(fails(step) for step in steps_of(role, queue, admin))


def fails(step: Step) -> bool:
    try:
        step()
    except (DatabaseError, EnqueueFailed) as error:
        told = f"{error} {error.__cause__!r} {error.__context__!r}"
    else:
        return False
    assert "InsufficientPrivilege" in told, told
    return True


@POSTGRES
@pytest.mark.parametrize("role", ROLES)
def test_the_doctor_agrees(admin: Admin, role: str, cli: Any) -> None:
    url = admin.user(role)
    answer = cli("doctor", "--url", url, "--role", role, "--json")
    assert answer.code == 0
    checks = {check["name"]: check for check in answer.json["checks"]}
    assert checks["privileges"]["status"] == "ok"
    answer = cli("doctor", "--url", url, "--json")
    assert answer.code == (0 if role == "operator" else 1), answer
