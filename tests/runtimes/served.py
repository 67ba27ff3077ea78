"""A program with an API and jobs, for the tests to send signals to: ``python -m tests.runtimes.served FOLDER MODE
SHUTDOWN_MS``.

It writes each phase as a line of FOLDER/phases. Its API is a listener on a port of its own: a connection that says
"slow" is answered when FOLDER/answer exists, with a job enqueued before. Its jobs wait for FOLDER/NAME, or for their
cancel flag, or for nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dbqueue
from dbqueue import DBQueue, Runtime, current_job, events
from dbqueue.settings import JobSettings, RuntimeSettings, Settings

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".").absolute()

queue = DBQueue(f"sqlite:///{FOLDER / 'jobs.db'}", lease=60, poll=0.05)


def note(phase: str) -> None:
    """One write to a file in append mode, so that the lines of all threads stand in the order of their writing."""
    with open(FOLDER / "phases", "ab", buffering=0) as file:
        file.write(f"{phase}\n".encode())


def wait_for_file(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.005)


@dataclass(frozen=True)
class Do:
    name: str
    deaf: bool = False
    """Does not look at its cancel flag."""


@queue.job(max_attempts=3, timeout=50, name="work")
def work(do: Do) -> None:
    job = current_job()
    assert job is not None
    note(f"{do.name} begins")
    while not (FOLDER / do.name).exists():
        if not do.deaf and job.wait(0.005):
            note(f"{do.name} is cancelled")
            return
        time.sleep(0.005)
    note(f"{do.name} ends")


class Server:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._requests: list[threading.Thread] = []
        self._closed = threading.Event()

    def serve(self) -> None:
        (FOLDER / "port.new").write_text(str(self._listener.getsockname()[1]))
        (FOLDER / "port.new").rename(FOLDER / "port")
        note("the API listens")
        self._listener.settimeout(0.01)
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            request = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            request.start()
            self._requests.append(request)
        self._listener.close()
        note("the listener is closed")
        for request in self._requests:
            request.join()
        note("the API has drained")

    def close(self) -> None:
        self._closed.set()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            if connection.recv(10) == b"crash":
                self._listener.close()  # and the accept of the serving thread raises
                return
            note("a request begins")
            wait_for_file("answer")
            work.enqueue(Do("last"))
            connection.sendall(b"done")


class Lines(logging.Handler):
    flushed = False

    def emit(self, record: logging.LogRecord) -> None:
        with open(FOLDER / "log", "a") as file:
            file.write(self.format(record) + "\n")
        if self.flushed:
            note("a line after the flush")

    def flush(self) -> None:
        self.flushed = True
        try:
            queue.counts()
        except dbqueue.Closed:
            note("the log is flushed, the database was closed before")


@contextmanager
def application() -> Iterator[None]:
    note("the application begins")
    yield
    note(f"the application ends, the database knows {sum(queue.counts().values())} jobs")


def phase_of(event: events.Event) -> None:
    if isinstance(event, events.WorkerStopping):
        note("claiming stops")
    elif isinstance(event, events.WorkerStopped):
        note("the jobs have ended")


def main(mode: str, shutdown_ms: str) -> int:
    logging.basicConfig(level=logging.INFO, handlers=[Lines()])
    events.subscribe(phase_of)
    settings = Settings(
        runtime=RuntimeSettings(mode=mode, shutdown_ms=int(shutdown_ms)),  # type: ignore[arg-type]
        jobs=JobSettings(),
    )
    code = Runtime(settings, application=application()).run(api=Server(), jobs=queue)
    note(f"exit {code}")
    os._exit(code)  # without a second flush of the log by Python's own end


if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
