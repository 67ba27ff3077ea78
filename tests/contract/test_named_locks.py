"""Locks: one holder of a name, fenced by a token, for as long as the database's clock says (A7)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

import dbqueue
from dbqueue import DBQueue, InvalidArgument, InvalidName, Lock, LockLost, LockTaken, NotSupported, ReservedName, locks
from dbqueue.clock import SECOND
from dbqueue.database.engine import Database
from dbqueue.ids import new_token

pytestmark = pytest.mark.req("A7")


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url)
    yield queue
    queue.close()


def stored(database: Database) -> list[tuple[str, str]]:
    with database.session() as session:
        return [
            (str(name), str(owner))
            for name, owner in session.execute(database.dialect.names.fill("SELECT name, owner FROM {locks}"))
        ]


def held(lock: Lock) -> Lock:
    assert lock.acquire()
    return lock


# -- the handle --------------------------------------------------------------------------------------------------------


def test_one_holder_at_a_time(queue: DBQueue) -> None:
    first, second = queue.lock("import"), queue.lock("import")
    assert first.acquire()
    assert 29 < first.remaining <= 30
    assert not second.acquire()
    assert not first.acquire(), "nor twice by one"
    assert second.remaining == 0
    assert queue.lock("export").acquire(), "another name is another lock"
    assert first.release()
    assert second.acquire()
    assert not first.release(), "it is another's now"
    assert not first.renew()
    assert second.renew()


def test_a_lock_ends_with_its_time_to_live_and_can_be_taken_over(queue: DBQueue) -> None:
    first, second = held(queue.lock("import", ttl=10)), queue.lock("import", ttl=10)
    queue.database.clock.advance(9.9)
    assert not second.acquire()
    queue.database.clock.advance(0.2)
    assert second.acquire()
    assert not first.renew()
    assert not first.release()
    assert second.renew(), "untouched by those"


def test_who_renews_keeps_it(queue: DBQueue) -> None:
    lock = held(queue.lock("import", ttl=10))
    for _ in range(3):
        queue.database.clock.advance(9)
        assert lock.renew()
    assert not queue.lock("import").acquire()


def test_a_lock_that_ended_is_not_renewed_though_nobody_took_it(queue: DBQueue) -> None:
    """Whoever looked meanwhile may have seen that it was free."""
    lock = held(queue.lock("import", ttl=10))
    queue.database.clock.advance(10.1)
    assert not lock.renew()
    assert lock.remaining == 0
    assert not lock.release()
    assert lock.acquire(), "it may be taken anew"


def test_the_row_goes_with_the_lock(queue: DBQueue) -> None:
    lock = held(queue.lock("import", ttl=10))
    assert stored(queue.database) == [("import", lock.owner)]
    assert lock.release()
    assert stored(queue.database) == []
    lock = held(queue.lock("import", ttl=10))
    queue.database.clock.advance(11)
    assert not lock.release()
    assert stored(queue.database) == [], "of one that ended before, too"


def test_a_block_holds_it_and_gives_it_back(queue: DBQueue) -> None:
    with queue.lock("import") as lock:
        assert lock.remaining
        with pytest.raises(LockTaken, match=f"'import' is held by {lock.owner}"), queue.lock("import"):
            pytest.fail("the block was entered")
    assert stored(queue.database) == []
    with pytest.raises(KeyError), queue.lock("import"):
        raise KeyError
    assert stored(queue.database) == []


def test_a_block_that_outlives_the_lock_is_told(queue: DBQueue) -> None:
    with pytest.raises(LockLost, match="not renewed within 10 s"), queue.lock("import", ttl=10):
        queue.database.clock.advance(11)

    def fail_late() -> None:
        with queue.lock("import", ttl=10):
            queue.database.clock.advance(11)
            raise KeyError

    with pytest.raises(KeyError):  # of two errors, the block's own is the one to tell
        fail_late()


def test_bad_input_is_refused_before_the_database_is_asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("none") / "none.db"
    with closing(DBQueue(f"sqlite:///{path}")) as queue:
        for name in ("dbqueue.beat", "dbqueue."):
            with pytest.raises(ReservedName):
                queue.lock(name)
        for name in ("", " x", "x\n", "x" * 201, 7):
            with pytest.raises(InvalidName):
                queue.lock(name)  # type: ignore[arg-type]
        for ttl in (0, 0.05, 86_401, True, "30", None, float("nan")):
            with pytest.raises(InvalidArgument, match=r"ttl must be a number of seconds from 0\.1 to 86400"):
                queue.lock("import", ttl=ttl)  # type: ignore[arg-type]
    assert not path.exists()


def test_never_in_a_callers_transaction(queue: DBQueue, database: str) -> None:
    lock, taken = queue.lock("import"), held(queue.lock("export"))
    url = queue.database.url.render_as_string(hide_password=False)
    connection = sqlite3.connect(str(queue.database.url.database)) if database == "sqlite" else psycopg.connect(url)
    with closing(connection):
        connection.execute("SELECT 1")
        with dbqueue.using(connection):
            for call in (lock.acquire, taken.renew, taken.release, lock.__enter__):
                with pytest.raises(NotSupported, match="outside of the block"):
                    call()
    assert taken.renew(), "nothing was changed"
    assert taken.release()


# -- the verbs ---------------------------------------------------------------------------------------------------------


def test_who_asks_again_with_its_token_is_told_that_it_has_it(fresh_db: Database) -> None:
    """As after an answer that was lost. The time counts from the second try."""
    db, token, ttl = fresh_db, new_token(), 10 * SECOND
    for _ in range(2):
        assert db.run(lambda s: locks.acquire(db.dialect, s, "dbqueue.own", token, "me", ttl))
        db.clock.advance(6)
    assert not db.run(lambda s: locks.acquire(db.dialect, s, "dbqueue.own", new_token(), "you", ttl))
    assert db.run(lambda s: locks.owner_of(db.dialect, s, "dbqueue.own")) == "me"
    db.clock.advance(5)
    assert db.run(lambda s: locks.owner_of(db.dialect, s, "dbqueue.own")) is None


def test_another_token_changes_nothing(fresh_db: Database) -> None:
    db, token, ttl = fresh_db, new_token(), 10 * SECOND
    assert db.run(lambda s: locks.acquire(db.dialect, s, "x", token, "me", ttl))
    other = new_token()
    assert not db.run(lambda s: locks.renew(db.dialect, s, "x", other, 100 * ttl))
    assert not db.run(lambda s: locks.release(db.dialect, s, "x", other))
    assert not db.run(lambda s: locks.renew(db.dialect, s, "y", token, 100 * ttl))
    assert stored(db) == [("x", "me")]
    db.clock.advance(9.9)
    assert db.run(lambda s: locks.renew(db.dialect, s, "x", token, ttl))
    db.clock.advance(10.1)
    assert not db.run(lambda s: locks.release(db.dialect, s, "x", other))
    assert stored(db) == [("x", "me")], "not even of one that ended"
