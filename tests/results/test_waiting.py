"""``get()`` sleeps until the database rings, and misses nothing (C9)."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from statistics import median
from typing import Any

import celery.exceptions
import psycopg
import pytest
import sqlalchemy
from celery import Celery, states
from celery.result import AsyncResult, ResultSet

from dbqueue import DBQueue, NotSupported, results, using
from dbqueue.celery_backend import waiting
from dbqueue.database.postgres_statements import GATE_KEY
from tests.servers import Server
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C9")

MakeApp = Callable[..., Celery]


class Waiter(threading.Thread):
    """A thread that waits for a result; ``value`` raises what it got instead."""

    def __init__(self, result: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self.result, self.options = result, {"timeout": 60, **options}
        self.found: Any = None
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            self.found = self.result.get(**self.options)
        except BaseException as error:
            self.error = error
        self.ended_at = time.monotonic()

    @property
    def value(self) -> Any:
        self.join(60)
        assert not self.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.found


def hub_of(app: Celery) -> waiting.Hub:
    hub: waiting.Hub = app.backend.place.hub
    return hub


def asleep(app: Celery, task_ids: list[str]) -> None:
    """Until it is waited for all of these, and the sleep is announced and settled."""
    hub = hub_of(app)

    def sleeps() -> bool:
        sleeper = hub._sleeper
        heard = {results.bell(name) for name in task_ids} <= hub._bells or not hub._database.dialect.listens
        return (
            set(task_ids) <= set(hub._hot) and heard and hub._turn.locked() and not hub._fresh and not hub._unread
            and sleeper is not None and sleeper.announced and sleeper.settled
        )  # fmt: skip

    wait_for(sleeps, 20, "nobody fell asleep")


def waits_for(app: Celery, name: str, **options: Any) -> Waiter:
    waiter = Waiter(app.AsyncResult(name), **options)
    asleep(app, [name])
    return waiter


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many ids each read was about."""
    load, reads = results.load, []

    def watched(dialect: Any, session: Any, task_ids: Any) -> Any:
        task_ids = list(task_ids)
        reads.append(len(task_ids))
        return load(dialect, session, task_ids)

    with monkeypatch.context() as patch:
        patch.setattr(results, "load", watched)
        yield reads


def listening(postgres: Server, app: Celery) -> int:
    """Sessions that hold the lock of a sleeper."""
    asked = (
        "SELECT count(DISTINCT pid) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "WHERE d.datname = %s AND l.locktype = 'advisory'"
    )
    return int(postgres.execute(asked, (app.backend.place.database.url.database,))[0][0])


def sessions(postgres: Server, app: Celery) -> int:
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = 'results'"
    return int(postgres.execute(asked, (app.backend.place.database.url.database,))[0][0])


@pytest.fixture
def told(broker_url: str, make_app: MakeApp) -> Celery:
    """An app whose results' sessions can be told from others by their name."""
    return make_app(broker_url + "?application_name=results")


def test_a_waiter_is_rung(app: Celery, make_app: MakeApp) -> None:
    """Far below the interval in which results would be read otherwise."""
    other, took = make_app(), []
    for n in range(15):
        waiter = waits_for(app, f"t{n}")
        began = time.monotonic()
        other.backend.mark_as_done(f"t{n}", n)
        assert waiter.value == n
        took.append(waiter.ended_at - began)
    assert median(took) < 0.1, took


