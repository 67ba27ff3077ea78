"""What ``celery beat -S dbqueue`` holds: Celery's Scheduler with our beat in its ``tick``. It keeps no file."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

from celery import Celery, beat, signals
from celery.beat import ScheduleEntry

from dbqueue import ids
from dbqueue.celery_beat.broker import owner_of, queue_of
from dbqueue.celery_beat.source import AppSource
from dbqueue.errors import ConfigError
from dbqueue.queue import DBQueue
from dbqueue.runtime.beat import POLL, Beat
from dbqueue.runtime.log import log_events


class Scheduler(beat.Scheduler):
    """One beat of any number. With ``lazy`` it does nothing at all until it is asked."""

    max_interval = POLL
    """Seconds between two looks whether schedules changed, where neither the command nor ``beat_max_loop_interval`` says."""

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        self._beat: Beat | None = None
        self._queue: DBQueue | None = None
        self._rest = ExitStack()
        self._stepping = False
        self._failure: BaseException | None = None
        super().__init__(app, *args, **kwargs)

    # -- Celery's Service --------------------------------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Begins. Raises ConfigError, and what the database says after as many tries as ``broker_connection_max_retries``."""
        self._queue = queue_of(self.app)
        self._ensure_connected()
        self.connection.release()
        name = ids.worker_id(f"celery-beat@{socket.gethostname()}")
        self._beat = Beat(self._queue.database, [AppSource(self)], name=name, poll=float(self.max_interval))
        self._rest.enter_context(log_events())
        try:
            self._beat.start()
        except BaseException:
            self._rest.close()
            self._queue.close()
            self._beat = None
            raise

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Fires what is due; returns the seconds until it wants to be called again."""
        if self._beat is None:
            return float(self.max_interval)
        self._stepping = True
        try:
            return self._beat.step()
        finally:
            self._stepping = False

    def should_sync(self) -> bool:
        return False

    def sync(self) -> None:
        """Every cursor is where it was committed."""

    def close(self) -> None:
        """Celery calls it in its signal handler, and once more when it has left the loop: in the middle of a step only the latter
        counts. What that step had not committed is fired by the next beat."""
        if self._stepping or self._beat is None:
            return
        running, self._beat = self._beat, None
        running.close()
        self._rest.close()
        if self._queue is not None:
            self._queue.close()
        super().close()

    @property
    def info(self) -> str:
        try:
            return f"    . database -> {queue_of(self.app).database.label}\n    . owner -> {owner_of(self.app)}"
        except ConfigError:  # told when it starts
            return "    . database -> none"

    # -- for the source ----------------------------------------------------------------------------------------------

    def read_entries(self) -> dict[str, ScheduleEntry]:
        """The app's entries, and those that Celery adds by itself. Raises ConfigError naming the entry."""
        for name, entry in self.app.conf.beat_schedule.items():
            try:
                self.schedule[name] = self.Entry(**dict(entry, name=name, app=self.app))
            except Exception as error:
                raise ConfigError(
                    f"the entry {name!r} of beat_schedule is not usable: {type(error).__name__}: {error}"
                ) from error
        self.install_default_entries(self.schedule)
        return dict(self.schedule)

    def send(self, entry: ScheduleEntry, producer: Any) -> None:
        """As Celery's own scheduler sends it, so that whoever has wrapped ``apply_entry`` sees it. Raises what Celery only logs."""
        self._failure = None
        self.apply_entry(entry, producer=producer)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def apply_async(self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        try:
            return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        except Exception as error:
            self._failure = (
                error.__context__ if isinstance(error, beat.SchedulingError) and error.__context__ else error
            )
            return None


def source_of(app: Celery) -> AppSource:
    """For ``dbqueue beat``: the app is loaded and finished as Celery's command does, and hears ``beat_init``."""
    app.loader.init_worker()
    app.finalize()
    app.set_current()
    return AppSource(Scheduler(app, lazy=True), signals.beat_init.send)
