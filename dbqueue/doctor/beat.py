"""What the rows of the schedules tell: that nobody fires them, that some cannot be fired, and that the clock went back. Alike on every
database."""

from __future__ import annotations

from dbqueue import clock, schedules
from dbqueue.database.postgres import as_text
from dbqueue.doctor.check import Check, Finding, Patient, Problem, Status, counted, listed, verdict

LATE = 5
"""Times the doctor's patience: a beat looks every second, but one that makes up for a long time takes its turns."""
MOST_NAMED = 20


def beats(patient: Patient) -> Finding:
    """Every beat moves every cursor of its owners, those of paused schedules too: one that stays behind has no beat."""
    late = LATE * patient.patience
    found = patient.session.execute(
        patient.database.dialect.portable(
            "SELECT owner, count(*), min(COALESCE(next_at, updated_at)) FROM {schedules} WHERE retired = :no AND (next_at < :before "
            "OR ((planned IS NULL OR planned <> spec || ' ' || timezone) AND updated_at < :before)) GROUP BY owner ORDER BY owner"
        ),
        {"no": False, "before": patient.now - round(late * clock.SECOND)},
    )
    problems = []
    for owner, number, since in found:
        app = as_text(owner)
        of_whom = f" of the Celery app {app!r}" if app else ""
        told = f"{counted(number, 'schedule')}{of_whom} waited {(patient.now - since) / clock.SECOND:.0f} s for a beat: none runs"
        remedy = (
            f"start a beat with the code of {app!r}, or remove what that app left (`dbqueue schedules remove --owner`)"
        )
        problems.append(Problem(Status.FAILURE, told, remedy if app else "start `dbqueue beat` on this database"))
    return verdict("beat", problems, f"no schedule has waited more than {late:g} s for a beat")


def broken_schedules(patient: Patient) -> Finding:
    """Set aside by a beat, which goes on trying once a minute."""
    found = patient.session.execute(
        patient.database.dialect.portable(
            "SELECT name FROM {schedules} WHERE error IS NOT NULL AND paused = :no AND retired = :no ORDER BY owner, name LIMIT "
            f"{MOST_NAMED}"
        ),
        {"no": False},
    )
    names = [repr(as_text(row[0])) for row in found]
    if not names:
        return Finding("broken_schedules", Status.OK, "no schedule is set aside")
    more = " or more" if len(names) == MOST_NAMED else ""
    return Finding(
        "broken_schedules", Status.WARNING, f"{counted(len(names), 'schedule')}{more} cannot be fired: {listed(names)}",
        "`dbqueue schedules show NAME` tells why; declare it again, or mend the row",
    )  # fmt: skip


def cursors(patient: Patient) -> Finding:
    dialect, session = patient.database.dialect, patient.session
    owners = [as_text(row[0]) for row in session.execute(dialect.portable("SELECT DISTINCT owner FROM {schedules}"))]
    names = [repr(name) for name in schedules.ahead(dialect, session, owners, patient.now)]
    if not names:
        return Finding("cursors", Status.OK, "no schedule was dealt with beyond the database's now")
    return Finding(
        "cursors", Status.WARNING,
        f"the database's clock went back: {listed(names)} will be silent until it has caught up with the cursor",
        "wait, or `dbqueue schedules reset NAME`: slots until then may be fired a second time",
    )  # fmt: skip


CHECKS = (Check("beat", beats), Check("broken_schedules", broken_schedules), Check("cursors", cursors))
