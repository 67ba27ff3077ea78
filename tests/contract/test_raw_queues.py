"""Raw queues: jobs without a target, claimed by a program of its own (A8)."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from dbqueue import ClaimedJob, DBQueue, InvalidArgument, InvalidName, JobError, LostClaim, ReservedName

pytestmark = pytest.mark.req("A8")


@pytest.fixture
def queue(database_url: str) -> Iterator[DBQueue]:
    queue = DBQueue(database_url)
    yield queue
    queue.close()


def claimed(queue: DBQueue, name: str = "raw", worker: str = "w", lease: float = 60.0) -> ClaimedJob:
    job = queue.claim(name, worker, lease=lease)
    assert job is not None
    return job


def state(queue: DBQueue, job: ClaimedJob) -> str:
    record = queue.get_job(job.id)
    assert record is not None
    return record.state


def test_send_claim_ack(queue: DBQueue) -> None:
    ref = queue.send("raw", {"path": "a.png", "sizes": [1, 2.5, None]})
    assert queue.claim("other", "w") is None
    job = claimed(queue)
    assert (job.id, job.queue, job.attempt, job.max_attempts) == (ref.id, "raw", 1, 3)
    assert job.payload == {"path": "a.png", "sizes": [1, 2.5, None]}
    assert queue.claim("raw", "w2") is None
    assert state(queue, job) == "running"
    job.ack()
    assert state(queue, job) == "acked"
    job.ack()  # a repeat is told that it is done already
    with pytest.raises(LostClaim):
        job.retry("too late")


def test_retry_waits_five_seconds_and_ends_dead_with_the_last_attempt(queue: DBQueue) -> None:
    queue.send("raw", 1, max_attempts=2)
    job = claimed(queue)
    job.retry(ValueError("a secret"))
    assert queue.claim("raw", "w") is None
    queue.database.clock.advance(4.9)
    assert queue.claim("raw", "w") is None
    queue.database.clock.advance(0.2)
    again = claimed(queue)
    assert again.attempt == 2
    record = queue.get_job(job.id)
    assert record is not None
    assert (record.error_kind, record.error_summary) == ("failed", "ValueError")
    again.retry(JobError("told on purpose"), delay=0)
    record = queue.get_job(job.id)
    assert record is not None
    assert (record.state, record.error_summary) == ("dead", "JobError: told on purpose")


def test_a_lease_that_ended_is_taken_over_and_the_first_claim_changes_nothing(queue: DBQueue) -> None:
    queue.send("raw", 1)
    first = claimed(queue, lease=10)
    queue.database.clock.advance(9)
    first.heartbeat()
    queue.database.clock.advance(9)
    assert queue.claim("raw", "w2") is None, "it was renewed"
    queue.database.clock.advance(2)
    second = claimed(queue, worker="w2")
    assert (second.id, second.attempt) == (first.id, 2)
    for late in (first.ack, first.heartbeat, first.release, lambda: first.retry("x")):
        with pytest.raises(LostClaim):
            late()
    assert state(queue, second) == "running"
    second.ack()
    assert state(queue, second) == "acked"


def test_release_gives_the_attempt_back(queue: DBQueue) -> None:
    queue.send("raw", 1)
    claimed(queue).release()
    assert claimed(queue).attempt == 1


def test_keys_priorities_and_times(queue: DBQueue) -> None:
    low, high = queue.send("raw", 1, key="k"), queue.send("raw", 2, priority=9)
    assert queue.send("raw", 3, key="k").id == low.id
    assert not queue.send("other", 3, key="k").duplicate, "each raw queue has its own keys"
    later = queue.send("raw", 4, priority=9, delay=60)
    assert [claimed(queue, lease=600).id, claimed(queue, lease=600).id] == [high.id, low.id]
    assert queue.claim("raw", "w") is None
    queue.database.clock.advance(61)
    assert claimed(queue).id == later.id


def test_bad_input_is_refused_before_anything_is_written(queue: DBQueue) -> None:
    with pytest.raises(ReservedName):
        queue.send("dbqueue.own", 1)
    with pytest.raises(InvalidName):
        queue.claim("", "w")
    for lease in (0.05, 7201, True, "60"):
        with pytest.raises(InvalidArgument, match="lease"):
            queue.claim("raw", "w", lease=lease)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no JSON value"):
        queue.send("raw", object())
    with pytest.raises(InvalidArgument, match="delay"):
        queue.send("raw", 1, delay=-1)
    assert queue.counts() == {}
    assert queue.get_job(uuid4()) is None
