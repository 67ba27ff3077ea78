"""What the stored jobs tell: leases that nobody takes back, queues that nobody works on, jobs that wait for a decision,
and jobs that the code of today could not run. Alike on every database.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, literal, select

from dbqueue import clock, settings
from dbqueue.database.dialect import Row
from dbqueue.doctor.check import Check, Finding, Patient, Problem, Status, counted, listed, verdict
from dbqueue.errors import ConfigError
from dbqueue.states import State

SKEW = 1.0
"""Seconds between the two clocks from which on people are misled: log lines and rows do not match any more."""
MOST_COUNTED = 10_000
"""Dead jobs beyond this are not counted: the history may hold millions."""


def _run(patient: Patient, statement: Any) -> Sequence[Row]:
    text, params = patient.database.dialect.compile(statement)
    return patient.session.execute(text, params)


def python(found: tuple[int, ...]) -> Finding:
    version = ".".join(map(str, found))
    if found < (3, 10):
        return Finding("python", Status.FAILURE, f"this is Python {version}", "dbqueue needs Python 3.10 or newer")
    return Finding("python", Status.OK, f"Python {version}")


def clocks(patient: Patient) -> Finding:
    """The answer's age is half of the round trip, give or take that half."""
    dialect, session = patient.database.dialect, patient.session
    before = time.time()
    there = (dialect.now(session) - patient.database.clock.offset) / clock.SECOND
    after = time.time()
    skew = there - (before + after) / 2
    if abs(skew) <= SKEW + (after - before) / 2:
        return Finding("clock", Status.OK, f"the database's clock and this machine's differ by {abs(skew):.3f} s")
    way = "ahead of" if skew > 0 else "behind"
    return Finding(
        "clock", Status.WARNING,
        f"the database's clock is {abs(skew):.1f} s {way} this machine's; dbqueue goes by the database's alone and "
        "does not mind, but logs and rows tell different times, and a run_at computed here is off by that much",
        "synchronise both machines (NTP); until then give delay= instead of run_at=",
    )  # fmt: skip


def leases(patient: Patient) -> Finding:
    """Every worker takes back lost jobs, of whatever queue: a lease that ended long ago means that there is none."""
    jobs, _ = patient.database.dialect.names.tables
    before = patient.now - round(patient.patience * clock.SECOND)
    ended = select(func.count(), func.min(jobs.c.lease_until)).where(
        jobs.c.state == int(State.RUNNING), jobs.c.lease_until < before
    )
    number, oldest = _run(patient, ended)[0]
    if not number:
        return Finding("leases", Status.OK, f"no lease ended more than {patient.patience:g} s ago")
    age = (patient.now - int(oldest)) / clock.SECOND
    return Finding(
        "leases", Status.FAILURE,
        f"{counted(number, 'running job')} lost the lease and nobody took it back, the oldest {age:.0f} s ago: "
        "no worker is alive",
        "start a worker on this database: whichever queues it works on, it takes back lost jobs of all",
    )  # fmt: skip


def due_jobs(patient: Patient) -> Finding:
    """Jobs whose time has come are made claimable by any worker, and claimed by those of their queue."""
    jobs, _ = patient.database.dialect.names.tables
    before = patient.now - round(patient.patience * clock.SECOND)
    waiting = select(func.count()).where(
        jobs.c.state == int(State.PENDING), jobs.c.ready_at.is_(None), jobs.c.run_at < before
    )
    problems = []
    if number := _run(patient, waiting)[0][0]:
        problems.append(
            Problem(
                Status.FAILURE,
                f"{counted(number, 'job')} became due more than {patient.patience:g} s ago and nobody made them "
                "claimable: no worker is alive",
                "start a worker on this database",
            )
        )
    for depth in patient.depths:
        if depth.oldest_age is None or depth.oldest_age <= patient.patience:
            continue
        what = f"queue {depth.queue!r}: {counted(depth.ready, 'job')} ready, the oldest for {depth.oldest_age:.0f} s"
        if depth.running:
            remedy = "raise -c, start more workers, or look at what the running jobs wait for"
            problems.append(Problem(Status.WARNING, f"{what}, {depth.running} running: its workers are behind", remedy))
        else:
            remedy = f"start a worker with -Q {depth.queue}"
            problems.append(Problem(Status.WARNING, f"{what}, none running: no worker works on it", remedy))
    ready = sum(depth.ready for depth in patient.depths)
    fine = f"{counted(ready, 'job')} ready, none of them for more than {patient.patience:g} s"
    return verdict("due_jobs", problems, fine)


