"""Storms over worker processes: kills, restarts of the server, writers that hold SQLite's lock, answers that are lost. Whatever
falls on them, every job ends once, and every recorded end belongs to the claim that owned the job (`Ledger.audit`).

Each storm is small in `make test` and great in `make soak`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.proxy import Proxy
from tests.runtimes.jobs import notes
from tests.servers import Server
from tests.storms.ledger import Sums
from tests.storms.storm import Storm

MakeStorm = Callable[..., Storm]


@dataclass(frozen=True)
class Size:
    jobs: int
    workers: int
    kills: int
    others: int
    """Blows of the other kind, in storms that have one."""
    hold: float
    """Seconds for which a writer holds SQLite's lock."""


SMALL, GREAT = Size(40, 3, 2, 2, 1.5), Size(2_000, 8, 60, 6, 3.0)
sizes = pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(GREAT, id="great", marks=[pytest.mark.soak, pytest.mark.timeout(600)]),
    ],
)


def say(storm: Storm, sums: Sums, **more: int) -> None:
    print(f"{sums.jobs} jobs, {storm.kills} workers killed ({storm.vain} in vain)", sums, more)


def mixed(storm: Storm, kills: int, others: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    blows: list[Callable[[], object]] = [*[storm.kill] * kills, *others]
    storm.chance.shuffle(blows)
    return blows


@sizes
@pytest.mark.req("D11", "D12", "D13", "D14")
def test_killed_workers(make_storm: MakeStorm, size: Size) -> None:
    storm = make_storm(workers=size.workers)
    storm.rage(size.jobs, [storm.kill] * size.kills)
    sums = storm.audit()
    say(storm, sums)
    assert storm.kills == size.kills
    assert size.kills <= sums.killed <= 2 * size.kills, "two slots each"
    assert sums.released == 0


@sizes
@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_restarts_of_the_server(make_storm: MakeStorm, postgres: Server, size: Size) -> None:
    """Every second time it stays away for longer than a lease lasts."""
    storm = make_storm(workers=size.workers)

    def restart(mode: str, away: float) -> None:
        postgres.stop(mode)
        threading.Event().wait(away)
        postgres.start()

    restarts = [partial(restart, *how) for how in [("immediate", 0.0), ("fast", 1.5)] * (size.others // 2)]
    storm.rage(size.jobs, mixed(storm, size.kills, restarts))
    sums = storm.audit()
    say(storm, sums, restarts=size.others)
    assert storm.kills == size.kills
    assert sums.starved > 0, "no lease ended while the server was away"


@sizes
@pytest.mark.parametrize("lease", [1, 5])
@pytest.mark.req("D12", "D13", "D18")
@pytest.mark.databases("sqlite")
def test_a_writer_that_holds_the_lock(make_storm: MakeStorm, database_url: str, size: Size, lease: int) -> None:
    """For longer than a short lease lasts: then jobs are done again, but none of them ends twice. A long lease outlasts it: then
    no job notices, unless its worker dies."""
    storm = make_storm(workers=size.workers, lease=lease)

    def hold_lock() -> None:
        other = sqlite3.connect(database_url.removeprefix("sqlite:///"), isolation_level=None, timeout=30)
        other.execute("BEGIN IMMEDIATE")
        threading.Event().wait(size.hold)
        other.execute("COMMIT")
        other.close()

    kills = size.kills if lease < size.hold else 0
    storm.rage(size.jobs, mixed(storm, kills, [hold_lock] * size.others))
    sums = storm.audit()
    say(storm, sums, locks=size.others)
    assert storm.kills == kills
    if lease < size.hold:
        assert sums.starved > 0, "some lease ended while nobody could renew it"
    else:
        assert (sums.killed, sums.starved, sums.released) == (0, 0, 0)
        assert sums.claims == len(notes(storm.folder, "start")) == sums.jobs + sums.failed


@sizes
@pytest.mark.req("D12", "D13")
@pytest.mark.databases("postgres")
def test_answers_that_are_lost(make_storm: MakeStorm, database_url: str, tmp_path: Path, size: Size) -> None:
    """Between COMMIT and its answer the connection is cut, again and again. What the lost answer was about is found in the ledger,
    by the port of the connection and the time."""
    proxy = Proxy(database_url)
    storm = make_storm(url=proxy.url, workers=size.workers, lease=3)
    try:
        proxy.lose_answers(1 / 12)
        storm.rage(size.jobs, [storm.kill] * size.kills)
        proxy.lose_answers(0)
        sums = storm.audit()
    finally:
        proxy.close()
    ledger, starts = storm.ledger(), notes(tmp_path, "start")
    begun = {(line.job, line.attempt) for line in starts}
    claims = ends = again = 0
    for lost in proxy.lost:
        about = ledger.written_by(lost.port, lost.sent, lost.done)
        claims += sum(move.became == 1 for move in about)
        for move in about:
            if move.became is not None and move.became > 3:
                ends += 1
                assert (str(move.id), move.attempt + 1) not in begun, "a committed end is not run again"
            elif (move.was, move.became, move.kind) == (1, 0, "failed"):
                again += 1  # that it counts once is in the audit: attempts add up
    say(storm, sums, losses=proxy.losses, lost_ends=ends, lost_retries=again, lost_claims=claims)
    assert proxy.losses >= size.jobs // 10
    assert ends >= size.jobs // 50
    assert claims >= 1
    assert sums.released >= 1, "a claim that came in a lost answer is handed back"
