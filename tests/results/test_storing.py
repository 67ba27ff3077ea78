"""What is stored of a task, how it comes back, and for how long (C9)."""

from __future__ import annotations

import importlib.util
import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import celery.exceptions
import pytest
from celery import Celery, states
from celery.app.task import Context
from celery.exceptions import BackendStoreError, ImproperlyConfigured
from celery.result import GroupResult, ResultSet

from dbqueue import ConfigError, DBQueue, SchemaMissing, results
from dbqueue.celery_backend import Backend
from dbqueue.clock import SECOND

pytestmark = pytest.mark.req("C9")

MakeApp = Callable[..., Celery]


class CardRefused(Exception):
    """An error with more than one argument."""


def rows(queue: DBQueue, columns: str = "task_id, state") -> list[tuple[Any, ...]]:
    dialect = queue.database.dialect
    text = dialect.portable(f"SELECT {columns} FROM {{results}} ORDER BY task_id")
    return [tuple(row) for row in queue.database.read(lambda session: session.execute(text, {}))]


def move_clock(app: Celery, seconds: float) -> None:
    """The database's clock, as the app's backend reads it."""
    app.backend.place.database.clock.offset += round(seconds * SECOND)


def test_a_result_is_stored_read_and_forgotten(app: Celery, queue: DBQueue) -> None:
    backend = app.backend
    assert isinstance(backend, Backend)
    assert backend.get_task_meta("a") == {"status": "PENDING", "result": None}
    backend.store_result("a", {"sum": [1, 2.5, None, "ä"]}, states.SUCCESS)
    result = app.AsyncResult("a")
    assert (result.state, result.get(timeout=5), result.ready()) == ("SUCCESS", {"sum": [1, 2.5, None, "ä"]}, True)
    assert result.date_done is not None
    assert rows(queue) == [("a", "SUCCESS")]
    result.forget()
    assert rows(queue) == []
    assert app.AsyncResult("a").state == "PENDING"


def test_ids_of_any_shape(app: Celery) -> None:
    """Celery lets people choose them."""
    names = ["ä" * 300, "x'; --", '"%s" %(name)s :name {results}', "\\", "1"]
    for name in names:
        app.backend.store_result(name, name, states.SUCCESS)
    assert [app.AsyncResult(name).get(timeout=5) for name in names] == names


def test_states_on_the_way(app: Celery, queue: DBQueue) -> None:
    """STARTED, RETRY and states of the user's own are replaced by what comes later."""
    backend = app.backend
    backend.mark_as_started("a", pid=12, hostname="here")
    assert app.AsyncResult("a").state == "STARTED"
    assert app.AsyncResult("a").info == {"pid": 12, "hostname": "here"}
    backend.store_result("a", {"done": 3}, "PROGRESS")
    assert (app.AsyncResult("a").state, app.AsyncResult("a").info) == ("PROGRESS", {"done": 3})
    backend.mark_as_retry("a", ValueError("again"), traceback="Traceback")
    assert app.AsyncResult("a").state == "RETRY"
    assert isinstance(app.AsyncResult("a").info, ValueError)
    backend.mark_as_done("a", 4)
    assert app.AsyncResult("a").get(timeout=5) == 4
    assert rows(queue) == [("a", "SUCCESS")]


def test_a_success_is_not_taken_back(app: Celery) -> None:
    """A redelivered task that fails, or only begins, the second time, after the first run succeeded."""
    backend = app.backend
    backend.mark_as_done("a", 1)
    backend.mark_as_started("a")
    backend.mark_as_failure("a", ValueError("late"))
    backend.mark_as_done("a", 2)
    assert (app.AsyncResult("a").state, app.AsyncResult("a").get(timeout=5)) == ("SUCCESS", 1)
    backend.mark_as_failure("b", ValueError("first"))
    backend.mark_as_done("b", 3)
    assert app.AsyncResult("b").get(timeout=5) == 3
    backend.mark_as_revoked("c", "unwanted")
    assert app.AsyncResult("c").state == "REVOKED"


