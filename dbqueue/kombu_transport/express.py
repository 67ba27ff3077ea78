"""The event loop's own way to the database: settling and claiming on the loop's thread, without ever waiting there.

A thread that settles and claims for a busy loop has to win the interpreter from it again and again. So while the loop turns, it
sends each turn itself, before it sleeps, and takes the answer when the socket is readable; meanwhile acks pile up for the next one.
The station's thread keeps all the rest, and these two as well whenever the loop has not turned for a moment: it is idle, or runs a
solo worker's task. Whoever holds ``Station.at_work`` may use the session; one who finds a turn in the air lands it first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbqueue.database.postgres import Postgres, TurnInFlight
from dbqueue.database.tables import TurnResult

if TYPE_CHECKING:
    from dbqueue.kombu_transport.station import Request, Station

GUARD = 0.02
"""Seconds after the loop's last turn for which settling and claiming are left to it."""


@dataclass(frozen=True)
class Flying:
    request: Request
    sent: TurnInFlight


class Express:
    def __init__(
        self, station: Station, dialect: Postgres, loop: Any, ring: Callable[[], None], on_readable: Callable[[], None]
    ) -> None:
        """``ring`` makes the loop turn, from any thread; ``on_readable`` calls ``take`` and delivers."""
        self._station, self._dialect, self._loop = station, dialect, loop
        self.ring, self._on_readable = ring, on_readable
        self._thread = 0
        self._ticked_at = 0.0
        self._flying: Flying | None = None
        self._watched: int | None = None
        self._missed = False
        self._error: Exception | None = None

    # -- the station's side ------------------------------------------------------------------------------------------

    def drives(self, now: float) -> bool:
        return now - self._ticked_at < GUARD

    @property
    def failed(self) -> bool:
        """There is an error that the station's thread has not heard of."""
        return self._error is not None

    @property
    def here(self) -> bool:
        return threading.get_ident() == self._thread

    def land(self) -> None:
        """With ``at_work`` held, before the session is used for something else. Raises what a turn on the loop's thread raised."""
        if self._flying is not None:
            self._land()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def let_go(self) -> None:
        """Just after ``at_work`` was released: the loop may have wanted it meanwhile."""
        if self._missed:
            self._missed = False
            self.ring()

    def expect(self) -> None:
        """There is something to claim: left to the loop, which turns at once unless it is blocked."""
        self._ticked_at = time.monotonic()
        self.ring()

    # -- the loop's side ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """The loop is about to sleep: sends what is due."""
        self._thread = threading.get_ident()
        self._ticked_at = time.monotonic()
        if self._flying is None:
            self._unwatch()
            if self._station.has_request():
                self._launch()

    def _launch(self) -> None:
        station = self._station
        if not station.at_work.acquire(blocking=False):
            self._missed = True
            return
        try:
            session = station.session
            if self._flying is None and self._error is None and session is not None:
                request = station.next_request(time.monotonic())
                if request is not None:
                    looks = station.looks() if request.turn.claim is not None else ()
                    with station.database.errors():
                        self._flying = Flying(request, self._dialect.launch(session, request.turn, looks))
                    self._watch(session.connection.fileno())
        except Exception as error:
            self._fail(error)
        finally:
            station.at_work.release()

    def take(self) -> None:
        """The answer, or a part of it, is there. Once it is whole, the next turn is sent before anything is delivered."""
        self._ticked_at = time.monotonic()
        station = self._station
        if not station.at_work.acquire(blocking=False):
            return  # the station's thread lands it
        try:
            if self._flying is not None:
                with station.database.errors():
                    if not self._flying.sent.has_landed():
                        return
                self._land()
        except Exception as error:
            self._fail(error)
        finally:
            station.at_work.release()
        if station.has_request():
            self._launch()
        if self._flying is None:
            self._unwatch()

    def _land(self) -> None:
        flying, self._flying = self._flying, None
        assert flying is not None
        with self._station.database.errors():
            result: TurnResult = self._dialect.land(flying.sent)
        self._station.answered(flying.request, result)
        if result.claimed and self.here:
            self._station.hand_over(result)

    def _fail(self, error: Exception) -> None:
        """Told to the station's thread, which knows what to do about it."""
        self._flying, self._error = None, error
        self._unwatch()
        self._station.ring()

    def stand_back(self) -> None:
        """The loop's thread waits for the station's: it does not turn meanwhile."""
        self._ticked_at = 0.0

    def leave_loop(self) -> None:
        """A turn in the air is left to the station's thread."""
        self.stand_back()
        self._unwatch()

    def _watch(self, number: int) -> None:
        if self._watched != number:
            self._unwatch()
            self._watched = number
            self._loop.add_reader(number, self._on_readable)

    def _unwatch(self) -> None:
        number, self._watched = self._watched, None
        # Not without a look: the session may have been closed meanwhile, and the number be another file's.
        if number is not None and self._loop.readers.get(number, (None,))[0] == self._on_readable:
            with contextlib.suppress(Exception):
                self._loop.remove_reader(number)
