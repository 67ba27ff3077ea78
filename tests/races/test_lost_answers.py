"""A connection that ends around COMMIT: what was done is never done twice and never called lost (D12, D13).

A proxy cuts it at both moments that the client cannot tell apart: before the server saw the request, and after it committed but
before its answer arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
import pytest

from dbqueue import ConnectionLost, DBQueue, JobRef, LostClaim, Target
from dbqueue.database.dialect import OwnSession
from dbqueue.database.engine import Database
from dbqueue.database.tables import Fact, Held, Turn
from dbqueue.ids import as_uuid
from dbqueue.states import Kind, State
from tests.factory import LEASE, claim_turn, joined_to, make, new_job, rows
from tests.proxy import Proxy
from tests.waiting import wait_for

pytestmark = pytest.mark.databases("postgres")

COMMIT = b"COMMIT\0"
"""As it stands in a message; BEGIN says READ COMMITTED."""

both = pytest.mark.parametrize("loss", ["answer", "request"])
in_transaction = pytest.mark.parametrize(
    ("loss", "marker"), [("answer", COMMIT), ("request", COMMIT), ("request", b"unnest")]
)


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    proxy = Proxy(database_url)
    yield proxy
    proxy.close()


@pytest.fixture
def direct(database_url: str) -> Iterator[Database]:
    """The way around the proxy, to see what is there."""
    with closing(Database(database_url)) as database:
        database.ready()
        yield database


@pytest.fixture
def queue(proxy: Proxy, direct: Database) -> Iterator[DBQueue]:
    """A queue whose pool holds one connection through the proxy."""
    with closing(DBQueue(proxy.url)) as queue:
        queue.counts()
        yield queue


@pytest.fixture
def worker(queue: DBQueue) -> Iterator[OwnSession]:
    session = queue.database.open_session()
    assert not session.guarded  # asked once a connection: not in the turn whose answer is lost
    yield session
    session.close()


def lose(proxy: Proxy, loss: str, marker: bytes = b"") -> None:
    (proxy.lose_answer if loss == "answer" else proxy.lose_request)(marker)


def target_of(queue: DBQueue) -> Target[None]:
    @queue.job(max_attempts=3, timeout=30, name="tests.one")
    def one() -> None: ...

    return one


def lost_in_turn(queue: DBQueue, worker: OwnSession, turn: Turn) -> OwnSession:
    """A turn that ends with its connection; returns the next connection."""
    with pytest.raises(ConnectionLost), queue.database.errors():
        queue.database.dialect.turn(worker, turn)
    return queue.database.open_session()


# -- enqueue -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D3", "D8")
@both
@pytest.mark.parametrize("key", [None, "k"])
def test_enqueue(proxy: Proxy, queue: DBQueue, direct: Database, loss: str, key: str | None) -> None:
    target = target_of(queue)
    lose(proxy, loss)
    ref = target.enqueue(key=key)
    assert (proxy.armed, proxy.losses) == (False, 1)
    assert ref.duplicate is False
    assert list(rows(direct).jobs) == [ref.id.bytes]


@pytest.mark.req("D8")
@both
def test_enqueue_of_a_duplicate(proxy: Proxy, queue: DBQueue, direct: Database, loss: str) -> None:
    holder = make(direct, State.RUNNING, target="tests.one", key="k")
    lose(proxy, loss)
    ref = target_of(queue).enqueue(key="k")
    assert proxy.losses == 1
    assert (ref.id.bytes, ref.duplicate) == (holder.id, True)
    assert list(rows(direct).jobs) == [holder.id]


@pytest.mark.req("D8")
@in_transaction
def test_enqueue_many(proxy: Proxy, queue: DBQueue, direct: Database, loss: str, marker: bytes) -> None:
    holder = make(direct, State.PENDING, target="tests.one", key="held")
    lose(proxy, loss, marker)
    refs = target_of(queue).enqueue_many([None] * 4, keys=["a", None, "held", "a"])
    assert proxy.losses == 1
    assert [bool(ref.duplicate) for ref in refs] == [False, False, True, True]
    assert refs[3].id == refs[0].id
    assert refs[2].id.bytes == holder.id
    assert set(rows(direct).jobs) == {ref.id.bytes for ref in refs}
    assert len(rows(direct).jobs) == 3


@pytest.mark.req("D8")
@pytest.mark.parametrize("many", [False, True])
def test_enqueue_that_commits_after_its_connection_ended(
    proxy: Proxy, queue: DBQueue, direct: Database, many: bool
) -> None:
    """The server is still at it (here it waits for a key) when the client looks, finds nothing, and sends its job again."""
    target, answers = target_of(queue), list[JobRef]()

    def enqueue() -> None:
        answers.extend(target.enqueue_many([None, None], keys=["k", None]) if many else [target.enqueue(key="k")])

    def waiting() -> int:
        question = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return int(direct.read(lambda session: session.execute(question))[0][0])

    with psycopg.connect(direct.url.render_as_string(hide_password=False)) as other:
        direct.dialect.enqueue(joined_to(direct, other), new_job(key="k", target="tests.one"))
        thread = threading.Thread(target=enqueue)
        thread.start()
        wait_for(lambda: waiting() == 1)
        proxy.cut()
        wait_for(lambda: waiting() == 2)
        other.rollback()
        thread.join()
    assert [ref.duplicate for ref in answers] == [False] * (1 + many)
    assert set(rows(direct).jobs) == {ref.id.bytes for ref in answers}


# -- claim -------------------------------------------------------------------------------------------------------------


@pytest.mark.req("D11", "D12")
@both
def test_claim(proxy: Proxy, queue: DBQueue, direct: Database, worker: OwnSession, loss: str) -> None:
    """What the worker does not know of is handed back at once, and its attempts with it; what it holds stays its own."""
    make(direct)
    held = queue.database.dialect.turn(worker, claim_turn()).claimed[0]
    made = [make(direct) for _ in range(3)]
    others = make(direct, State.RUNNING, worker="somebody else")
    before = rows(direct)
    lose(proxy, loss)
    with closing(lost_in_turn(queue, worker, claim_turn(2))) as session:
        taken = [job.id for job in made if rows(direct).state(job.id) is State.RUNNING]
        assert len(taken) == (2 if loss == "answer" else 0)
        dialect = queue.database.dialect
        assert dialect.release_unknown(session, "w", [Held(held.id, held.token)]) == len(taken)
        after = rows(direct)
        assert {job.id: after.jobs[job.id]["attempt"] for job in made} == {job.id: 0 for job in made}
        assert [after.jobs[id_] for id_ in (held.id, others.id)] == [before.jobs[id_] for id_ in (held.id, others.id)]
        claimed = dialect.turn(session, claim_turn(4)).claimed
        assert sorted(row.id for row in claimed) == sorted(job.id for job in made)
        assert {row.attempt for row in claimed} == {1}


@pytest.mark.req("D12")
def test_a_raw_claim_whose_answer_was_lost_comes_back_with_its_lease(
    proxy: Proxy, queue: DBQueue, direct: Database
) -> None:
    queue.send("raw", 1)
    proxy.lose_answer()
    with pytest.raises(ConnectionLost):
        queue.claim("raw", "me")
    assert queue.claim("raw", "me") is None
    queue.database.clock.advance(61)
    claimed = queue.claim("raw", "me")
    assert claimed is not None
    assert claimed.attempt == 2


# -- settle ------------------------------------------------------------------------------------------------------------

OUTCOMES = [
    [(State.SUCCEEDED, None)],
    [(State.SUCCEEDED, None)] * 3,
    [
        (State.ACKED, None),
        (State.DEAD, Kind.FAILED),
        (State.BLOCKED, Kind.UNKNOWN_TARGET),
        (State.PENDING, Kind.FAILED),
    ],
]


@pytest.mark.req("D12", "D13")
@both
@pytest.mark.parametrize("outcomes", OUTCOMES)
@pytest.mark.parametrize("in_turn", [False, True])
def test_settle(
    proxy: Proxy, queue: DBQueue, direct: Database, worker: OwnSession, loss: str, outcomes: list[tuple[State, Kind]],
    in_turn: bool,
) -> None:  # fmt: skip
    jobs = [make(direct, State.RUNNING) for _ in outcomes]
    batch = [job.settlement(state, kind) for job, (state, kind) in zip(jobs, outcomes, strict=True)]
    lose(proxy, loss)
    with closing(lost_in_turn(queue, worker, Turn(batch))) as session:
        between = rows(direct)
        if in_turn:
            facts = queue.database.dialect.turn(session, Turn(batch)).settled
        else:
            facts = queue.database.run(lambda s: queue.database.dialect.settle(s, batch))
    if loss == "answer":
        assert facts == [Fact.ALREADY] * len(batch)
        assert rows(direct) == between
    else:
        assert facts == [Fact.AGAIN if state is State.PENDING else Fact.DONE for state, _ in outcomes]
    after = rows(direct)
    assert [after.state(job.id) for job in jobs] == [state for state, _ in outcomes]
    assert len(after.jobs) + len(after.finished) == len(jobs)


@pytest.mark.req("D13", "D14")
@both
def test_renew(proxy: Proxy, queue: DBQueue, direct: Database, worker: OwnSession, loss: str) -> None:
    job = make(direct, State.RUNNING)
    lose(proxy, loss)
    with closing(lost_in_turn(queue, worker, Turn(renewals=[job.held], lease=LEASE))) as session:
        assert queue.database.dialect.turn(session, Turn(renewals=[job.held], lease=LEASE)).renewed == [Fact.RENEWED]


@pytest.mark.req("D13")
@in_transaction
@pytest.mark.parametrize("verb", ["ack", "retry", "release"])
def test_a_raw_claim_is_told_what_became_of_it(
    proxy: Proxy, queue: DBQueue, direct: Database, loss: str, marker: bytes, verb: str
) -> None:
    queue.send("raw", 1)
    claimed = queue.claim("raw", "me")
    assert claimed is not None
    calls: dict[str, Callable[[], None]] = {
        "ack": claimed.ack,
        "retry": lambda: claimed.retry("later"),
        "release": claimed.release,
    }
    lose(proxy, loss, marker)
    calls[verb]()
    assert proxy.losses == 1
    assert rows(direct).state(claimed.id.bytes) is (State.ACKED if verb == "ack" else State.PENDING)
    with pytest.raises(LostClaim):
        claimed.heartbeat()


@pytest.mark.req("D13", "D14")
@both
def test_a_heartbeat_whose_answer_was_lost_is_asked_again(
    proxy: Proxy, queue: DBQueue, direct: Database, loss: str
) -> None:
    queue.send("raw", 1)
    claimed = queue.claim("raw", "me")
    assert claimed is not None
    lose(proxy, loss, COMMIT)
    with pytest.raises(ConnectionLost):
        claimed.heartbeat()
    claimed.heartbeat()
    claimed.ack()
    assert rows(direct).state(claimed.id.bytes) is State.ACKED


# -- by hand -----------------------------------------------------------------------------------------------------------


@both
def test_a_verb_by_hand_says_that_its_answer_was_lost(
    proxy: Proxy, queue: DBQueue, direct: Database, loss: str
) -> None:
    job = make(direct)
    lose(proxy, loss, COMMIT)
    with pytest.raises(ConnectionLost):
        queue.cancel(as_uuid(job.id))
    assert rows(direct).state(job.id) is (State.CANCELLED if loss == "answer" else State.PENDING)
    assert queue.counts() == {"cancelled" if loss == "answer" else "pending": 1}