def test_a_result_that_is_there_costs_one_read(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    app.backend.mark_as_done("a", 1)
    with counted(monkeypatch) as reads:
        assert app.AsyncResult("a").get(timeout=5) == 1
    assert reads == [1]
    assert hub_of(app)._sleeper is None


@pytest.mark.databases("postgres")
def test_nothing_is_asked_while_nothing_happens(
    told: Celery, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    wait = waiting.Hub.wait
    monkeypatch.setattr(waiting.Hub, "wait", lambda *args: waits.append(1) or wait(*args))  # once a second
    waiter = waits_for(told, "a")
    asked = (
        "SELECT pid, state_change FROM pg_stat_activity WHERE datname = %s AND application_name = 'results' ORDER BY 1"
    )
    name = told.backend.place.database.url.database
    with counted(monkeypatch) as reads:
        before, seen = postgres.execute(asked, (name,)), len(waits)
        wait_for(lambda: len(waits) >= seen + 2)
        assert postgres.execute(asked, (name,)) == before
        assert reads == []
    told.backend.mark_as_done("a", 1)
    assert waiter.value == 1


@pytest.mark.databases("postgres")
def test_threads_share_one_listening_connection(told: Celery, postgres: Server) -> None:
    names = [f"t{n}" for n in range(40)]
    waiters = [Waiter(told.AsyncResult(name)) for name in names]
    asleep(told, names)
    assert listening(postgres, told) == 1
    assert sessions(postgres, told) <= 1 + 5
    began = time.monotonic()
    for name in reversed(names):
        told.backend.mark_as_done(name, name)
    assert [waiter.value for waiter in waiters] == names
    assert time.monotonic() - began < 5
    wait_for(lambda: listening(postgres, told) == 0, 10, "it rings though nobody waits")


@pytest.mark.parametrize("safe", [True, False])
def test_threads_that_wait_with_one_backend(make_app: MakeApp, safe: bool) -> None:
    """A result that was made here and is waited for there brings its backend along. What one thread took from the database may be
    another's: each is woken at once, not with the next interval."""
    app = make_app(result_backend_thread_safe=safe)
    names = [f"t{n}" for n in range(12)]
    waiters = [Waiter(AsyncResult(name, app=app, backend=app.backend)) for name in names]
    took: list[float] = []
    for name, waiter in zip(names, waiters, strict=True):
        asleep(app, [name])
        began = time.monotonic()
        app.backend.mark_as_done(name, name)
        assert waiter.value == name
        took.append(waiter.ended_at - began)
    assert max(took) < 0.7, took


def test_backends_of_two_threads(make_app: MakeApp) -> None:
    """Both wait for the same task and for one of their own."""
    app = make_app()

    def both(name: str) -> Waiter:
        backend = app._get_backend()
        return Waiter(ResultSet([AsyncResult(n, app=app, backend=backend) for n in ("shared", name)], app=app))

    waiters = [both("a"), both("b")]
    asleep(app, ["shared", "a", "b"])
    for name in ("a", "shared", "b"):
        app.backend.mark_as_done(name, name)
    assert [waiter.value for waiter in waiters] == [["shared", "a"], ["shared", "b"]]


@pytest.mark.databases("postgres")
def test_a_late_commit_is_not_missed(app: Celery) -> None:
    """A transaction stored the result before the waiter announced itself, so it rings nobody, and commits when the waiter sleeps."""
    backend, database = app.backend, app.backend.place.database
    database.ready()
    meta = backend.encode({"status": "SUCCESS", "result": 1, "task_id": "a", "traceback": None, "children": []})
    with database.transaction() as session:
        results.store(database.dialect, session, "a", "SUCCESS", meta.encode(), None)
        waiter = Waiter(app.AsyncResult("a"))
        hub = hub_of(app)
        wait_for(lambda: hub._sleeper is not None and hub._sleeper.announced and hub._look_pause >= 0.016)
        assert not hub._sleeper.settled, "it trusts its sleep though an older transaction is open"
        committed = time.monotonic()
    assert waiter.value == 1
    assert waiter.ended_at - committed < 2


class Bells:
    """Hears what any result rings."""

    def __init__(self, app: Celery) -> None:
        database = app.backend.place.database
        database.ready()
        url = database.url.render_as_string(hide_password=False)
        self.connection = psycopg.connect(url.partition("?")[0], autocommit=True)
        for n in range(results.BELLS):
            key = GATE_KEY.replace("{queue}", f"'dbqueue.result.{n}'")
            row = self.connection.execute(
                f"SELECT 'dbqueue_' || to_hex({key})", {"salt": database.dialect.names.salt}
            ).fetchone()
            assert row is not None
            self.connection.execute(f"LISTEN {row[0]}")

    def heard(self) -> int:
        self.connection.execute("SELECT 1")
        return len(list(self.connection.notifies(timeout=0)))


@pytest.mark.databases("postgres")
def test_nothing_rings_where_nobody_waits(app: Celery) -> None:
    bells = Bells(app)
    app.backend.mark_as_done("a", 1)
    assert bells.heard() == 0
    waiter = waits_for(app, "b")
    app.backend.mark_as_done("b", 1)
    assert waiter.value == 1
    assert bells.heard() == 1
    hub = hub_of(app)
    wait_for(lambda: hub._sleeper is None or not hub._sleeper.announced, 10, "it stays announced")
    app.backend.store_result("b", 1, "PROGRESS")
    app.backend.mark_as_done("c", 1)
    assert bells.heard() == 0
    bells.connection.close()


@pytest.mark.databases("postgres")
def test_a_result_rings_few_of_those_who_wait(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 names: a process is seldom woken for results of others."""
    waiter = waits_for(app, "a")
    others = [f"t{n}" for n in range(500) if results.bell(f"t{n}") != results.bell("a")][:20]
    assert len(others) == 20
    with counted(monkeypatch) as reads:
        for name in others:
            app.backend.mark_as_done(name, 1)
        assert sum(reads) == 0
    app.backend.mark_as_done("a", 1)
    assert waiter.value == 1


@pytest.mark.databases("postgres")
def test_the_connection_is_closed_after_a_while_and_opened_again(
    told: Celery, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LINGER", 0.3)
    for name in ("a", "b"):
        waiter = waits_for(told, name)
        told.backend.mark_as_done(name, 1)
        assert waiter.value == 1
        hub = hub_of(told)
        wait_for(lambda hub=hub: hub._sleeper is None and hub._closer is None, 10, "it stays open")
        wait_for(lambda: sessions(postgres, told) <= 2, 10)


def test_states_on_the_way_are_told(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, however often it is read."""
    heard: list[Any] = []
    waiter = waits_for(app, "a", on_message=lambda meta: heard.append((meta["status"], meta["result"])))
    for n in range(3):
        app.backend.store_result("a", {"done": n}, "PROGRESS")
        wait_for(lambda n=n: ("PROGRESS", {"done": n}) in heard)
    neighbour = next(name for name in (f"t{n}" for n in range(10_000)) if results.bell(name) == results.bell("a"))
    with counted(monkeypatch) as reads:
        app.backend.mark_as_done(neighbour, 1)
        wait_for(lambda: reads)
    asleep(app, ["a"])
    app.backend.mark_as_done("a", 1)
    assert waiter.value == 1
    assert heard == [("PROGRESS", {"done": 0}), ("PROGRESS", {"done": 1}), ("PROGRESS", {"done": 2}), ("SUCCESS", 1)]


def test_callbacks_of_others_are_called_meanwhile(app: Celery) -> None:
    """Also where the sleep is announced already, for a bell that all of them share."""
    bell = results.bell("earlier")
    ready, later, own = [name for name in (f"t{n}" for n in range(10_000)) if results.bell(name) == bell][:3]
    app.backend.mark_as_done(ready, 1)
    earlier = waits_for(app, "earlier")
    app.backend.mark_as_done("earlier", 1)
    assert earlier.value == 1
    called: list[Any] = []
    for name in (ready, later):
        app.AsyncResult(name).then(lambda result: called.append(result.id))
    waiter = Waiter(AsyncResult(own, app=app, backend=app.backend))
    wait_for(lambda: called == [ready], waiting.POLL - 2)
    asleep(app, [own])
    app.backend.mark_as_done(later, 1)
    wait_for(lambda: called == [ready, later])
    app.backend.mark_as_done(own, 1)
    assert waiter.value == 1


def test_sets_and_groups_come_together(app: Celery) -> None:
    names = [f"t{n}" for n in range(30)]
    inner = app.GroupResult("inner", [app.AsyncResult(name) for name in names[:5]])
    outer = app.GroupResult("outer", [inner, *(app.AsyncResult(name) for name in names[5:])])
    waiter, order = Waiter(outer), list(reversed(names))
    asleep(app, names)
    for name in order:
        app.backend.mark_as_done(name, name)
    assert waiter.value == [names[:5], *names[5:]]
    seen = dict(app.backend.iter_native(ResultSet([app.AsyncResult(name) for name in names], app=app), timeout=5))
    assert {name: meta["result"] for name, meta in seen.items()} == {name: name for name in names}
    app.backend.mark_as_failure("bad", ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        ResultSet([app.AsyncResult(name) for name in ["t1", "bad"]], app=app).join_native(timeout=5)


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_timeout_is_kept(app: Celery, timeout: float) -> None:
    app.backend.get_state("a")
    began = time.monotonic()
    with pytest.raises(celery.exceptions.TimeoutError):
        app.AsyncResult("a").get(timeout=timeout)
    assert timeout <= time.monotonic() - began < timeout + 0.6
    with pytest.raises(celery.exceptions.TimeoutError):
        ResultSet([app.AsyncResult("a"), app.AsyncResult("b")], app=app).get(timeout=timeout)
    app.backend.mark_as_done("a", 1)
    assert app.AsyncResult("a").get(timeout=5) == 1


def test_waiting_in_a_transaction_is_refused_at_once(app: Celery, queue: DBQueue, database_url: str) -> None:
    engine = sqlalchemy.create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection, using(connection):
        result = app.AsyncResult("a")
        for wait in (
            lambda: result.get(timeout=30),
            lambda: ResultSet([result], app=app).get(timeout=30),
            lambda: ResultSet([result], app=app).join_native(timeout=30),
            lambda: list(app.backend.get_many(["a"], timeout=30)),
        ):
            began = time.monotonic()
            with pytest.raises(NotSupported, match="before your transaction commits"):
                wait()
            assert time.monotonic() - began < 5
    engine.dispose()
    app.backend.mark_as_done("a", 1)
    assert result.get(timeout=5) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_on_connections_of_its_own(app: Celery) -> None:
    """The fork comes while a thread waits; the child also waits for what the parent had asked for before."""
    waiter, before = waits_for(app, "a"), app.AsyncResult("b")
    before.then(lambda result: None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writing, b"x")
            code = 0 if before.get(timeout=30) == "b" and app.AsyncResult("c").get(timeout=30) == "c" else 2
        finally:
            os._exit(code)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    os.close(writing)
    for name in "cb":
        app.backend.mark_as_done(name, name)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    app.backend.mark_as_done("a", "a")
    assert waiter.value == "a"


@pytest.mark.databases("postgres")
def test_a_cut_connection_is_told_once_and_made_again(
    app: Celery, postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dbqueue.results")
    waiter = waits_for(app, "a")
    postgres.terminate_connections(str(app.backend.place.database.url.database))
    wait_for(lambda: "rings again" in caplog.text)
    asleep(app, ["a"])
    began = time.monotonic()
    app.backend.mark_as_done("a", 1)
    assert waiter.value == 1
    assert waiter.ended_at - began < 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if text.startswith("waiting for results: ")]) == 1, warnings


@pytest.mark.databases("postgres")
def test_a_server_may_restart_meanwhile(app: Celery, postgres: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting is given up for no outage, and a store waits for its end."""
    caplog.set_level(logging.WARNING, "dbqueue.results")
    waiter = waits_for(app, "a")
    postgres.stop("immediate")
    wait_for(lambda: "waiting for results" in caplog.text)
    storing = threading.Thread(target=lambda: app.backend.mark_as_done("a", 1))
    storing.start()
    postgres.start()
    assert waiter.value == 1
    storing.join(30)
    assert caplog.text.count("waiting for results: ") == 1


@pytest.mark.databases("postgres")
def test_a_gate_that_somebody_holds_does_not_stop_anybody(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that died in the middle of its statement may hold the lock for long: results are then read by the clock."""
    database = app.backend.place.database
    database.ready()
    key = GATE_KEY.replace("{queue}", f"'{results.bell('a')}'")
    with psycopg.connect(database.url.render_as_string(hide_password=False)) as other:
        other.execute(f"SELECT pg_advisory_lock({key})", {"salt": database.dialect.names.salt})
        with counted(monkeypatch) as reads:
            waiter = Waiter(app.AsyncResult("a"))
            wait_for(lambda: hub_of(app)._look_pause == waiting.TROUBLED_POLL)
            assert len(reads) < 20, "it reads without a pause"
        app.backend.mark_as_done("a", 1)
        assert waiter.value == 1


@pytest.mark.parametrize("more", ["?notify=false"])
@pytest.mark.databases("postgres")
def test_without_notifications_results_are_read_twice_a_second(
    make_app: MakeApp, broker_url: str, postgres: Server, more: str
) -> None:
    app = make_app(broker_url + more)
    waiter = Waiter(app.AsyncResult("a"))
    wait_for(lambda: "a" in hub_of(app)._hot and not hub_of(app)._fresh)
    assert listening(postgres, app) == 0
    began = time.monotonic()
    app.backend.mark_as_done("a", 1)
    assert waiter.value == 1
    assert waiter.ended_at - began < 2


def test_the_garbage_collector_may_come_at_any_moment(app: Celery) -> None:
    """It drops results, which then tell the backend; it may do so in a thread that is just changing what is waited for."""
    hub, backend = hub_of(app), app.backend
    done = threading.Event()

    def collected() -> None:
        with hub._lock:
            backend.result_consumer.cancel_for("a")
        done.set()

    hub.add("a", backend.result_consumer.inbox)
    threading.Thread(target=collected, daemon=True).start()
    assert done.wait(10), "it waits for a lock that its own thread holds"
    assert hub._wanted() == []


def test_what_nobody_waits_for_costs_little(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery remembers the members of a group that was only sent. They hold no connection, and each read asks for a part of them."""
    group = app.GroupResult("g", [app.AsyncResult(f"t{n}") for n in range(3_000)])
    group._on_full.finalize()
    with counted(monkeypatch) as reads:
        waiter = Waiter(AsyncResult("a", app=app, backend=app.backend))  # the one that remembers them
        asleep(app, ["a"])
        app.backend.mark_as_done("a", 1)
        assert waiter.value == 1
    assert max(reads) <= 2 * results.AT_ONCE + 1
    hub = hub_of(app)
    wait_for(lambda: not hub._turn.locked())
    assert not hub._hot
    del group
    gc.collect()


def test_an_ended_thread_waits_no_more(app: Celery) -> None:
    """Its backend goes with it, and so does what it had asked for."""

    def ask() -> None:
        with pytest.raises(celery.exceptions.TimeoutError):
            app.AsyncResult("a").get(timeout=0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    def gone() -> bool:
        gc.collect()
        return hub_of(app)._wanted() == []

    wait_for(gone)


def test_a_failure_to_decode_is_raised_where_it_is_waited_for(make_app: MakeApp, broker_url: str) -> None:
    writer, reader = make_app(result_serializer="pickle", accept_content=["pickle"]), make_app()
    writer.backend.mark_as_done("a", 1)
    with pytest.raises(Exception, match=r"."):
        reader.AsyncResult("a").get(timeout=5)
    assert writer.AsyncResult("a").state == states.SUCCESS


@pytest.mark.soak
def test_no_bell_is_lost_in_a_crowd(make_app: MakeApp, database: str) -> None:
    """Threads ask and wait, others store: in transactions that stay open until the next one has begun to wait, where there can be
    such. A bell that was lost would show as a wait of five seconds."""
    app, asked, slow = make_app(), Queue[str | None](), []
    backend = app.backend
    database_ = backend.place.database
    backend.get_state("x")

    def ask(number: int) -> None:
        for n in range(60):
            name = f"{number}.{n}"
            result = app.AsyncResult(name)
            asked.put(name)
            began = time.monotonic()
            assert result.get(timeout=60) == name
            slow.append(time.monotonic() - began)

    def store() -> None:
        meta = {"status": "SUCCESS", "traceback": None, "children": []}
        while (name := asked.get()) is not None:
            if database == "sqlite":
                app.backend.mark_as_done(name, name)
                continue
            with database_.transaction() as session:
                raw = backend.encode({**meta, "task_id": name, "result": name}).encode()
                results.store(database_.dialect, session, name, "SUCCESS", raw, None)
                with contextlib.suppress(Empty):
                    asked.put(asked.get(timeout=0.02))  # somebody else asks meanwhile, or nobody does

    storing = [threading.Thread(target=store) for _ in range(3)]
    asking = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in (*storing, *asking):
        thread.start()
    for thread in asking:
        thread.join(100)
    for _ in storing:
        asked.put(None)
    for thread in storing:
        thread.join(20)
    assert len(slow) == 6 * 60
    assert max(slow) < waiting.POLL - 0.5, max(slow)
