"""Beats in the hand of a test: real ones, stepped by it, on a database whose clock it sets to any instant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from dbqueue import DBQueue, events
from dbqueue.clock import SECOND, Clock, to_datetime, to_instant
from dbqueue.database.engine import Database
from dbqueue.queue import open_database
from dbqueue.runtime.beat import Beat
from tests.factory import now

E = TypeVar("E", bound=events.Event)

MONDAY = "2026-03-02 10:00:00"


def instant(when: str) -> int:
    """UTC."""
    return to_instant(datetime.fromisoformat(when).replace(tzinfo=timezone.utc))


def shown(slot: int) -> str:
    return to_datetime(slot).strftime("%Y-%m-%d %H:%M:%S").removesuffix(":00")


class Lab:
    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.url, self.clock = url, clock or Clock()
        self.stack = ExitStack()
        self.queue = self.another_queue()
        self.queue.database.ready()
        self.told: list[events.Event] = []
        self.stack.callback(events.subscribe(self.told.append))
        self.at(MONDAY)

    def another_queue(self, url: str | None = None, **options: Any) -> DBQueue:
        """A queue of the same clock, with connections of its own."""
        queue = DBQueue(url or self.url, **options)
        unused, queue._database = queue.database, open_database(queue.settings, self.clock)
        unused.close()
        return self.stack.enter_context(closing(queue))

    @property
    def database(self) -> Database:
        return self.queue.database

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: str) -> None:
        """Sets the database's clock, which goes on from there."""
        self.clock.offset += instant(when) - now(self.database)

    def later(self, **time: float) -> None:
        self.clock.offset += round(timedelta(**time) / timedelta(microseconds=1))

    # -- beats ---------------------------------------------------------------------------------------------------------

    def beat(self, queue: DBQueue | None = None, *, poll: float = 60.0, sources: Any = ()) -> Beat:
        """A beat that runs when it is stepped."""
        database = (queue or self.queue).database
        beat = Beat(database, sources, name=f"beat{len(self.told)}", poll=poll)
        beat.start()
        self.stack.callback(beat.close)
        return beat

    def settle(self, *beats: Beat) -> None:
        """Steps until nothing is due."""
        for beat in beats:
            for _ in range(10_000):
                beat._look_back_at = 0.0
                if beat.step() > 0:
                    break
            else:
                raise AssertionError("a beat never rests")

    def run_until(self, when: str, *beats: Beat) -> None:
        """The clock goes from one planned look of a beat to the next, as time does for one that sleeps."""
        end = instant(when)
        while True:
            pause = min(beat.step() for beat in beats)
            here = now(self.database)
            if here >= end:
                self.settle(*beats)
                return
            self.clock.offset += min(round(pause * SECOND), end - here)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def slots(self, name: str) -> list[str]:
        """The slots of a schedule that have a job, once for each job, in order."""
        return [shown(slot) for slot in sorted(self.sequences(name))]

    def sequences(self, name: str) -> list[int]:
        names = self.database.dialect.names
        found: list[int] = []
        with self.database.session() as session:
            for table in ("jobs", "finished"):
                rows = session.execute(
                    self.database.dialect.portable(
                        f"SELECT sequence FROM {names.qualified(table)} WHERE source = :source AND sequence IS NOT NULL"
                    ),
                    {"source": name},
                )
                found += [row[0] for row in rows]
        return found

    def count(self, name: str) -> int:
        return len(self.sequences(name))

    def sql(self, statement: str, **params: object) -> list[Any]:
        """Plain SQL, with ``{schedules}`` and ``:name``, as an administrator writes it."""
        text = self.database.dialect.portable(statement)
        return self.database.run(lambda session: list(session.execute(text, params)))

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.told if isinstance(event, kind)]

    def kept(self, *names: str, spec: str = "* * * * *", **options: Any) -> None:
        for name in names:
            self.queue.schedule(name, spec, "raw", 1, **options)

    def close(self) -> None:
        self.stack.close()


MakeLab = Callable[..., Lab]
