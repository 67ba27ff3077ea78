"""What of results belongs to the caller's transaction, and what does not (C5, C9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
import sqlalchemy
from celery import Celery

from dbqueue import ConnectionLost, DBQueue, EnqueueFailed, WouldDeadlock, using

pytestmark = pytest.mark.req("C9", "C5")

MakeApp = Callable[..., Celery]


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    yield engine
    engine.dispose()


def test_a_saved_group_commits_with_the_callers_rows(app: Celery, engine: sqlalchemy.Engine) -> None:
    with engine.connect() as connection:
        for name, end in (("taken back", connection.rollback), ("kept", connection.commit)):
            with using(connection):
                app.GroupResult(name, [app.AsyncResult("a")]).save()
            end()
    assert app.GroupResult.restore("taken back") is None
    assert [part.id for part in app.GroupResult.restore("kept").results] == ["a"]


def test_a_result_is_stored_at_once_or_refused(
    app: Celery, engine: sqlalchemy.Engine, queue: DBQueue, database: str
) -> None:
    """It is a worker's affair; on SQLite it would wait for the lock that its own thread holds."""
    app.backend.get_state("a")
    with engine.connect() as connection:
        with using(connection):
            app.GroupResult("g", [app.AsyncResult("a")]).save()
            if database == "sqlite":
                with pytest.raises(WouldDeadlock):
                    app.backend.mark_as_done("a", 1)
            else:
                app.backend.mark_as_done("a", 1)
        connection.rollback()
    assert app.AsyncResult("a").state == ("PENDING" if database == "sqlite" else "SUCCESS")


@pytest.mark.databases("postgres")
def test_an_error_leaves_at_once_and_is_not_tried_again(app: Celery, database_url: str) -> None:
    """The caller's transaction is broken: only its end helps."""
    app.backend.get_state("a")
    tries = []
    save = app.backend._save_group
    app.backend._save_group = lambda *args: tries.append(1) or save(*args)
    with psycopg.connect(database_url) as connection, using(connection):
        connection.execute("SELECT 1")
        pid = connection.info.backend_pid
        with psycopg.connect(database_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(EnqueueFailed):
            app.GroupResult("g", [app.AsyncResult("a")]).save()
    assert len(tries) == 1


def test_a_lost_connection_is_no_reason_to_hold_the_callers_transaction(app: Celery, engine: sqlalchemy.Engine) -> None:
    """There it leaves as EnqueueFailed, since the caller's transaction is broken; on a connection of the backend's own it is one."""
    lost = EnqueueFailed("lost")
    lost.__cause__ = ConnectionLost("lost")
    assert app.backend.exception_safe_to_retry(ConnectionLost("lost"))
    with engine.connect() as connection, using(connection):
        assert not app.backend.exception_safe_to_retry(lost)
