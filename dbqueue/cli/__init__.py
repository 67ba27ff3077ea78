"""The command ``dbqueue``: the doors of an operator and of a shell script.

Results go to stdout, words to stderr. Exit codes: 0 done, 1 refused (no such job, its state does not allow it, somebody
said no), 2 wrong usage or configuration, 3 the database cannot be reached, is busy or failed, 4 its schema is missing,
outdated or too new. Beside these: 70 a bug, 75 a worker that wants to be started again, 130 interrupted, 141 nobody
reads stdout any more.
"""

from __future__ import annotations

import sys

from dbqueue.cli.distribution import check_distribution
from dbqueue.cli.output import report
from dbqueue.errors import ForeignDistribution


def main() -> None:
    """Runs one command with the arguments of this process, and exits."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the terminal's encoding lacks must not end a listing
            stream.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] == ["health"]:
        from dbqueue.cli.health import quick

        if (code := quick(sys.argv[2:])) is not None:
            sys.exit(code)
    try:
        check_distribution()
    except ForeignDistribution as error:
        report(error.code, str(error), as_json="--json" in sys.argv)
        sys.exit(2)
    # Only now: a foreign `dbqueue` may have replaced modules that the program needs.
    from dbqueue.cli.program import program

    program()
