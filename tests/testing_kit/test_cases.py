"""A case is one queue on a real database of its own, for the time of one test (D21)."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import traceback
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import dbqueue
from dbqueue import Closed, DBQueue, InvalidArgument, JobNotFound, NotSupported, Port, current_job
from dbqueue.testing import Case, CaseFactory, NotDrained, ProcessTrouble, case
from tests.testing_kit.app import Do, Failure, mailer, other, queue, unnamed, urgent, work
from tests.waiting import wait_for

pytestmark = pytest.mark.req("D21")


@pytest.fixture
def opened(dbqueue_case: CaseFactory) -> Case:
    return dbqueue_case(queue)


# -- the database ------------------------------------------------------------------------------------------------------


def test_a_case_has_its_own_database_and_the_queue_its_old_one_afterwards(tmp_path: Path) -> None:
    before, settings = queue.database, queue.settings
    with case(queue, tmp_path) as one:
        job = work.enqueue(Do())
        assert one.path.is_relative_to(tmp_path)
        assert one.job(job).state == "pending"
    with case(queue, tmp_path) as two:
        assert two.path != one.path
        assert two.jobs() == []
        with pytest.raises(JobNotFound):
            two.job(job)
    assert queue.database is before
    assert queue.settings is settings
    assert one.path.exists(), "what lies below tmp_path is pytest's to remove"


def test_without_a_folder_nothing_is_left() -> None:
    with case(queue) as opened:
        work.enqueue(Do())
        opened.drain()
    assert not opened.folder.exists()


def test_everything_is_put_back_after_a_test_that_failed() -> None:
    before = queue.database
    opened = None

    def fail() -> None:
        nonlocal opened
        with case(queue) as opened:
            opened.fake(mailer, [])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert queue.database is before
    assert mailer.get() == ["the real one"]
    assert opened is not None
    assert not opened.folder.exists()


@pytest.mark.req("D18", "D20")
def test_every_legal_timeout_passes_the_lease_rule(opened: Case) -> None:
    assert work.policy.timeout_ms == 3_600_000, "the longest"
    assert queue.settings.lease_ms == 7_200_000
    assert queue.settings.history_ms > 10**11, "an advanced clock must not prune what a test looks at"
    work.enqueue(Do())
    assert opened.drain().succeeded == 1


def test_what_the_code_says_beside_the_url_holds(opened: Case) -> None:
    work.enqueue(Do("fail"))
    assert 9 < (opened.drain().ended[0].retry_in or 0) < 11  # retry_base and retry_max are 10


@pytest.mark.req("D5")
def test_the_applications_transaction_can_be_joined(opened: Case) -> None:
    shop = sqlite3.connect(opened.path)
    with shop, dbqueue.using(shop):
        shop.execute("CREATE TABLE orders (id)")
        work.enqueue(Do())
    with dbqueue.using(shop):
        shop.execute("INSERT INTO orders VALUES (1)")
        work.enqueue(Do())
    shop.rollback()
    shop.close()
    assert len(opened.jobs()) == 1


def test_a_path_may_hold_what_a_url_may_not(tmp_path: Path) -> None:
    odd = tmp_path / "a b#c&d=é"
    odd.mkdir()
    with case(queue, odd) as opened:
        work.enqueue(Do())
        assert opened.drain().succeeded == 1
        assert opened.path.stat().st_size > 0


def test_two_queues_have_their_cases_at_the_same_time(dbqueue_case: CaseFactory) -> None:
    one, two = dbqueue_case(queue), dbqueue_case(unnamed)
    work.enqueue(Do())
    other.enqueue()
    one.advance(1000)
    assert one.now() - two.now() > timedelta(seconds=900)
    assert [job.target for job in one.jobs()] == [work.name]
    assert [job.target for job in two.jobs()] == [other.name]
    assert one.drain().succeeded == two.drain().succeeded == 1


def test_cases_in_two_threads_do_not_hear_each_other(opened: Case) -> None:
    meet = threading.Barrier(2, timeout=20)
    private = DBQueue("sqlite:////nowhere/at/all.db")

    @private.job(max_attempts=1, timeout=30, name="meet")
    def meeting() -> None:
        meet.wait()

    @private.job(max_attempts=1, timeout=30, name="nobody")
    def nobody() -> None: ...

    counts = []

    def elsewhere() -> None:
        with case(private) as theirs:
            meeting.enqueue()
            nobody.enqueue()
            counts.append(theirs.drain().succeeded)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    work.enqueue(Do("mail"))
    opened.fake(mailer, _Meeting(meet))
    assert opened.drain().succeeded == 1
    thread.join()
    assert counts == [2]


class _Meeting(list[str]):
    def __init__(self, meet: threading.Barrier) -> None:
        super().__init__()
        self._meet = meet

    def append(self, text: str) -> None:
        self._meet.wait()


def test_one_queue_may_have_a_case_within_a_case(opened: Case) -> None:
    work.enqueue(Do())
    with case(queue) as inner:
        assert inner.jobs() == []
        with pytest.raises(NotSupported, match="another case, which was opened later"):
            opened.drain()
    assert opened.drain().succeeded == 1


def test_a_case_that_has_ended_says_so() -> None:
    with case(queue) as opened:
        pass
    for call in (opened.now, opened.drain, opened.jobs, lambda: opened.advance(1), lambda: opened.fake(mailer, [])):
        with pytest.raises(Closed, match="this case has ended"):
            call()


def test_only_a_queue_can_have_a_case() -> None:
    with pytest.raises(InvalidArgument, match=r"case\(\) takes a DBQueue; got str"):
        case("sqlite:///x.db").__enter__()  # type: ignore[arg-type]


# -- time --------------------------------------------------------------------------------------------------------------


def test_time_passes_only_by_itself_and_by_advance(opened: Case) -> None:
    assert abs(opened.now() - datetime.now(timezone.utc)) < timedelta(seconds=5)
    started = time.monotonic()
    delayed, at = work.enqueue(Do(), delay=86_400), work.enqueue_at(opened.now() + timedelta(days=2), Do())
    assert len(opened.drain()) == 0
    opened.advance(86_000)
    assert len(opened.drain()) == 0
    opened.advance(400)
    assert [ended.id for ended in opened.drain().ended] == [delayed.id]
    now = opened.advance(86_400)
    assert [ended.id for ended in opened.drain().ended] == [at.id]
    assert abs(opened.job(at).finished_at - now) < timedelta(seconds=10)  # type: ignore[operator]
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf"), True, "1", None, 3651 * 86_400])
def test_time_goes_nowhere_but_on(opened: Case, seconds: float) -> None:
    before = opened.now()
    with pytest.raises(InvalidArgument, match=r"advance\(\) takes seconds"):
        opened.advance(seconds)
    assert opened.now() - before < timedelta(seconds=10)


def test_a_claim_that_was_left_is_taken_over_when_its_lease_has_ended(opened: Case) -> None:
    job = work.enqueue(Do())
    assert queue.claim("default", "somebody", lease=7200) is not None
    opened.advance(7100)
    assert len(opened.drain()) == 0
    opened.advance(100)
    assert opened.drain().succeeded == 1
    assert (opened.job(job).attempt, opened.job(job).lapses) == (2, 1)


# -- the drain ---------------------------------------------------------------------------------------------------------


def test_a_drain_says_what_ended_how(opened: Case) -> None:
    jobs = {what: work.enqueue(Do(what)).id for what in ("succeed", "fail", "bury", "later")}
    jobs["block"] = work.enqueue(Do()).id
    execute(opened, "UPDATE dbqueue_jobs SET target = 'gone' WHERE id = ?", jobs["block"].bytes)
    drained = opened.drain()
    assert {ended.id: ended.outcome for ended in drained.ended} == {
        jobs["succeed"]: "succeeded", jobs["fail"]: "failed", jobs["bury"]: "dead", jobs["later"]: "failed",
        jobs["block"]: "blocked",
    }  # fmt: skip
    assert (drained.succeeded, drained.failed, drained.dead, drained.blocked, len(drained)) == (1, 2, 1, 1, 5)
    by_id = {ended.id: ended for ended in drained.ended}
    assert by_id[jobs["block"]].kind == "unknown_target"
    assert by_id[jobs["later"]].retry_in == 60
    assert {type(error).__name__ for error in drained.errors} == {"Failure", "Bury", "RetryLater"}
    assert isinstance(by_id[jobs["fail"]].error, Failure)

    opened.advance(60)
    assert (opened.drain().dead, opened.job(jobs["fail"]).attempt) == (2, 2)


def execute(opened: Case, statement: str, *values: object) -> None:
    with sqlite3.connect(opened.path) as connection:
        connection.execute(statement, values)
    connection.close()


def test_a_test_sees_the_handlers_traceback(opened: Case) -> None:
    work.enqueue(Do("fail"))
    (error,) = opened.drain().errors
    text = "".join(traceback.format_exception(error))
    assert 'raise Failure("on purpose")' in text
    assert "tests/testing_kit/app.py" in text


def test_raise_errors_raises_the_first_once_everything_has_run(opened: Case) -> None:
    work.enqueue(Do("fail"))
    last = work.enqueue(Do())
    with pytest.raises(Failure, match="on purpose"):
        opened.drain(raise_errors=True)
    assert opened.job(last).state == "succeeded"


def test_a_cancelled_job_is_lost(opened: Case) -> None:
    class Canceller(list[str]):
        def append(self, text: str) -> None:
            job = current_job()
            assert job is not None
            queue.cancel(job.id)

    job = work.enqueue(Do("mail"))
    opened.fake(mailer, Canceller())
    assert [ended.outcome for ended in opened.drain().ended] == ["lost"]
    assert opened.job(job).state == "cancelled"


def test_jobs_run_in_the_production_path_and_in_its_order(opened: Case) -> None:
    seen: list[tuple[str, bool]] = []

    class Noting(list[str]):
        def append(self, text: str) -> None:
            seen.append((threading.current_thread().name, current_job() is not None))

    opened.fake(mailer, Noting())
    jobs = [work.enqueue(Do("mail")).id for _ in range(5)]
    first = urgent.enqueue().id
    assert [ended.id for ended in opened.drain().ended] == [first, *jobs]
    assert seen == [("dbqueue-slot-1", True)] * 5
    assert all(job.worker and job.attempt == 1 and job.started_at for job in opened.jobs())
    assert current_job() is None


def test_a_drain_is_bounded(opened: Case) -> None:
    work.enqueue(Do("again"))
    with pytest.raises(
        NotDrained, match=rf"more than max_jobs=7 jobs were due. Run: 7 x {work.name}. Still due: 1 x"
    ) as caught:
        opened.drain(max_jobs=7)
    assert caught.value.drained.succeeded == 7
    assert len(opened.jobs(state="succeeded")) == 7
    assert len(opened.jobs(state="pending")) == 1


def test_a_bound_that_is_just_enough_is_enough(opened: Case) -> None:
    for _ in range(3):
        work.enqueue(Do())
    work.enqueue(Do(), delay=60)
    assert opened.drain(max_jobs=3).succeeded == 3
    for bad in (0, -1, True, 1.5, "3"):
        with pytest.raises(InvalidArgument, match=r"drain\(max_jobs=\.\.\.\)"):
            opened.drain(max_jobs=bad)  # type: ignore[arg-type]


def test_a_drain_may_look_at_some_queues_only(opened: Case) -> None:
    with case(unnamed) as theirs:
        other.enqueue()
        assert len(theirs.drain(queues=("elsewhere",))) == 0
        assert theirs.drain(queues=("default",)).succeeded == 1


def test_a_drain_does_not_wait_for_a_transaction_of_the_test(opened: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbqueue.testing.drain.LOCK_PATIENCE", 0.05)
    work.enqueue(Do())
    shop = sqlite3.connect(opened.path)
    with shop, dbqueue.using(shop), pytest.raises(NotSupported, match=r"inside using\(\.\.\.\)"):
        opened.drain()
    shop.execute("BEGIN IMMEDIATE")
    with pytest.raises(NotSupported, match="an open transaction of the test holds the write lock"):
        opened.drain()
    shop.close()
    assert opened.drain().succeeded == 1


def test_a_drain_ends_when_the_database_is_in_trouble(opened: Case) -> None:
    work.enqueue(Do())
    execute(opened, "ALTER TABLE dbqueue_finished RENAME TO elsewhere")
    with pytest.raises(NotDrained, match="trouble with the database"):
        opened.drain()


# -- fakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D4")
def test_fakes_last_until_the_case_or_the_block_ends(opened: Case) -> None:
    made: list[int] = []
    port: Port[list[int]] = Port("numbers", lambda: made)
    with case(unnamed) as inner:
        outer, equal = inner.fake(port, [1]), [1]
        with inner.fake(port, equal) as given:
            assert given is equal
            assert port.get() is equal
        assert port.get() is not equal
        assert port.get() == [1]
        with outer:
            pass
        assert port.get() is made
        with inner.fakes({port: [2], mailer: ["fake"]}):
            assert (port.get(), mailer.get()) == ([2], ["fake"])
        assert (port.get(), mailer.get()) == (made, ["the real one"])
        inner.fakes({port: [3]})
        assert port.get() == [3]
    assert port.get() is made


def test_a_job_gets_the_fake(opened: Case) -> None:
    sent: list[str] = []
    opened.fake(mailer, sent)
    work.enqueue(Do("mail"))
    assert sent == []
    opened.drain(raise_errors=True)
    assert sent == ["sent"]


# -- processes ---------------------------------------------------------------------------------------------------------

APP = "tests.testing_kit.app:queue"


def test_a_process_works_on_the_cases_database_at_the_cases_time(opened: Case) -> None:
    opened.advance(86_400)
    later = work.enqueue(Do(), delay=10_000)
    worker = opened.process(APP, "-c", "2", "-n", "mine")
    assert (opened.wait_for(work.enqueue(Do())).worker or "").startswith("mine")
    assert opened.job(later).state == "pending"
    opened.advance(10_000)
    assert (opened.wait_for(later, "succeeded").worker or "").startswith("mine")
    worker.terminate()
    assert worker.wait() == 0
    assert f"on {opened.url}: queues default, 2 slots, lease 7200 s" in worker.log


def test_a_killed_process_leaves_its_job_to_the_lease(opened: Case) -> None:
    job = work.enqueue(Do("stall", str(opened.folder)))
    worker = opened.process(APP)
    opened.wait_for(job, "running")
    wait_for(lambda: (opened.folder / "attempt-1").exists())
    worker.kill()
    assert worker.wait() == -9
    with pytest.raises(
        ProcessTrouble, match=r"is running, not succeeded; no process of this case is running\n.*slots, lease"
    ):
        opened.wait_for(job)
    assert len(opened.drain()) == 0
    opened.advance(7200)
    assert opened.drain().succeeded == 1
    assert (opened.job(job).attempt, opened.job(job).lapses) == (2, 1)


def test_a_process_ends_with_its_case() -> None:
    with case(queue) as opened:
        worker = opened.process(APP)
        opened.wait_for(work.enqueue(Do()))
        # A state that it never passes through: "running" may be seen for a moment.
        with pytest.raises(ProcessTrouble, match="is dead, not succeeded; it has ended"):
            opened.wait_for(work.enqueue(Do("bury")))
        with pytest.raises(ProcessTrouble, match=r"is pending, not succeeded; waited 0\.05 s"):
            opened.wait_for(work.enqueue(Do(), delay=60), within=0.05)
        assert worker.running
    assert not worker.running
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


@pytest.mark.parametrize("app", ["shop", "shop.py:queue/x", "", ":queue", "sqlite:///x.db"])
def test_a_process_is_told_which_queue(opened: Case, app: str) -> None:
    with pytest.raises(InvalidArgument, match='"module:attribute"'):
        opened.process(app)


def test_a_process_that_cannot_start_says_why(opened: Case) -> None:
    job = work.enqueue(Do())
    opened.process("tests.testing_kit.app:Do")
    with pytest.raises(ProcessTrouble, match="is no DBQueue but a type"):
        opened.wait_for(job)
