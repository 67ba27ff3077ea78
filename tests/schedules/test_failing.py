"""Whatever dies between the jobs and the cursor: never one without the other, and never twice (D16)."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import Empty

import psycopg
import pytest

from dbqueue import events, using
from dbqueue.clock import SECOND
from dbqueue.runtime.beat import Beat
from dbqueue.testing.shared_clock import SharedClock
from tests.proxy import Proxy
from tests.schedules.lab import Lab, instant, shown
from tests.servers import Server
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
MINUTE = 60 * SECOND

pytestmark = pytest.mark.req("D16")

NAMES = ("one", "two", "three")


def consistent(lab: Lab) -> list[str]:
    """Every slot up to each cursor has its one job, and no other has one. Returns the slots of the first."""
    cursors = dict(lab.sql("SELECT name, last_slot FROM {schedules}"))
    for name, cursor in cursors.items():
        expected = list(range(instant("2026-03-02 10:01:00"), cursor + 1, MINUTE))
        assert sorted(lab.sequences(name)) == expected, name
    return lab.slots(NAMES[0])


def catch_up(lab: Lab, beat: Beat, slots: int) -> None:
    """What a dead one held is given back by the server a moment later."""

    def done() -> bool:
        beat.step()
        return all(lab.count(name) >= slots for name in NAMES)

    wait_for(done)
    lab.settle(beat)
    assert len(consistent(lab)) == slots


def test_c49_killed_at_each_statement_of_a_firing(database_url: str, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    lab = Lab(database_url, SharedClock(clock))
    with ExitStack() as stack:
        stack.callback(lab.close)
        lab.kept(*NAMES)
        lab.settle(survivor := lab.beat())
        doomed = subprocess.Popen(
            [sys.executable, "-m", "tests.schedules.killed", database_url, str(clock)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert doomed.stdin is not None
        assert doomed.stdout is not None
        stack.enter_context(doomed)
        stack.callback(doomed.stdin.close)
        fired = dead = 0
        for moment in range(1, 100):
            lab.at(f"2026-03-02 10:{moment:02}:01")
            print(moment, file=doomed.stdin, flush=True)
            answer = doomed.stdout.readline().strip()
            fired += len(consistent(lab)) == moment
            if answer == "done":
                break
            assert answer == "killed"
            dead += 1
            catch_up(lab, survivor, moment)
        else:
            raise AssertionError("it never lived")
    # Around the look, BEGIN, now, the locks, the jobs, the cursors, COMMIT; and the look that finds nothing more.
    assert dead >= 16
    assert 3 <= fired < dead


@pytest.mark.databases("postgres")
@pytest.mark.parametrize(
    ("loss", "marker"),
    [("answer", b"COMMIT\0"), ("request", b"COMMIT\0"), ("request", b"INSERT INTO"), ("request", b"UPDATE")],
    ids=["after the commit", "before the commit", "before the jobs", "before the cursors"],
)
def test_a_connection_that_is_lost_around_a_firing(lab: Lab, loss: str, marker: bytes) -> None:
    """A COMMIT whose answer is lost needs no answer: the next look reads the cursors."""
    lab.kept(*NAMES)
    with closing(Proxy(lab.url)) as proxy:
        beat = lab.beat(lab.another_queue(proxy.url), poll=0.01)
        lab.settle(beat)
        lab.at("2026-03-02 10:01:00")
        lab.told.clear()
        (proxy.lose_answer if loss == "answer" else proxy.lose_request)(marker)
        beat.step()
        assert (proxy.armed, proxy.losses) == (False, 1)
        assert len(lab.of(events.DatabaseTrouble)) == 1
        told = len(lab.of(events.ScheduleFired))
        wait_for(lambda: len(consistent(lab)) == (1 if (loss, marker) == ("answer", b"COMMIT\0") else 0))
        assert told == 0  # only what is known to be committed is told
        catch_up(lab, beat, 1)
        lab.at("2026-03-02 10:02:00")
        catch_up(lab, beat, 2)
        assert len(lab.of(events.DatabaseBack)) == 1


@contextmanager
def running(*beats: Beat) -> Iterator[None]:
    """In threads of their own until the block ends, as ``run`` has them; nothing must have ended one."""
    errors: list[BaseException] = []

    def run(beat: Beat) -> None:
        try:
            while not beat.stopped:
                with suppress(Empty):
                    beat._bell.get(timeout=beat.step())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(beat,)) for beat in beats]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for beat in beats:
            beat.stop()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.databases("postgres")
def test_connections_that_are_cut_again_and_again(lab: Lab) -> None:
    lab.kept(*NAMES)
    with closing(Proxy(lab.url)) as proxy:
        beats = [lab.beat(lab.another_queue(proxy.url), poll=0.01) for _ in range(3)]
        with running(*beats):
            for minute in range(1, 40):
                lab.at(f"2026-03-02 10:{minute:02}:00")
                if minute % 4 == 0:
                    proxy.cut()
                elif minute % 4 == 2:
                    proxy.lose_answers(0.1, seed=minute)
                else:
                    proxy.lose_answers(0)
                wait_for(lambda m=minute: len(lab.slots("one")) >= m - 8)  # type: ignore[misc]
            proxy.lose_answers(0)
            wait_for(lambda: all(lab.count(name) >= 39 for name in NAMES), 20)
        assert len(consistent(lab)) == 39
    assert len(lab.of(events.DatabaseTrouble)) >= 3


@pytest.mark.databases("sqlite")
def test_a_writer_that_holds_sqlites_lock(lab: Lab) -> None:
    """No trouble of the connection, nothing is set aside: the beat waits, and fires when it may."""
    lab.kept(*NAMES)
    beat = lab.beat()
    lab.settle(beat)
    lab.at("2026-03-02 10:01:00")
    with closing(sqlite3.connect(lab.database.dialect.path, isolation_level=None)) as other:  # type: ignore[attr-defined]
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=beat.step)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        other.execute("ROLLBACK")
        thread.join()
    assert len(consistent(lab)) == 1
    assert not lab.of(events.DatabaseTrouble)
    assert not lab.of(events.ScheduleBroken)


# -- jobs that the database does not take ------------------------------------------------------------------------------


def refuse(lab: Lab, when: str) -> Callable[[], None]:
    """A trigger that raises; returns what takes it away."""
    if lab.database.dialect.name == "sqlite":
        lab.sql(
            f"CREATE TRIGGER refuses BEFORE INSERT ON dbqueue_jobs WHEN {when} BEGIN SELECT RAISE(ABORT, 's3cret'); END"
        )
        return lambda: lab.sql("DROP TRIGGER refuses") and None  # type: ignore[func-returns-value]
    lab.sql("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 's3cret'; END $$")
    lab.sql(
        f"CREATE TRIGGER refuses BEFORE INSERT ON dbqueue_jobs FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION refuse()"
    )
    return lambda: lab.sql("DROP TRIGGER refuses ON dbqueue_jobs") and None  # type: ignore[func-returns-value]


def test_c53_a_job_that_is_refused_is_not_counted_as_written(lab: Lab) -> None:
    lab.kept(*NAMES)
    beat = lab.beat()
    lab.run_until("2026-03-02 10:01:00", beat)
    take_away = refuse(lab, "1 = 1")
    lab.at("2026-03-02 10:02:00")
    lab.settle(beat)
    assert consistent(lab) == ["2026-03-02 10:01"]
    assert len(lab.of(events.ScheduleBroken)) == 3
    assert "s3cret" not in str(lab.told)
    assert "s3cret" not in str(lab.queue.schedules())
    take_away()
    lab.run_until("2026-03-02 10:04:30", beat)
    assert len(consistent(lab)) == 4
    assert [schedule.error for schedule in lab.queue.schedules()] == [None] * 3


def test_one_that_is_refused_keeps_no_other_from_firing(lab: Lab) -> None:
    lab.kept(*NAMES, "bad")
    take_away = refuse(lab, "NEW.source = 'bad'")
    beat = lab.beat()
    lab.run_until("2026-03-02 10:10:00", beat)
    assert [lab.count(name) for name in NAMES] == [10, 10, 10]
    assert lab.count("bad") == 0
    assert [event.name for event in lab.of(events.ScheduleBroken)] == ["bad"]  # once, and not each minute
    take_away()
    lab.run_until("2026-03-02 10:12:00", beat)
    assert lab.count("bad") == 12


@pytest.mark.databases("postgres")
def test_a_key_that_an_open_transaction_holds_keeps_no_other_from_firing(lab: Lab) -> None:
    lab.kept(*NAMES)
    lab.kept("keyed", key="k")
    beat = lab.beat(poll=1)
    lab.settle(beat)
    with psycopg.connect(lab.url) as other:
        with using(other):
            lab.queue.send("raw", 1, key="k")
        lab.at("2026-03-02 10:01:00")
        began = time.monotonic()
        lab.settle(beat)
        assert time.monotonic() - began < 8  # a transaction of our own would wait for ten seconds, and twice
        assert [lab.count(name) for name in (*NAMES, "keyed")] == [1, 1, 1, 0]
        assert "DatabaseBusy" in str(lab.queue.get_schedule("keyed").error)  # type: ignore[union-attr]
        other.rollback()
    lab.run_until("2026-03-02 10:01:10", beat)
    assert lab.slots("keyed") == ["2026-03-02 10:01"]
    assert lab.queue.get_schedule("keyed").error is None  # type: ignore[union-attr]
    assert [shown(slot) for slot in lab.sequences("one")] == ["2026-03-02 10:01"]


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("pooler", [False, True])
def test_a_beats_transactions_have_the_plans_and_the_patience_of_a_workers(lab: Lab, pooler: bool) -> None:
    """Behind a pooler they last for the transaction, since the session is not the beat's own."""
    session = lab.beat()._connection.session
    assert session is not None
    if pooler:
        session.connection.prepare_threshold = None
    session.begin()
    found = [session.execute(f"SHOW {name}")[0][0] for name in ("enable_seqscan", "plan_cache_mode", "lock_timeout")]
    session.rollback()
    assert found == ["off", "force_generic_plan", "1s"]
    assert session.execute("SHOW enable_seqscan")[0][0] == ("on" if pooler else "off")


@pytest.mark.databases("postgres")
def test_a_server_that_went_away_for_a_while(lab: Lab, postgres: Server) -> None:
    lab.kept(*NAMES)
    beat = lab.beat(poll=0.01)
    lab.settle(beat)
    postgres.stop("immediate")
    try:
        for _ in range(3):
            assert beat.step() >= 0
        assert len(lab.of(events.DatabaseTrouble)) == 1
    finally:
        postgres.start()
    lab.clock.offset += 5 * MINUTE
    wait_for(lambda: beat.step() >= 0 and len(lab.of(events.ScheduleFired)) >= 15)
    assert len(lab.of(events.ScheduleFired)) == 15
