"""What happened to every job, written down by the database itself: triggers on the queue's tables note each move of a row in the
transaction that made it. The queue knows nothing of them, so it cannot spoil its own evidence.

`Ledger.audit` goes through a storm job by job, and holds the moves against what the handlers wrote into their file and against the
claims that the test saw die with their workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

from dbqueue.database.engine import Database
from tests.runtimes.jobs import Line

_COLUMNS = (
    "job", "was", "became", "old_token", "new_token", "old_lease", "attempt", "lapses", "kind", "worker", "at"
)  # fmt: skip
_MOVED = {  # by trigger: what each column gets
    "moved": ("NEW.id", "OLD.state", "NEW.state", "OLD.token", "NEW.token", "OLD.lease_until", "NEW.attempt", "NEW.lapses",
              "NEW.error_kind", "NEW.worker", "NEW.updated_at"),
    "removed": ("OLD.id", "OLD.state", "NULL", "OLD.token", "NULL", "OLD.lease_until", "OLD.attempt", "OLD.lapses",
                "OLD.error_kind", "OLD.worker", "NULL"),
    "finished": ("NEW.id", "NULL", "NEW.state", "NULL", "NEW.token", "NULL", "NEW.attempt", "NEW.lapses", "NEW.error_kind",
                 "NEW.worker", "NEW.finished_at"),
}  # fmt: skip
_POSTGRES = """
CREATE TABLE ledger (n bigint GENERATED ALWAYS AS IDENTITY, job uuid, was int, became int, old_token uuid, new_token uuid,
  old_lease bigint, attempt int, lapses int, kind text, worker text, at bigint, port int DEFAULT inet_client_port(),
  written bigint DEFAULT extract(epoch FROM clock_timestamp()) * 1000000);
"""
_SQLITE = """
CREATE TABLE ledger (n INTEGER PRIMARY KEY, job BLOB, was INTEGER, became INTEGER, old_token BLOB, new_token BLOB,
  old_lease INTEGER, attempt INTEGER, lapses INTEGER, kind TEXT, worker TEXT, at INTEGER, port INTEGER, written INTEGER);
"""
_EVENTS = {
    "moved": "AFTER UPDATE ON dbqueue_jobs FOR EACH ROW WHEN (OLD.state <> NEW.state OR OLD.token <> NEW.token)",
    "removed": "AFTER DELETE ON dbqueue_jobs FOR EACH ROW",
    "finished": "AFTER INSERT ON dbqueue_finished FOR EACH ROW",
}


def keep_ledger(database: Database) -> None:
    """Sets up the triggers, before the first job is written."""
    postgres = database.dialect.name == "postgresql"
    with database.session() as session:
        session.execute(_POSTGRES if postgres else _SQLITE)
        for name, event in _EVENTS.items():
            insert = f"INSERT INTO ledger ({', '.join(_COLUMNS)}) VALUES ({', '.join(_MOVED[name])});"
            if postgres:
                body = f"BEGIN {insert} RETURN NULL; END"
                session.execute(f"CREATE FUNCTION note_{name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$")
                session.execute(f"CREATE TRIGGER note_{name} {event} EXECUTE FUNCTION note_{name}()")
            else:
                session.execute(f"CREATE TRIGGER note_{name} {event} BEGIN {insert} END")


@dataclass(frozen=True)
class Move:
    job: bytes
    was: int | None
    became: int | None
    old_token: bytes | None
    new_token: bytes | None
    old_lease: int | None
    attempt: int
    lapses: int
    kind: str | None
    worker: str | None
    at: int | None
    port: int | None
    written: int | None

    @property
    def id(self) -> UUID:
        return UUID(bytes=self.job)

    @property
    def pid(self) -> int:
        """Of the worker that made the claim."""
        return int(str(self.worker).split(":")[-3])


@dataclass
class Story:
    """One job's: claims that ended in which way, by token."""

    claims: dict[bytes, Move] = field(default_factory=dict)
    failed: dict[bytes, str | None] = field(default_factory=dict)
    """With the kind of the error."""
    expired: list[bytes] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)
    done: Move | None = None

    @property
    def recorded(self) -> list[bytes]:
        """Claims whose end the queue took from their executor."""
        return [*self.failed, *([self.done.new_token] if self.done and self.done.new_token else [])]


@dataclass(frozen=True)
class Sums:
    jobs: int
    claims: int
    failed: int
    killed: int
    starved: int
    """Claims that a living worker could not renew in time."""
    released: int