def test_a_success_that_has_expired_gives_way(make_app: MakeApp) -> None:
    app = make_app(result_expires=60)
    app.backend.mark_as_done("a", 1)
    move_clock(app, 61)
    app.backend.mark_as_failure("a", ValueError("anew"))
    assert app.AsyncResult("a").state == "FAILURE"


def test_an_exception_comes_back_as_itself(app: Celery) -> None:
    app.backend.mark_as_failure("a", CardRefused("no money", 3), traceback="Traceback: here")
    result = app.AsyncResult("a")
    with pytest.raises(CardRefused) as caught:
        result.get(timeout=5)
    assert caught.value.args == ("no money", 3)
    assert result.traceback == "Traceback: here"
    assert isinstance(result.get(timeout=5, propagate=False), CardRefused)


SERIALIZERS = {"json": "json", "pickle": "pickle", "yaml": "yaml", "msgpack": "msgpack"}


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_serializers_and_compression(make_app: MakeApp, serializer: str, compression: str | None) -> None:
    if importlib.util.find_spec(SERIALIZERS[serializer]) is None:
        pytest.skip(f"the package {serializer} is not installed")
    app = make_app(result_serializer=serializer, accept_content=[serializer], result_compression=compression)
    value = {"numbers": list(range(200)), "text": "ä" * 100}
    app.backend.mark_as_done("a", value)
    app.backend.mark_as_failure("b", CardRefused("no", 1))
    assert app.AsyncResult("a").get(timeout=5) == value
    with pytest.raises(CardRefused):
        app.AsyncResult("b").get(timeout=5)
    app.GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b")]).save()
    assert [part.id for part in app.GroupResult.restore("g").results] == ["a", "b"]


def test_compression_makes_it_smaller_and_may_be_switched_off_again(make_app: MakeApp, queue: DBQueue) -> None:
    small, plain = make_app(result_compression="zlib"), make_app()
    if small.backend.compression is None:
        pytest.skip("this Celery knows no result_compression")
    small.backend.mark_as_done("a", "x" * 10_000)
    assert len(rows(queue, "meta")[0][0]) < 1_000
    assert plain.AsyncResult("a").get(timeout=5) == "x" * 10_000


def test_extended_results(make_app: MakeApp) -> None:
    app = make_app(result_extended=True)
    request = Context({
        "id": "a", "task": "shop.add", "args": [1, 2], "kwargs": {"z": 3}, "hostname": "w1", "retries": 2, "group": "g",
        "delivery_info": {"routing_key": "q"}, "parent_id": "p",
    })  # fmt: skip
    app.backend.mark_as_done("a", 3, request)
    result = app.AsyncResult("a")
    assert (result.name, result.args, result.kwargs, result.worker, result.retries, result.queue) == (
        "shop.add", [1, 2], {"z": 3}, "w1", 2, "q",
    )  # fmt: skip
    meta = result._get_task_meta()
    assert (meta["group_id"], meta["parent_id"]) == ("g", "p")


def test_an_ignored_result_is_not_stored(app: Celery, queue: DBQueue) -> None:
    app.backend.mark_as_done("a", 1, Context({"id": "a", "ignore_result": True}))
    app.backend.mark_as_done("b", 1, store_result=False)
    assert rows(queue) == []