def held_jobs(patient: Patient) -> Finding:
    _, finished = patient.database.dialect.names.tables
    some = select(literal(1)).select_from(finished).where(finished.c.state == int(State.DEAD)).limit(MOST_COUNTED + 1)
    dead = _run(patient, select(func.count()).select_from(some.subquery("some")))[0][0]
    found = {
        "blocked": (sum(depth.blocked for depth in patient.depths), "`dbqueue jobs retry` after the fix, or cancel"),
        "unknown": (sum(depth.unknown for depth in patient.depths), "`dbqueue jobs resolve`"),
        "dead": (dead, "`dbqueue jobs retry`, or `dbqueue jobs purge --state dead --older-than 7d`"),
    }
    problems = []
    for state, (number, verbs) in found.items():
        if number:
            more = "more than " if number > MOST_COUNTED else ""
            told = f"{more}{min(number, MOST_COUNTED) if state == 'dead' else number} {state}"
            problems.append(Problem(Status.WARNING, told, f"`dbqueue jobs list --state {state}`, then {verbs}"))
    return verdict("held_jobs", problems, "no job is blocked, unknown or dead")


def lease_rule(patient: Patient) -> Finding:
    """D18, before a worker refuses to start for it."""
    lease_ms = patient.queue.settings.lease_ms
    timeouts = {name: target.policy.timeout_ms for name, target in patient.queue.targets.items()}
    try:
        settings.check_lease_rule(patient.database.dialect.name, lease_ms, timeouts)  # type: ignore[arg-type]
    except ConfigError as error:
        problem, _, remedy = str(error).partition(". ")
        return Finding("lease_rule", Status.FAILURE, problem, remedy)
    longest = max(timeouts.values(), default=0)
    return Finding(
        "lease_rule", Status.OK, f"lease {lease_ms / 1000:g} s, longest timeout of a target {longest / 1000:g} s"
    )


def targets(patient: Patient) -> Finding:
    """What a worker of this code would do with the jobs that are stored already: a look before a deployment."""
    jobs, _ = patient.database.dialect.names.tables
    known = patient.queue.targets
    longest = patient.queue.settings.lease_ms if patient.database.dialect.name == "sqlite" else None
    unfinished = select(jobs.c.target, jobs.c.fingerprint, func.count(), func.max(jobs.c.timeout_ms)).where(
        jobs.c.state.in_([int(State.PENDING), int(State.RUNNING)])
    )
    problems, seen = [], 0
    for name, fingerprint, number, timeout in _run(
        patient, unfinished.group_by(jobs.c.target, jobs.c.fingerprint).order_by(jobs.c.target)
    ):
        name = name.decode() if isinstance(name, bytes) else name
        if name.startswith(settings.RESERVED_PREFIX):
            continue
        seen += number
        what = f"{counted(number, 'job')} of target {name!r}"
        if name not in known:
            remedy = (
                "declare the target again (name= keeps an old name), work on its queue elsewhere, or cancel its jobs"
            )
            problems.append(Problem(Status.WARNING, f"{what}, which this code does not declare", remedy))
        elif fingerprint is not None and bytes(fingerprint) != known[name].schema.fingerprint:
            remedy = "let the old code finish them first, or give the changed record to a target of another name"
            problems.append(Problem(Status.FAILURE, f"{what} with another schema: this code would block them", remedy))
        elif longest is not None and timeout is not None and timeout >= longest:
            remedy = f"raise the lease above {timeout / 1000:g} s"
            problems.append(
                Problem(Status.FAILURE, f"{what} with a timeout beyond the lease: they would be blocked", remedy)
            )
    declared = listed(sorted(known)) or "none"
    blocked = sum(depth.blocked for depth in patient.depths)
    beside = f", beside {blocked} blocked (see held_jobs)" if blocked else ""
    fine = f"all {counted(seen, 'pending or running job')} can run{beside}; declared: {declared}"
    return verdict("targets", problems, fine)


CHECKS = (
    Check("clock", clocks),
    Check("leases", leases),
    Check("due_jobs", due_jobs),
    Check("held_jobs", held_jobs),
)
WITH_TARGETS = (Check("lease_rule", lease_rule), Check("targets", targets))
