"""The messages of a Celery group are written together, and are otherwise what they are when each is written alone."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import kombu
import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.signals import after_task_publish
from kombu.exceptions import EncodeError, OperationalError

from dbqueue import DBQueue
from dbqueue.database.postgres_statements import GATE_KEY
from dbqueue.database.sqlite import Sqlite
from dbqueue.errors import DatabaseError, ReservedName
from dbqueue.kombu_transport import groups
from tests.proxy import Proxy
from tests.servers import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C1")

WRITTEN_LATE = 3_600.0
"""Seconds: nothing is written because of the time that it waits."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it depends on the machine how many are written together."""
    monkeypatch.setattr(groups, "LONGEST", WRITTEN_LATE)
    monkeypatch.setattr(groups, "SLOW", WRITTEN_LATE)


@pytest.fixture
def noop(app: Celery) -> Any:
    return task_of(app)


@pytest.fixture
def published() -> Iterator[list[str]]:
    """The ids of tasks whose publishing has returned; a member asks for the next one only then, and Celery may be one or two ahead."""
    found: list[str] = []

    def note(headers: dict[str, Any], **more: Any) -> None:
        found.append(headers["id"])

    after_task_publish.connect(note)
    yield found
    after_task_publish.disconnect(note)


def task_of(app: Celery) -> Any:
    @app.task(name="noop", shared=False)
    def noop(*args: Any) -> None: ...

    return noop


def named(noop: Any, first: int, last: int = 0) -> list[Any]:
    """Members whose ids tell their places."""
    return [noop.s(n).set(task_id=name(n)) for n in (range(first, last) if last else range(first))]


def name(number: int) -> str:
    return f"m-{number:04}"


def names(count: int) -> list[str]:
    return [name(number) for number in range(count)]


def written(queue: DBQueue) -> list[str]:
    """The ids of all tasks that are committed, in the order in which workers get them."""
    question = "SELECT task_id FROM dbqueue_jobs ORDER BY queue, priority, ready_at, id"
    return [str(row[0]) for row in queue.database.read(lambda session: session.execute(question))]