def test_many_at_once(app: Celery) -> None:
    """More than one statement takes, in any order, each once."""
    names = [f"t{n}" for n in range(1_100)]
    place = app.backend.place
    place.database.ready()
    with place.database.transaction() as session:
        for name in names:
            meta = app.backend.encode({"status": "SUCCESS", "result": name, "task_id": name, "traceback": None})
            raw = meta.encode() if isinstance(meta, str) else meta
            results.store(place.database.dialect, session, name, "SUCCESS", raw, None)
    found = dict(app.backend.get_many(names, timeout=5))
    assert {name: meta["result"] for name, meta in found.items()} == {name: name for name in names}
    values = ResultSet([app.AsyncResult(name) for name in names], app=app).get(timeout=20)
    assert values == names
    with pytest.raises(celery.exceptions.TimeoutError):
        list(app.backend.get_many(["missing"], timeout=0.01, interval=0.001))


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_group_is_saved_restored_and_deleted(app: Celery) -> None:
    inner = app.GroupResult("inner", [app.AsyncResult("c")])
    saved = app.GroupResult("g", [app.AsyncResult("a"), app.AsyncResult("b"), inner])
    saved.save()
    found = app.GroupResult.restore("g")
    assert found == saved
    assert isinstance(found.results[2], GroupResult)
    for name in "abc":
        app.backend.mark_as_done(name, name)
    assert found.get(timeout=5) == ["a", "b", ["c"]]
    found.delete()
    assert app.GroupResult.restore("g") is None
    assert app.GroupResult.restore("never") is None


def test_an_empty_set_is_ready(app: Celery) -> None:
    assert list(app.backend.iter_native(ResultSet([], app=app))) == []


# -- expiry ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expires", [60, timedelta(minutes=1)])
def test_what_has_expired_is_gone_for_readers_at_once(make_app: MakeApp, queue: DBQueue, expires: Any) -> None:
    app = make_app(result_expires=expires, result_cache_max=-1)
    app.backend.mark_as_done("a", 1)
    app.GroupResult("g", [app.AsyncResult("a")]).save()
    move_clock(app, 59)
    assert app.backend.get_state("a") == "SUCCESS"
    assert app.backend._restore_group("g") is not None
    move_clock(app, 2)
    assert app.backend.get_state("a") == "PENDING"
    assert app.backend._restore_group("g") is None
    assert list(app.backend.get_many(["a"], max_iterations=1)) == []
    assert rows(queue) == [("a", "SUCCESS")], "it is still there, for whoever prunes"


def test_failures_have_an_expiry_of_their_own(make_app: MakeApp) -> None:
    app = make_app(result_expires=60, result_failure_expires=600, result_cache_max=-1)
    app.backend.mark_as_done("a", 1)
    app.backend.mark_as_failure("b", ValueError())
    move_clock(app, 61)
    assert (app.backend.get_state("a"), app.backend.get_state("b")) == ("PENDING", "FAILURE")
    move_clock(app, 540)
    assert app.backend.get_state("b") == "PENDING"


@pytest.mark.parametrize("never", [None, 0])
def test_results_may_be_kept_for_ever(make_app: MakeApp, queue: DBQueue, never: Any) -> None:
    app = make_app(result_expires=never)
    app.backend.mark_as_done("a", 1)
    assert rows(queue, "expires_at") == [(None,)]
    move_clock(app, 10 * 365 * 86_400)
    app.backend.cleanup()
    assert app.backend.get_state("a") == "SUCCESS"


