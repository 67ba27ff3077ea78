"""A storm over processes of `dbqueue beat`: killed and started again, at any time and exactly on slots, while the database's clock
runs through days. Every slot of every schedule has one job.

Small in `make test`, great in `make soak`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from dbqueue import cron
from dbqueue.clock import SECOND, to_instant
from dbqueue.database.tables import ClaimRequest, Settlement, Turn
from dbqueue.ids import new_token
from dbqueue.states import State
from dbqueue.testing.shared_clock import SharedClock
from tests.factory import now
from tests.schedules.lab import Lab
from tests.storms.beat_app import STATIC, declare
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

SPECS = {
    "minutely": ("* * * * *", "UTC"),
    "quarters": ("*/15 6-22 * * 1-5", "America/New_York"),
    "nightly": ("30 2 * * *", "Europe/Berlin"),
    "weekly": ("0 6 * * 1", "UTC"),
    "every": ("@every 45m", "UTC"),
} | {name: (spec, "UTC") for name, spec in STATIC.items()}
MINUTE = 60 * SECOND


@dataclass(frozen=True)
class Size:
    beats: int
    kills: int
    days: float
    leap: int
    """Minutes that the clock goes on at most, from one look of the test to the next."""


SMALL, GREAT = Size(2, 6, 1, 180), Size(5, 250, 30, 240)


class Storm:
    def __init__(self, lab: Lab, clock: Path, folder: Path, beats: int) -> None:
        self.lab, self.clock, self.folder = lab, clock, folder
        self.chance, self.kills, self._started = random.Random(7), 0, 0
        self.log_of: dict[int, Path] = {}
        self.beats = [self._start() for _ in range(beats)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        environment = {"PYTHONPATH": str(ROOT), "BEAT_URL": self.lab.url, "BEAT_CLOCK": str(self.clock)}
        command = [
            sys.executable,
            "-m",
            "dbqueue",
            "beat",
            "-A",
            "tests.storms.beat_app:queue",
            "--max-interval",
            "0.1",
        ]
        path = self.folder / f"beat-{self._started}.log"
        with path.open("wb") as log:
            beat = subprocess.Popen(command, cwd=self.folder, env=os.environ | environment, stdout=log, stderr=log)
        self.log_of[beat.pid] = path
        return beat

    def kill(self) -> None:
        number = self.chance.randrange(len(self.beats))
        victim = self.beats[number]
        assert victim.poll() is None, self.logs()  # a beat ends when it is told to, and not before
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)
        self.kills += 1
        self.beats[number] = self._start()

    def kill_on_a_slot(self) -> None:
        """The clock is put right before a full minute, and the kill comes while it is being fired."""
        self.lab.clock.offset += MINUTE - now(self.lab.database) % MINUTE - self.chance.randrange(20_000)
        before = self.lab.count("minutely")
        wait_for(lambda: self.lab.count("minutely") > before or self.chance.random() < 0.1, 30, self.logs())
        self.kill()

    def work(self) -> None:
        """Ends all jobs that are there, as a quick worker does: that a slot's job has its id protects nothing then."""
        database, settlements = self.lab.database, list[Settlement]()
        with database.session() as session:
            while True:
                claim = ClaimRequest(("raw",), 500, "storm", new_token(), MINUTE)
                claimed = database.dialect.turn(session, Turn(settlements, claim=claim)).claimed
                settlements = [Settlement(row.id, row.token, State.ACKED, "raw") for row in claimed]
                if not claimed:
                    return

    def caught_up(self) -> bool:
        rows = self.lab.sql(
            "SELECT count(*) FROM {schedules} WHERE next_at IS NULL OR next_at <= {now}", offset=self.lab.clock.offset
        )
        return rows[0][0] == 0

    def catch_up(self) -> None:
        wait_for(self.caught_up, 60, self.logs())

    def logs(self) -> str:
        return "\n".join(path.read_text()[-500:] for path in self.folder.glob("beat-*.log"))

    def stop(self) -> None:
        """When all of them run: before it does, a signal ends a beat as it does any process."""
        for beat in self.beats:
            log = self.log_of[beat.pid]
            wait_for(lambda log=log: ": beat " in log.read_text(), 30, self.logs())  # type: ignore[misc]
        for beat in self.beats:
            beat.send_signal(signal.SIGTERM)
        codes = [beat.wait(20) for beat in self.beats]
        assert codes == [0] * len(codes), self.logs()

    def close(self) -> None:
        for beat in self.beats:
            if beat.poll() is None:
                beat.kill()
                beat.wait(10)


@pytest.fixture
def lab(database_url: str, tmp_path: Path) -> Iterator[Lab]:
    with closing(Lab(database_url, SharedClock(tmp_path / "clock"))) as lab:
        lab.at("2026-03-23 10:00:00")  # summer time begins in the week after
        yield lab


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(GREAT, id="great", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.req("D16", "A4")
def test_beats_that_are_killed_and_started_again(lab: Lab, tmp_path: Path, size: Size) -> None:
    for name, (spec, zone) in SPECS.items():
        if name not in STATIC:
            lab.queue.schedule(name, spec, "raw", 1, timezone=zone)
    declare(lab.queue)
    lab.queue.start_schedules()
    begun = {schedule.name: schedule for schedule in lab.queue.schedules()}
    with closing(Storm(lab, tmp_path / "clock", tmp_path, size.beats)) as storm:
        storm.catch_up()
        end = now(lab.database) + round(size.days * 86_400) * SECOND
        steps = max(1, round(2 * size.days * 1440 / size.leap))
        kills = [storm.chance.randrange(steps) for _ in range(size.kills)]
        step = 0
        while now(lab.database) < end:
            lab.clock.offset += storm.chance.randint(1, size.leap * 60) * SECOND
            for n in range(kills.count(step)):
                (storm.kill_on_a_slot if n % 2 else storm.kill)()
            if storm.chance.random() < 0.6:
                storm.catch_up()
            storm.work()
            step += 1
        while storm.kills < size.kills:
            storm.kill_on_a_slot()
        storm.catch_up()
        storm.stop()
        storm.work()
        assert lab.queue.counts().keys() == {"acked"}
    until = min(to_instant(lab.queue.get_schedule("minutely").last_slot), now(lab.database))  # type: ignore[union-attr]
    found = {name: sorted(lab.sequences(name)) for name in SPECS}
    for name, (spec, zone) in SPECS.items():
        first = begun[name]
        parsed = cron.parse(spec, zone).anchored(to_instant(first.anchor))
        last = lab.queue.get_schedule(name)
        assert last is not None
        assert found[name] == parsed.slots(to_instant(first.last_slot), to_instant(last.last_slot), 10**6), name
        following = parsed.next_after(to_instant(last.last_slot))
        assert following is not None
        assert following > until - MINUTE
    assert len(found["minutely"]) >= size.days * 1440
    print({name: len(slots) for name, slots in found.items()}, f"{storm.kills} beats killed")
