"""One program with two roots: an API and the jobs behind it, started together and ended in one order (D17, D19).

    sys.exit(Runtime(application=resources()).run(api=Server(), jobs=queue))

The *mode* of the settings says which roots this process serves: ``api``, ``worker`` or ``all``; the other root is left
alone. Everything that can be refused is refused before the *application* (a context manager: what both roots stand on)
is entered.

Threads. Python runs signal handlers on the main thread, so nothing that blocks for long in C may live there. With jobs
it runs the worker's loop, whose wait a signal ends; without jobs it conducts. The API serves on a thread of its own.
The *conductor* waits until the program is to end and then goes through the order of D19; with jobs it is a thread too,
so that the loop goes on renewing leases while the API drains. A signal handler only notes the signal and rings.

What can fail, and what then happens: an API or a worker that ends by an exception is logged with its traceback, the
other root is stopped in the same order, and the exit code is 1. The second signal cuts every wait short. A root that
ignores that is left on its daemon thread, which ends with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from dbqueue import settings as config
from dbqueue.database.engine import Database, parse_url
from dbqueue.errors import ConfigError, ConnectionLost, DatabaseBusy, InvalidArgument
from dbqueue.queue import DBQueue
from dbqueue.runtime.log import log_events
from dbqueue.runtime.shutdown import stop_on_signals
from dbqueue.runtime.wake import Wake
from dbqueue.runtime.worker import EXIT_CLEAN, Worker, WorkerOptions

log = logging.getLogger("dbqueue.runtime")

EXIT_CRASHED = 1
NEVER = float("inf")


class Api(Protocol):
    """An API root. Both methods are called once at most, on different threads."""

    def serve(self) -> None:
        """Listens, and returns when it was closed and has answered what it had accepted."""

    def close(self) -> None:
        """Closes the listener and drains. It may be called as soon as ``serve`` was."""


class Runtime:
    """Runs an API and jobs from one entry point, as the settings' mode says.

    ``settings``: None reads dbqueue.toml and the environment, once, when ``run`` is called. ``application``: a context
    manager, entered before a root starts and left after both have ended."""

    def __init__(
        self, settings: config.Settings | None = None, *, application: AbstractContextManager[Any] | None = None
    ) -> None:
        self._given, self._application = settings, application or nullcontext()
        self._wake: Wake | None = None
        self._stops: list[str] = []
        """The reasons of ``stop``, one for each call: the first asks, the second hurries."""
        self._exit_code = EXIT_CLEAN
        self._shutdown = 0.0
        self._api: Api | None = None
        self._worker: Worker | None = None
        self._api_running = self._worker_running = False
        self._close_running = self._close_failed = False
        self._root_ended = False

    def run(self, *, api: Api | None = None, jobs: DBQueue | None = None) -> int:
        """Serves until SIGTERM or SIGINT (on the main thread), ``stop``, or the end of a root; then ends as D19 says
        and closes the queue.

        Returns the exit code: 0; 1 when a root or the application crashed, which is logged; 75 when too many jobs
        ignore their timeout. In a mode whose root was not given nothing runs, and the code is 0. Raises ConfigError
        (settings, lease rule, driver) and, where jobs are to run, ConnectionLost and DatabaseBusy, all before anything
        has started. A Runtime runs once."""
        if api is None and jobs is None:
            raise InvalidArgument("Runtime.run() runs nothing: give it api=..., jobs=... or both")
        if self._wake is not None:
            raise InvalidArgument("a Runtime runs once; make another one")
        self._wake = Wake()
        try:
            if not self._plan(api, jobs):
                log.warning("nothing to run: this program has no root for the mode of its settings")
                return EXIT_CLEAN
            with log_events(), stop_on_signals(self.stop), _closed_last(jobs):
                self._run_application()
        finally:
            self._wake.close()
            if self._worker is not None:
                self._worker.wake.close()  # it may never have run
        return self._exit_code

    def stop(self, reason: str = "asked to stop") -> None:
        """From any thread or a signal handler: ends the program in the order of D19. The second call hurries: what runs
        is cancelled."""
        self._stops.append(reason)
        self._ring()

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake.ring()

    # -- before anything starts --------------------------------------------------------------------------------------

    def _plan(self, api: Api | None, jobs: DBQueue | None) -> bool:
        """Whether there is anything to run. What must be refused is refused here."""
        settings = config.load(with_jobs=jobs is not None) if self._given is None else self._given
        mode = settings.runtime.mode
        if mode is None and jobs is not None:
            raise ConfigError('the runtime mode is not stated: RuntimeSettings(mode="api"), "worker" or "all"')
        self._shutdown = settings.runtime.shutdown_ms / config.SECOND
        self._api = None if mode == "worker" else api
        if jobs is not None:
            _check_agreement(jobs, settings.jobs)
            if mode != "api":  # D18, lease and pool: its constructor refuses the one and provides the other
                self._worker = Worker(jobs, WorkerOptions(shutdown=self._shutdown))
            if self._api is not None or self._worker is not None:
                self._check_database(jobs.database)
        return self._api is not None or self._worker is not None

    def _check_database(self, database: Database) -> None:
        """The driver is there, and the database can do what it must. An API that only enqueues may start before its
        database."""
        try:
            database.open_session().close()
        except (ConnectionLost, DatabaseBusy) as error:
            if self._worker is not None:
                raise
            log.warning("the jobs' database cannot be reached (%s); the API starts without it", type(error).__name__)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run_application(self) -> None:
        try:
            with self._application, self._crash_of("the program"):
                self._run_roots()
                # 6. The application root ends: this block does, when both roots have.
        except BaseException as error:
            self._crashed("the application", error)

    def _run_roots(self) -> None:
        if self._worker is not None:
            self._worker.database.ready()  # its schema, before the API listens
        if self._stops:
            return
        if self._api is not None:
            self._api_running = True
            threading.Thread(target=self._serve_api, args=(self._api,), name="dbqueue-api", daemon=True).start()
        if self._worker is None:
            self._conduct()
        else:
            self._run_worker(self._worker)

    def _serve_api(self, api: Api) -> None:
        with self._crash_of("the API"):
            api.serve()
        self._api_running = False
        self._root_ended = True
        self._ring()

    def _run_worker(self, worker: Worker) -> None:
        conducted = threading.Event()

        def conduct() -> None:
            with self._crash_of("the shutdown"):
                self._conduct()
            worker.stop()  # changes nothing, unless that crashed
            conducted.set()

        self._worker_running = True
        threading.Thread(target=conduct, name="dbqueue-conductor", daemon=True).start()
        with self._crash_of("the worker"):
            self._exit_code = worker.run() or self._exit_code
        self._worker_running = False
        self._root_ended = True
        self._ring()
        conducted.wait()

    @contextmanager
    def _crash_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # SystemExit too: a server's way to say that its port is taken
            self._crashed(what, error)

    def _crashed(self, what: str, error: BaseException) -> None:
        log.error("%s crashed", what, exc_info=error)
        self._exit_code = self._exit_code or EXIT_CRASHED

    # -- ending ------------------------------------------------------------------------------------------------------

    def _conduct(self) -> None:
        """Waits until the program is to end, and takes it down. Steps 6 to 8 are the main thread's, when this is
        done."""
        self._wait(lambda: bool(self._stops) or self._root_ended)
        until = time.monotonic() + self._shutdown
        reason = self._stops[0] if self._stops else "a root ended"
        log.info("the program ends (%s)", reason)
        # 1. The API closes its listener and drains. Jobs that its last requests enqueue are still claimed.
        if self._api is not None and self._api_running:
            self._close_running = True
            threading.Thread(target=self._close_api, args=(self._api,), name="dbqueue-api-close", daemon=True).start()
            self._wait(lambda: self._close_failed or not (self._api_running or self._close_running), until)
            if self._api_running:
                log.warning("the API has not ended in time and is left behind")
        if self._worker is not None:
            self._end_jobs(self._worker, reason, until)

    def _close_api(self, api: Api) -> None:
        try:
            api.close()
        except BaseException as error:
            self._crashed("closing the API", error)
            self._close_failed = True
        self._close_running = False
        self._ring()

    def _end_jobs(self, worker: Worker, reason: str, until: float) -> None:
        # 2. Scheduling and claiming stop.
        # 3. Active handlers are waited for, as long as shutdown_ms lasts.
        worker.options = replace(worker.options, shutdown=max(0.0, until - time.monotonic()))
        worker.stop(reason)
        self._wait(lambda: not self._worker_running)
        # 4. What is left at shutdown_ms is cancelled; at once when somebody hurries.
        # 5. What is not confirmed by then is handed back, or keeps its lease where the database cannot be told.
        if self._worker_running:
            worker.stop(reason)
            self._wait(lambda: not self._worker_running, patient=True)

    def _wait(self, condition: Callable[[], bool], until: float = NEVER, *, patient: bool = False) -> None:
        """Until the condition is true or the time is over, or, unless ``patient``, somebody hurries."""
        assert self._wake is not None
        while not condition() and (patient or len(self._stops) < 2):
            left = until - time.monotonic()
            if left <= 0:
                return
            self._wake.wait(left, None)


@contextmanager
def _closed_last(jobs: DBQueue | None) -> Iterator[None]:
    try:
        yield
    finally:
        # 7. The database closes.
        if jobs is not None:
            jobs.close()
        # 8. The log is flushed last.
        for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
            for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
                handler.flush()


def _check_agreement(jobs: DBQueue, stated: config.JobSettings) -> None:
    """What the settings state is what the queue uses, or the queue's own code says otherwise; but about the database
    there cannot be two opinions. A setting at its default counts as not stated."""
    jobs.adopt(stated)
    used = jobs.settings
    for name, rule in config.TABLES["jobs"].items():
        wanted, actual, option = getattr(stated, name), getattr(used, name), name.removesuffix("_ms")
        if wanted in (rule.default, actual) or (option in jobs.options and not rule.secret):
            continue
        if not rule.secret:
            raise ConfigError(
                f"the settings say {name} = {config.describe(wanted)}, but the queue uses {config.describe(actual)}: "
                "DBQueue was made with a URL of its own, or used before Runtime.run(). "
                f"Say it in one place: DBQueue({option}=...) or the settings."
            )
        if actual is None or parse_url(wanted) != parse_url(actual):
            raise ConfigError(
                f"{name} in the settings is not the one that the queue uses: DBQueue was made with another, or used "
                "before Runtime.run(). Say it in one place: DBQueue() without a URL takes the settings'."
            )