def test_cleanup_deletes_what_has_expired_and_nothing_else(
    make_app: MakeApp, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(result_expires=60)
    database = app.backend.place.database
    for n in range(7):
        app.backend.mark_as_done(f"old{n}", n)
        app.GroupResult(f"g{n}", [app.AsyncResult(f"old{n}")]).save()
    move_clock(app, 30)
    app.backend.mark_as_done("young", 1)
    move_clock(app, 31)
    batches: list[int] = []
    prune = results.prune

    def watched(dialect: Any, session: Any, limit: int) -> int:
        assert limit <= 1_000
        batches.append(prune(dialect, session, 3))
        return batches[-1]

    monkeypatch.setattr(results, "prune", watched)
    app.backend.cleanup()
    assert batches == [6, 6, 2, 0]
    assert rows(queue) == [("young", "SUCCESS")]
    left = database.read(
        lambda session: session.execute(database.dialect.portable("SELECT count(*) FROM {groups}"), {})
    )
    assert left[0][0] == 0


def test_whoever_stores_prunes_without_beat(make_app: MakeApp, queue: DBQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(result_expires=60)
    app.backend.mark_as_done("a", 1)
    move_clock(app, 61)
    app.backend.mark_as_done("b", 1)
    assert [row[0] for row in rows(queue)] == ["a", "b"], "not with every result"
    monkeypatch.setattr("dbqueue.celery_backend.PRUNE_EVERY", 0.0)
    app.backend.mark_as_done("c", 1)
    assert [row[0] for row in rows(queue)] == ["b", "c"]


@pytest.mark.databases("postgres")
def test_pruning_waits_for_nobody(make_app: MakeApp, queue: DBQueue) -> None:
    app = make_app(result_expires=60)
    for n in range(3):
        app.backend.mark_as_done(f"t{n}", n)
    move_clock(app, 61)
    database = queue.database
    with database.transaction() as session:
        session.execute(database.dialect.portable("SELECT 1 FROM {results} WHERE task_id = 't1' FOR UPDATE"))
        app.backend.cleanup()
        assert rows(queue) == [("t1", "SUCCESS")]
    app.backend.cleanup()
    assert rows(queue) == []


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_result_that_is_too_large_is_refused_without_its_text(make_app: MakeApp, queue: DBQueue) -> None:
    app = make_app(result_backend_transport_options={"max_result_bytes": 1_000})
    app.backend.mark_as_done("a", "s" * 700)
    with pytest.raises(BackendStoreError) as caught:
        app.backend.mark_as_done("b", "secret" * 200)
    assert "max_result_bytes" in str(caught.value)
    assert "1000" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value)
    assert rows(queue) == [("a", "SUCCESS")]


def test_a_name_without_a_database_is_refused(broker_url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="must name the database"):
        Celery(broker=broker_url, backend="dbqueue", set_as_current=False).backend  # noqa: B018


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("dbqueue+postgresql://u:hidden@nowhere.invalid/x?max_result_bytes=0", {}, "max_result_bytes"),
        ("dbqueue+postgresql://u:hidden@nowhere.invalid/x", {"max_result_bytes": True}, "max_result_bytes"),
        ("dbqueue+postgresql://u:hidden@nowhere.invalid/x?notify=perhaps", {}, "notify"),
        ("dbqueue+postgresql://u:hidden@nowhere.invalid/x", {"prefix": 'a"b'}, "prefix"),
        ("dbqueue+postgresql://u:hidden@nowhere.invalid/x", {"schema": ""}, "schema"),
        ("dbqueue+mysql://u:hidden@nowhere.invalid/x", {}, "mysql"),
        ("dbqueue+sqlite://", {}, "file"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_any_connection(url: str, options: dict[str, Any], told: str) -> None:
    app = Celery(broker="memory://", backend=url, set_as_current=False)
    app.conf.result_backend_transport_options = options
    with pytest.raises(ConfigError) as caught:
        app.backend.place  # noqa: B018
    assert told in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_unknown_options_are_told_once_and_those_of_other_backends_never(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbqueue.celery_backend.options._told", set())
    caplog.set_level(logging.WARNING, "dbqueue.results")
    given = {"colour": "red", "global_keyprefix": "x", "retry_policy": {"timeout": 5}}
    for _ in range(2):
        make_app(result_backend_transport_options=given).backend.get_state("a")
    assert [record.getMessage() for record in caplog.records] == [
        "result_backend_transport_options: 'colour' is not known and has no effect"
    ]


def test_options_in_the_url_and_beside_it(make_app: MakeApp, broker_url: str) -> None:
    more = "&" if "?" in broker_url else "?"
    app = make_app(f"{broker_url}{more}max_result_bytes=5000&prefix=other_&notify=false")
    app.backend.mark_as_done("a", 1)
    assert app.backend.options.max_bytes == 5_000
    assert app.backend.place.database.dialect.names.prefix == "other_"
    assert app.backend.place.database.notify is False
    both = make_app(
        f"{broker_url}{more}max_result_bytes=5000", result_backend_transport_options={"max_result_bytes": 9}
    )
    assert both.backend.options.max_bytes == 9


def test_tables_are_not_made_where_that_is_forbidden(make_app: MakeApp, make_database_url: Callable[[], str]) -> None:
    app = make_app(f"dbqueue+{make_database_url()}?auto_migrate=false")
    with pytest.raises(SchemaMissing, match="dbqueue migrate"):
        app.backend.mark_as_done("a", 1)
    fresh = make_app(f"dbqueue+{make_database_url()}")
    fresh.backend.mark_as_done("a", 1)
    assert fresh.AsyncResult("a").get(timeout=5) == 1


@pytest.mark.parametrize("password", ["hidden", "hi%2Fdd%40en%3A%25", "%27%22%26hid%3Fden"])
def test_the_password_is_shown_nowhere(password: str) -> None:
    url = f"dbqueue+postgresql://shop:{password}@db.invalid:5433/shop?sslmode=require&password={password}"
    app = Celery("shop", broker="memory://", backend=url, set_as_current=False)
    backend = app.backend
    assert backend.as_uri() == "dbqueue+postgresql://shop:***@db.invalid:5433/shop"
    assert backend.as_uri(include_password=True) == url
    for text in (repr(backend), str(backend), repr(backend.place.database), repr(backend.result_consumer)):
        assert password not in text
        assert "hid" not in text


def test_a_sqlite_file_has_nothing_to_hide(tmp_path: Any) -> None:
    app = Celery("shop", broker="memory://", backend=f"dbqueue+sqlite:///{tmp_path}/r.db", set_as_current=False)
    assert app.backend.as_uri() == f"dbqueue+sqlite:///{tmp_path}/r.db"


def test_a_backend_is_pickled_by_its_url(make_app: MakeApp) -> None:
    app = make_app()
    app.backend.mark_as_done("a", 1)
    app.set_current()
    try:
        copy = pickle.loads(pickle.dumps(app.backend))
        assert copy.url == app.backend.url
        assert copy.options == app.backend.options
        assert copy.get_state("a") == "SUCCESS"
        assert copy.place is app.backend.place
        result = pickle.loads(pickle.dumps(app.AsyncResult("a")))
        assert result.get(timeout=5) == 1
    finally:
        from celery._state import _set_current_app

        _set_current_app(None)


def test_a_database_without_its_driver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    app = Celery("shop", broker="memory://", backend="dbqueue+postgresql://u@db.invalid/x", set_as_current=False)
    with pytest.raises(ConfigError, match="psycopg"):
        app.backend.get_state("a")


def test_storing_is_tried_again_and_at_last_given_up(
    make_app: MakeApp, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as ``result_backend_max_retries`` says; by default so long as a failover takes."""
    from dbqueue import ConnectionLost

    app = make_app(result_backend_max_retries=2, result_backend_base_sleep_between_retries_ms=1)
    store, tries = results.store, []

    def lost(dialect: Any, session: Any, *rest: Any) -> None:
        tries.append(1)
        if len(tries) < fails:
            raise ConnectionLost("gone")
        store(dialect, session, *rest)

    monkeypatch.setattr(results, "store", lost)
    fails = 3
    app.backend.mark_as_done("a", 1)
    assert rows(queue) == [("a", "SUCCESS")]
    assert len(tries) == 3
    fails, tries[:] = 9, []
    with pytest.raises(BackendStoreError):
        app.backend.mark_as_done("b", 1)
    assert len(tries) == 3
    once = make_app(result_backend_always_retry=False)
    tries.clear()
    with pytest.raises(ConnectionLost):
        once.backend.mark_as_done("b", 1)
    assert len(tries) == 1
    assert make_app().backend.max_retries == 20
    assert make_app().backend.always_retry is True


def test_a_backend_for_all_threads(make_app: MakeApp) -> None:
    import threading

    found: list[Any] = []
    for safe in (True, False):
        app = make_app(result_backend_thread_safe=safe)
        found[:] = [app.backend]
        threads = [threading.Thread(target=lambda app=app: found.append(app.backend)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(backend) for backend in found}) == (1 if safe else 3)
        assert len({id(backend.place) for backend in found}) == 1