class Ledger:
    def __init__(self, database: Database) -> None:
        with database.session() as session:
            rows = session.execute(f"SELECT {', '.join(_COLUMNS)}, port, written FROM ledger ORDER BY n")
        self.moves = [Move(*row) for row in rows]
        self._of: dict[bytes, list[Move]] = defaultdict(list)
        for move in self.moves:
            self._of[move.job].append(move)

    def written_by(self, port: int, since: int, until: int) -> list[Move]:
        """The moves of the transactions that came from this port, between two instants of the server's wall clock."""
        return [m for m in self.moves if m.port == port and m.written is not None and since <= m.written <= until]

    def audit(self, jobs: Iterable[UUID], notes: Iterable[Line], killed: Iterable[tuple[bytes, bytes]]) -> Sums:
        """Every job ended once, as succeeded; every recorded end belonged to the claim that held the job, within its lease by the
        database's clock; and the counts in the row are the sum of what happened. ``killed``: claims (job and token) of workers
        that were killed, as read after their end."""
        lines: dict[str, list[Line]] = defaultdict(list)
        for line in notes:
            lines[line.job].append(line)
        lost: dict[bytes, set[bytes]] = defaultdict(set)
        for job_id, token in killed:
            lost[job_id].add(token)
        stories = []
        asked = [job.bytes for job in jobs]
        assert self._of.keys() == set(asked), "none is lost, and none was never asked for"
        for job_id in asked:
            moves, written = self._of[job_id], lines[str(UUID(bytes=job_id))]
            try:
                story = _follow(moves)
                _compare(story, written, lost[job_id])
            except AssertionError as error:
                told = "\n".join(map(str, [error, *moves, *written]))
                raise AssertionError(told) from error
            stories.append(story)
        dead = sum(map(len, lost.values()))
        return Sums(
            len(stories), sum(len(s.claims) for s in stories), sum(len(s.failed) for s in stories), dead,
            sum(len(s.expired) for s in stories) - dead, sum(len(s.released) for s in stories),
        )  # fmt: skip


def _follow(moves: list[Move]) -> Story:
    """The moves of one job, one by one: each must follow from those before."""
    story, held, attempt, lapses = Story(), None, 0, 0
    for move in _without_removals(moves):
        assert story.done is None, f"it has ended, and then {move}"
        if (move.was, move.became) == (0, 1):
            attempt += 1
            assert held is None
            assert move.new_token is not None
            assert move.new_token not in story.claims, "a token is used once"
            held, story.claims[move.new_token] = move.new_token, move
        else:
            assert move.was == 1
            assert held is not None
            assert move.old_token == held, "only the claim that holds the job ends"
            assert move.at is not None
            assert move.old_lease is not None
            if move.lapses > lapses:
                lapses += 1
                assert move.at >= move.old_lease, "taken back while its lease was alive"
                assert (move.became, move.kind) == (0, "crashed")
                story.expired.append(held)
            elif move.attempt < attempt:
                attempt -= 1
                assert move.became == 0
                story.released.append(held)
            else:
                assert move.at < move.old_lease, "an end was written after the lease"
                assert move.new_token == held, "a recorded end keeps the token of the claim that owned the job"
                if move.became == 0:
                    story.failed[held] = move.kind
                else:
                    assert (move.became, move.kind) == (4, None)
                    story.done = move
            held = None
        assert (move.attempt, move.lapses) == (attempt, lapses)
    assert story.done is not None, "every job ends"
    return story


def _without_removals(moves: list[Move]) -> list[Move]:
    """The end of a job is two rows, one of each table: put together they are one move."""
    removed = [move for move in moves if move.became is None]
    ended = [move for move in moves if move.was is None]
    assert len(removed) == len(ended) == 1, "one recorded end"
    (gone,), (end,) = removed, ended
    assert {moves.index(gone), moves.index(end)} == {len(moves) - 2, len(moves) - 1}, "and nothing after it"
    whole = Move(
        end.job, gone.was, end.became, gone.old_token, end.new_token, gone.old_lease, end.attempt, end.lapses, end.kind,
        end.worker, end.at, end.port, end.written,
    )  # fmt: skip
    return [*moves[:-2], whole]


def _compare(story: Story, lines: list[Line], killed: set[bytes]) -> None:
    """With what the handlers wrote, and with the claims that died."""
    assert killed <= set(story.expired), "what dies with its worker comes back by its lease, and not otherwise"
    assert len(story.claims) == len(story.failed) + len(story.expired) + len(story.released) + 1
    assert story.done is not None
    starved = len(story.expired) - len(killed)
    assert story.done.attempt == len(killed) + starved + len(story.failed) + 1
    assert story.done.lapses == len(killed) + starved

    # What is handed back with its attempt had not begun: its handler's lines would belong to no claim here.
    claimed = {(c.attempt, c.pid): token for token, c in story.claims.items() if token not in story.released}
    starts = Counter((line.attempt, line.pid) for line in lines if line.what == "start")
    assert starts.keys() <= claimed.keys(), "nothing runs without a claim"
    assert all(n == 1 for n in starts.values()), "no claim runs twice"
    runs = []
    for (attempt, pid), token in claimed.items():
        mine = {line.what: line.at for line in lines if (line.attempt, line.pid) == (attempt, pid)}
        if token not in story.recorded or story.failed.get(token) == "timeout":
            continue  # a thread whose timeout has passed cannot be stopped: it may go on beside the next run
        ends = {"end", "fail"} & mine.keys()
        assert ends == {"end" if token == story.done.new_token else "fail"}, "what is recorded is what the handler did"
        runs.append((mine["start"], max(mine.values())))
    runs.sort()
    for (_, end), (start, _) in pairwise(runs):
        assert end <= start, "two runs at the same time, and both ends recorded"
