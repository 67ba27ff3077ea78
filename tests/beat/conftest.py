"""What the tests of Celery's entries share: apps and beats of this process, whose database's clock a test moves, and real commands in
processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from dbqueue import DBQueue, events, ids, schedules
from dbqueue.celery_beat.scheduler import source_of
from dbqueue.clock import SECOND, to_instant
from dbqueue.queue import open_database
from dbqueue.runtime.beat import Beat
from tests.transport.conftest import broker_url as broker_url
from tests.transport.conftest import queue as queue
from tests.transport.shops import ROOT, Shop
from tests.waiting import wait_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TASK = "shop.note"


class Beats:
    """Versions of one app's code on one database, and its clock."""

    def __init__(self, queue: DBQueue, broker_url: str) -> None:
        self.queue, self.broker_url = queue, broker_url
        self.clock = queue.database.clock
        self.apps: list[Celery] = []
        self.beats: list[Beat] = []
        self.broken: list[events.ScheduleBroken] = []
        self._unsubscribe = events.subscribe(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.ScheduleBroken):
            self.broken.append(event)

    def app(
        self, entries: dict[str, Any] | None = None, name: str = "shop", broker: str | None = None, **conf: Any
    ) -> Celery:
        app = Celery(name, broker=broker or self.broker_url, set_as_current=False)
        app.conf.update(task_default_queue="q", beat_schedule=entries or {}, **conf)

        @app.task(name=TASK, shared=False)
        def note(*args: Any, **kwargs: Any) -> None: ...

        self.apps.append(app)
        return app

    def beat(self, app: Celery | dict[str, Any] | None = None, **conf: Any) -> Beat:
        """One that has started with this app's entries, or those of a new app."""
        app = app if isinstance(app, Celery) else self.app(app, **conf)
        database = open_database(self.queue.settings, self.clock)
        beat = Beat(database, [source_of(app)], name=f"beat{len(self.beats)}")
        self.beats.append(beat)
        beat.start()
        return beat

    @property
    def now(self) -> int:
        return self.queue.database.read(self.queue.database.dialect.now)

    def set_clock(self, text: str) -> None:
        """The database's clock shows this UTC time now."""
        self.clock.offset += to_instant(datetime.fromisoformat(text + "+00:00")) - self.now

    def to_the_minute(self) -> None:
        """The clock shows the first second of a minute, so that no minute begins by itself while a test looks."""
        self.clock.offset += 60 * SECOND - self.now % (60 * SECOND) + SECOND

    def pass_by(self, seconds: float, *beats: Beat) -> None:
        self.clock.advance(seconds)
        for beat in beats:
            idle(beat)

    def sent(self, task: str = TASK) -> list[str]:
        """Ids of the messages of a task, the oldest first."""
        found = self.queue.jobs(queue="q", limit=10_000)
        records = sorted((record for record in found if record.target.endswith(task)), key=lambda record: record.id)
        return [str(record.task_id) for record in records]

    def args(self) -> list[Any]:
        """The positional arguments of every message, in order of sending."""
        found = [self.queue.get_job(job.id, with_payload=True) for job in self.queue.jobs(limit=10_000)]
        return [
            json.loads(record.payload)[0]
            for record in sorted((r for r in found if r), key=lambda r: r.id)
            if record.payload is not None
        ]

    def entry(self, name: str, owner: str = "shop") -> schedules.Schedule:
        found = self.queue.get_schedule(name, owner)
        assert found is not None
        return found

    def close(self) -> None:
        self._unsubscribe()
        for beat in self.beats:
            beat._close()
            beat.database.close()
        for app in self.apps:
            app.close()


def idle(beat: Beat) -> None:
    """Steps until there is nothing more to do now."""
    for _ in range(200):
        if beat.step() > 0:
            return
    raise AssertionError("the beat does not come to rest")


def slot_id(name: str, slot: int, owner: str = "shop") -> str:
    return str(ids.as_uuid(schedules.slot_id(owner, name, slot)))


@pytest.fixture
def beats(queue: DBQueue, broker_url: str) -> Iterator[Beats]:
    beats = Beats(queue, broker_url)
    beats.to_the_minute()
    yield beats
    beats.close()


# -- real commands -----------------------------------------------------------------------------------------------------


class Program(Shop):
    """A Celery app in a folder whose beats are real commands. ``write`` puts another version of it there."""

    def write(self, entries: str, more: str = "") -> None:
        """``entries``: the source of ``beat_schedule``; ``more``: what the module has beside it."""
        file = self.folder / "shop.py"
        text = file.read_text().partition("# entries\n")[0]
        file.write_text(
            f"{text}# entries\nfrom celery.schedules import crontab\napp.conf.beat_schedule = {entries}\n{textwrap.dedent(more)}"
        )

    def celery_beat(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.celery("beat", "-S", "dbqueue", "-l", "INFO", *arguments)

    def dbqueue_beat(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.python("-m", "dbqueue", "beat", "-A", "shop", *arguments)

    def wait_for_line(self, process: subprocess.Popen[bytes], text: str) -> None:
        wait_for(lambda: text in self.log(process) or process.poll() is not None, 60, f"{text!r} was not logged")
        assert text in self.log(process), self.log(process)

    def stop(self, process: subprocess.Popen[bytes]) -> str:
        process.terminate()
        return self.ended(process, 20)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def program(broker_url: str, queue: DBQueue, tmp_path: Path) -> Iterator[Program]:
    folder = tmp_path / "program"
    folder.mkdir()
    with (ROOT / "pyproject.toml").open("rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]["celery.beat_schedulers"]
    # As an installed distribution has it, whatever was installed before this tree had the entry point.
    info = folder / "these_entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: these-entry-points\nVersion: 0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[celery.beat_schedulers]\n{lines}")
    program = Program(folder, broker_url, {})
    yield program
    program.close()


def check_slots(queue: DBQueue, name: str, seconds: int, owner: str = "shop") -> int:
    """Every slot of an interval up to the cursor has one message, and there is no other; returns how many."""
    entry = queue.get_schedule(name, owner)
    assert entry is not None
    step, first, last = seconds * SECOND, to_instant(entry.anchor), to_instant(entry.last_slot)
    wanted = [slot_id(name, slot, owner) for slot in range(first + step, last + 1, step)]
    found = [str(job.task_id) for job in queue.jobs(limit=10_000) if job.task_id in set(wanted)]
    assert sorted(found) == sorted(wanted)
    assert entry.fired == len(wanted)
    return len(wanted)