@pytest.fixture
def transactions(queue: DBQueue, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """In how many transactions the messages that wait were written."""
    if database != "sqlite":
        question = "SELECT count(DISTINCT xmin::text) FROM dbqueue_jobs"
        yield lambda: int(queue.database.read(lambda session: session.execute(question))[0][0])
        return
    statements: list[str] = []
    connect = Sqlite.connect

    def traced(self: Sqlite) -> Any:
        connection = connect(self)
        connection.set_trace_callback(statements.append)
        return connection

    def count() -> int:
        found, wrote = 0, False
        for statement in statements:
            wrote = wrote or ('INTO "dbqueue_jobs"' in statement and "INSERT" in statement)
            if wrote and statement.startswith("COMMIT"):
                found, wrote = found + 1, False
        return found

    monkeypatch.setattr(Sqlite, "connect", traced)
    yield count


def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on Celery's groups are as they were made."""
    known = group._apply_tasks.__wrapped__

    def apply_tasks(self: Any, *args: Any, **options: Any) -> Any:
        return known(self, *args, **options)

    monkeypatch.setattr(group, "_apply_tasks", apply_tasks)


@pytest.fixture(params=["together", "each alone"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "each alone":
        each_alone(monkeypatch)
    return str(request.param)


# -- how many, and in which order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
def test_a_thousand_members_are_ten_transactions(
    noop: Any, queue: DBQueue, transactions: Callable[[], int], lazy: bool
) -> None:
    members = named(noop, 1_000)
    result = group(iter(members) if lazy else members).apply_async()
    assert [child.id for child in result.results] == names(1_000)
    assert written(queue) == names(1_000)
    assert transactions() == 10


@pytest.mark.databases("postgres")
def test_a_thousand_members_are_a_few_round_trips(database_url: str, queue: DBQueue) -> None:
    proxy = Proxy(database_url)
    app = Celery("shop", broker=f"dbqueue+{proxy.url}", set_as_current=False)
    noop = task_of(app)
    noop.delay()
    before = proxy.requests
    group(named(noop, 1_000)).apply_async()
    assert proxy.requests - before == 10
    app.close()
    proxy.close()


def test_large_messages_go_alone_or_in_smaller_batches(
    noop: Any, queue: DBQueue, transactions: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MOST_BYTES", 100_000)
    large = noop.s("x" * 100_000).set(task_id=name(3))
    group([*named(noop, 3), large, *named(noop, 4, 7)]).apply_async()
    assert written(queue) == names(7)
    assert transactions() == 3
    group([noop.s("x" * 30_000).set(task_id=name(n)) for n in range(7, 17)]).apply_async()
    assert written(queue) == names(17)
    assert transactions() == 3 + 3


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("default", ["transaction_isolation = 'serializable'", "transaction_read_only = on"])
def test_a_role_with_other_defaults(postgres: Server, queue: DBQueue, broker_url: str, default: str) -> None:
    postgres.execute(f'ALTER DATABASE "{queue.database.url.database}" SET default_{default}')
    app = Celery("shop", broker=broker_url, set_as_current=False)
    group(named(task_of(app), 150)).apply_async()
    assert written(queue) == names(150)
    app.close()


@pytest.mark.databases("postgres")
def test_who_sleeps_is_woken(noop: Any, queue: DBQueue) -> None:
    key, salt = GATE_KEY.replace("{queue}", "'q'"), {"salt": queue.database.dialect.names.salt}
    url = queue.database.url.render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as sleeper:
        (channel,) = sleeper.execute(f"SELECT 'dbqueue_' || to_hex({key})", salt).fetchone()  # type: ignore[misc]
        sleeper.execute(f"LISTEN {channel}")
        sleeper.execute(f"SELECT pg_advisory_lock_shared({key})", salt)
        group(named(noop, 150)).apply_async()
        sleeper.execute("SELECT 1")
        assert len(list(sleeper.notifies(timeout=0))) == 2


def test_nobody_waits_for_more_than_a_moment(
    noop: Any, queue: DBQueue, transactions: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time that is really set; how many come together in it depends on the machine."""
    monkeypatch.undo()
    assert 0 < groups.LONGEST <= 0.1
    group(named(noop, 1_000)).apply_async()
    assert written(queue) == names(1_000)


@pytest.mark.parametrize("what", ["LONGEST", "SLOW", "nothing"])
def test_what_waits_is_written_before_a_slow_source_is_asked_again(
    noop: Any, queue: DBQueue, published: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what != "nothing":
        monkeypatch.setattr(groups, what, 0.0)  # everything is slow
    seen: list[bool] = []

    def members() -> Iterator[Any]:
        for member in named(noop, 20):
            seen.append(len(published) > 2 and written(queue) == published)
            yield member

    group(members()).apply_async()
    assert seen[10:] == [what != "nothing"] * 10
    assert written(queue) == names(20)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread writes what waits, and with the time that is really set."""
    monkeypatch.setattr(groups, "LONGEST", 0.05)
    monkeypatch.setattr(groups, "_watch", groups._Watch())


@pytest.mark.usefixtures("watched")
def test_a_source_may_wait_for_its_own_members(noop: Any, queue: DBQueue) -> None:
    """As one does that keeps no more than so many of its tasks at work."""

    def members() -> Iterator[Any]:
        for number, member in enumerate(named(noop, 30)):
            if number in (20, 25):
                wait_for(lambda n=number: len(written(queue)) >= n - 5, 10, "they wait for their source")  # type: ignore[misc]
            yield member

    group(members()).apply_async()
    assert written(queue) == names(30)


@pytest.mark.usefixtures("watched")
def test_a_group_in_a_forked_child_is_watched_too(noop: Any, queue: DBQueue, broker_url: str) -> None:
    group(named(noop, 3)).apply_async()
    child = os.fork()
    if not child:
        try:
            own = task_of(Celery("child", broker=broker_url, set_as_current=False))
            own.app.conf.task_default_queue = "q"
            members = named(own, 3, 13)

            def slow() -> Iterator[Any]:
                for number, member in enumerate(members):
                    if number == 9:
                        wait_for(lambda: len(written(queue)) > 3 + 5, 10)
                    yield member

            group(slow()).apply_async()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert written(queue) == names(13)


@pytest.mark.usefixtures("watched")
def test_what_is_refused_while_the_source_is_slow_is_told(noop: Any, queue: DBQueue, database: str) -> None:
    forbid(queue, database)

    def members() -> Iterator[Any]:
        for number, member in enumerate(named(noop, 60)):
            if number == 30:
                wait_for(lambda: "m-0021" in written(queue), 10)
            yield member

    with pytest.raises(DatabaseError):
        group(members()).apply_async()
    assert "m-0020" not in written(queue)
    assert "m-0050" not in written(queue), "the error came late"


def chord_of(noop: Any, members: list[Any]) -> Any:
    return chord(members, noop.si())


SHAPES = {
    "chord": chord_of,
    "nested": lambda noop, members: group([*members[:20], group(members[20:40]), *members[40:49], group(members[49:])]),
    "chains": lambda noop, members: group([chain(member, noop.si()) for member in members]),
    "group in a chain": lambda noop, members: chain(group(members), noop.si()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_celery_makes_of_groups(
    broker_url: str, queue: DBQueue, transactions: Callable[[], int], shape: str
) -> None:
    app = Celery("shop", broker=broker_url, backend=broker_url, set_as_current=False)
    noop = task_of(app)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare("celery")
    SHAPES[shape](noop, named(noop, 50)).apply_async()
    assert written(queue) == names(50)
    assert transactions() == 1
    app.backend.place.database.close()
    app.close()


def test_chunks(noop: Any, queue: DBQueue, transactions: Callable[[], int]) -> None:
    noop.chunks(zip(range(60), strict=True), 2).apply_async()
    assert len(written(queue)) == 30
    assert transactions() == 1


def test_a_message_is_what_it_is_when_it_is_written_alone(
    noop: Any, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    eta = datetime.now(timezone.utc) + timedelta(hours=1)
    options: list[dict[str, Any]] = [
        {}, {"priority": 7}, {"queue": "other"}, {"eta": eta}, {"expiration": 60}, {"queue": "a,{b} \"c' \\d NULL"}, {},
    ]  # fmt: skip

    def publish(prefix: str) -> list[Any]:
        members = [noop.s("é", n).set(task_id=f"{prefix}-{n}", **more) for n, more in enumerate(options)]
        group(members).apply_async()
        question = (
            "SELECT target, queue, priority, run_at > created_at, expires_at - created_at, ready_at IS NULL, state, max_attempts, payload "
            f"FROM dbqueue_jobs WHERE task_id LIKE '{prefix}-%' ORDER BY task_id"
        )
        return [list(row) for row in queue.database.read(lambda session: session.execute(question))]

    together = publish("together")
    each_alone(monkeypatch)
    assert together == publish("alone")
    assert [row[1] for row in together] == [more.get("queue", "q") for more in options]


# -- errors ------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def fails(noop: Any, how: str) -> Any:
    if how == "source":
        raise Broken
    if how == "arguments":
        return noop.s(object())
    if how == "queue":
        return noop.s(70).set(queue="dbqueue.mine")
    return noop.s(70).set(task_id="nul \0")


places = pytest.mark.parametrize("place", [0, 70])


@pytest.mark.parametrize(("how", "error"), [("source", Broken), ("arguments", EncodeError), ("queue", ReservedName)])
@places
def test_an_error_is_its_own_members(
    noop: Any, queue: DBQueue, published: list[str], way: str, how: str, error: type[Exception], place: int
) -> None:
    check_error(noop, queue, published, how, error, place)


@pytest.mark.databases("postgres")
@places
def test_an_error_that_the_database_would_have_is_its_own_members(
    noop: Any, queue: DBQueue, published: list[str], way: str, place: int
) -> None:
    """SQLite takes such an id."""
    check_error(noop, queue, published, "nul", ValueError, place)


def check_error(noop: Any, queue: DBQueue, published: list[str], how: str, error: type[Exception], place: int) -> None:
    """What was published before it is there, nothing that comes after it is."""

    def members() -> Iterator[Any]:
        yield from named(noop, place)
        yield fails(noop, how)
        yield from named(noop, place + 1, 100)

    with pytest.raises(error):
        group(members()).apply_async()
    assert written(queue) == published
    assert published == names(len(published))
    assert len(published) in ((place,) if how != "source" else (place, place - 1, place - 2, 0))
    noop.apply_async(task_id="m-9999")
    assert written(queue) == published


def forbid(queue: DBQueue, database: str) -> None:
    """Somebody's own rule on our table."""
    rules = [
        "ALTER TABLE dbqueue_jobs ADD CONSTRAINT theirs CHECK (task_id NOT IN ('m-0020', 'm-0119'))",
        "CREATE TRIGGER theirs BEFORE INSERT ON dbqueue_jobs WHEN NEW.task_id IN ('m-0020', 'm-0119') "
        "BEGIN SELECT RAISE(ABORT, 'no'); END",
    ]
    queue.database.run(lambda session: session.execute(rules[database == "sqlite"]))


def test_what_the_database_refuses_takes_no_other_with_it(
    noop: Any, queue: DBQueue, database: str, published: list[str]
) -> None:
    forbid(queue, database)
    with pytest.raises(DatabaseError):
        group(named(noop, 120)).apply_async()
    assert written(queue) == [name for name in published if name != "m-0020"]
    assert len(published) == 100
    with pytest.raises(DatabaseError):
        group(named(noop, 101, 120)).apply_async()
    assert written(queue)[-1] == "m-0118"


def test_the_last_member_publishes_nothing(noop: Any, app: Celery, queue: DBQueue) -> None:
    group([*named(noop, 30), quiet(app)]).apply_async()
    assert written(queue) == names(30)


def quiet(app: Celery) -> Any:
    """A member that publishes nothing."""

    class Quiet(app.Task):  # type: ignore[name-defined,misc]
        name = "quiet"

        def run(self) -> None: ...

        def apply_async(self, *args: Any, **options: Any) -> Any:
            return self.AsyncResult("quiet")

    return app.register_task(Quiet()).s()


@pytest.fixture
def proxied(database_url: str, queue: DBQueue) -> Iterator[tuple[Proxy, Celery]]:
    """An app whose way to its broker can be cut, with a connection made."""
    proxy = Proxy(database_url)
    app = Celery("shop", broker=f"dbqueue+{proxy.url}", set_as_current=False)
    app.conf.task_default_queue = "q"
    app.conf.task_publish_retry_policy = {"max_retries": 100, "interval_start": 0, "interval_step": 0.05}
    task_of(app).apply_async(task_id="m-0000")
    yield proxy, app
    app.close()
    proxy.close()


def take_all(queue: DBQueue) -> list[str]:
    """The ids of all tasks that wait; they are taken and acked."""
    url = queue.database.url.render_as_string(hide_password=False)
    taken: list[str] = []
    with kombu.Connection(f"dbqueue+{url}") as connection:
        while (message := connection.default_channel.basic_get("q")) is not None:
            taken.append(message.headers["id"])
            message.ack()
    return taken


LOSSES = pytest.mark.parametrize("loss", ["answer", "request"])


@pytest.mark.databases("postgres")
@LOSSES
@pytest.mark.parametrize("place", [1, 150, 299])
def test_a_batch_whose_connection_ends_is_there_once(
    proxied: tuple[Proxy, Celery], queue: DBQueue, loss: str, place: int
) -> None:
    """In the first batch, one in the middle, the last. It is looked up by the ids; no publishing is begun again."""
    proxy, app = proxied
    (proxy.lose_answer if loss == "answer" else proxy.lose_request)(name(place).encode())
    group(named(app.tasks["noop"], 1, 300)).apply_async(retry=False)
    assert (proxy.armed, proxy.losses) == (False, 1)
    assert written(queue) == names(300)


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("end", ["plain", "quiet"])
def test_a_batch_of_which_nobody_knows_for_a_while(proxied: tuple[Proxy, Celery], queue: DBQueue, end: str) -> None:
    """It was committed, but no answer comes back, not that of the look either: kombu publishes again. Meanwhile workers take what is
    there, and none of that is sent a second time."""
    proxy, app = proxied
    taken: list[str] = []
    noop = app.tasks["noop"]

    def members() -> Iterator[Any]:
        yield from named(noop, 1, 190)
        proxy.lose_answers(1.0)
        yield from named(noop, 190, 250)

    def heal() -> None:
        wait_for(lambda: proxy.losses >= 2, 30)
        taken.extend(take_all(queue))
        proxy.lose_answers(0)

    healer = threading.Thread(target=heal)
    healer.start()
    if end == "plain":
        group(members()).apply_async()
        count = 250
    else:  # nor does a publishing that is under way begin again
        proxy.lose_answers(1.0)
        group([*named(noop, 1, 50), quiet(app)]).apply_async()
        count = 50
    healer.join()
    assert len(taken) >= count // 2
    assert taken + written(queue) == names(count)


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize(
    ("way", "end"), [("together", "plain"), ("together", "quiet"), ("each alone", "plain")], indirect=["way"]
)
def test_a_database_that_is_gone_is_told_as_for_one_message(
    proxied: tuple[Proxy, Celery], queue: DBQueue, way: str, retry: bool, end: str
) -> None:
    """What waited is lost with the group, whose caller is told."""
    proxy, app = proxied
    policy = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    noop = app.tasks["noop"]

    def members() -> Iterator[Any]:
        yield from named(noop, 1, 150)
        proxy.close()
        yield from named(noop, 150, 160) if end == "plain" else [quiet(app)]

    with pytest.raises(OperationalError):
        group(members()).apply_async(retry=retry, retry_policy=policy)
    found = written(queue)
    assert found == names(len(found))
    assert len(found) == 101 if way == "together" else len(found) > 140


# -- what else this thread does, and others ----------------------------------------------------------------------------


def at_tenth(noop: Any, do: Callable[[], None]) -> Iterator[Any]:
    """Twenty members; ``do`` runs before the tenth is given, when all that Celery has got by then but one or two are published."""
    for place, member in enumerate(named(noop, 20)):
        if place == 10:
            do()
        yield member


@pytest.mark.parametrize("first", ["one", "group"])
def test_what_the_source_publishes_is_there_at_once_and_in_its_place(
    noop: Any, app: Celery, queue: DBQueue, published: list[str], first: str
) -> None:
    seen: list[bool] = []

    def publish() -> None:
        (noop.apply_async if first == "one" else group(named(noop, 50, 53)).apply_async)(**more)
        seen.append(written(queue) == published)

    more = {"task_id": "alone"} if first == "one" else {}
    with app.producer_or_acquire() as one, app.producer_or_acquire() as other:
        for producer in (one, other):  # nothing is left to be declared
            noop.apply_async(producer=producer)
    take_all(queue)
    published.clear()
    group(at_tenth(noop, publish)).apply_async()
    assert seen == [True]
    assert 7 <= published.index("alone" if first == "one" else name(50)) < 10
    assert written(queue) == published
    assert len(published) == (21 if first == "one" else 23)


@pytest.mark.parametrize("what", ["control", "event", "look", "one by the same producer", "transient"])
def test_what_is_no_message_of_a_queue_comes_after_what_was_published(
    noop: Any, app: Celery, queue: DBQueue, published: list[str], what: str
) -> None:
    seen: list[list[str]] = []
    before: list[str] = []
    with app.producer_or_acquire() as producer:
        channel = producer.channel
        channel.queue_declare("brief", durable=False, auto_delete=True)
        for exchange, kind in (("celery.pidbox", "fanout"), ("celeryev", "topic")):
            channel.exchange_declare(exchange, kind)
            channel.queue_bind("brief", exchange, "#")

        def act() -> None:
            before.extend(published)
            assert written(queue) == []
            if what == "control":
                app.control.broadcast("ping")
            elif what == "event":
                app.events.Dispatcher(channel=channel, enabled=True).send("task-custom", uuid="x")
            elif what == "look":
                assert channel.queue_declare("q", passive=True).message_count == len(before)
            elif what == "transient":
                producer.publish("x", routing_key="brief", delivery_mode=1)
            else:
                producer.publish("x", routing_key="other", serializer="json")
            seen.append([found for found in written(queue) if found != "None"])

        group(at_tenth(noop, act)).apply_async(producer=producer)
    assert seen == [before]
    assert before
    assert [found for found in written(queue) if found != "None"] == names(20)


def test_a_member_may_be_revoked_when_it_is_published(
    noop: Any, app: Celery, queue: DBQueue, published: list[str]
) -> None:
    gone: list[str] = []

    def revoke() -> None:
        gone.append(published[-1])
        app.control.revoke(gone[0])

    group(at_tenth(noop, revoke)).apply_async()
    assert [record.task_id for record in queue.jobs(state="cancelled")] == gone
    assert [found for found in written(queue) if found != "None"] == [found for found in names(20) if found not in gone]


@pytest.mark.parametrize("inherits", [True, False])
def test_another_thread_publishes_at_once_and_leaves_the_group_alone(noop: Any, queue: DBQueue, inherits: bool) -> None:
    seen: list[list[str]] = []

    def publish() -> None:
        noop.apply_async(task_id="alone")
        seen.append(written(queue))

    def in_thread() -> None:
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(publish) if inherits else publish())
        thread.start()
        thread.join()

    group(at_tenth(noop, in_thread)).apply_async()
    assert seen == [["alone"]]
    assert written(queue) == ["alone", *names(20)]


def test_a_context_that_outlives_the_group_gathers_nothing(noop: Any, queue: DBQueue, published: list[str]) -> None:
    kept: list[contextvars.Context] = []

    def members() -> Iterator[Any]:
        yield from named(noop, 3)
        kept.append(contextvars.copy_context())
        yield from [*named(noop, 3, 5), fails(noop, "arguments"), *named(noop, 5, 10)]

    with pytest.raises(EncodeError) as failed:  # and keeps what was running
        group(members()).apply_async()
    kept[0].run(lambda: noop.apply_async(task_id=name(5)))  # which the group was given, and did not come to publish
    assert written(queue) == published == names(6)
    del failed


# -- how it comes to Celery --------------------------------------------------------------------------------------------

ORDERS = (
    "from celery import Celery, group",
    "from celery import group, Celery",
    "import celery.canvas; from celery import Celery",
    "import celery.canvas, dbqueue; from celery import Celery",
    "import dbqueue; from celery import Celery",
    "import kombu; from celery import Celery",
    "import celery.canvas, dbqueue.kombu_transport.groups; from celery import Celery",
    "import celery.canvas, dbqueue.kombu_transport.transport; from celery import Celery",
)


@pytest.mark.databases("sqlite")
@pytest.mark.parametrize("order", ORDERS)
def test_the_first_group_of_a_process_is_gathered(order: str) -> None:
    script = f"""
{order}
app = Celery("shop", broker="dbqueue+sqlite:///not-reached.db")
@app.task
def noop(): ...
noop.s()
import celery.canvas
from dbqueue.kombu_transport import groups
print(celery.canvas.group._apply_tasks.__globals__ is vars(groups))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("change", ["gone", "other parameters", "no generator"])
def test_a_method_that_is_not_as_we_know_it_is_left_alone(
    noop: Any, queue: DBQueue, transactions: Callable[[], int], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    known = group._apply_tasks.__wrapped__

    def other(self: Any, signatures: Any, *args: Any, **options: Any) -> Any:
        yield from known(self, signatures, *args, **options)

    def function(self: Any, tasks: Any, producer: Any = None, app: Any = None, *args: Any, **options: Any) -> Any:
        return known(self, tasks, producer, app, *args, **options)

    if change == "gone":
        monkeypatch.delattr(group, "_apply_tasks")
        groups.install()
        assert not hasattr(group, "_apply_tasks")
        return
    changed = other if change == "other parameters" else function
    monkeypatch.setattr(group, "_apply_tasks", changed)
    groups.install()
    assert group._apply_tasks is changed
    group(named(noop, 3)).apply_async()
    assert written(queue) == names(3)
    assert transactions() == 3


@pytest.mark.databases("sqlite")
def test_a_group_for_another_broker_is_none_of_ours() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    noop = task_of(app)
    seen: list[object] = []

    def members() -> Iterator[Any]:
        for member in named(noop, 3):
            seen.append(groups.current())
            yield member

    assert [child.id for child in group(members()).apply_async().results] == names(3)
    assert seen == [None] * 3
    app.close()
