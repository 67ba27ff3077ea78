"""The testing kit (D21): a case is a real database of its own, a clock that a test advances, and a drain of the jobs
that are due.

    with dbqueue.testing.case(queue) as case:
        send_receipt.enqueue(Receipt(7), delay=60)
        case.advance(60)
        assert case.drain().succeeded == 1

Nothing is faked but what the test itself replaces: the database is SQLite in a temporary file, and jobs run through the
production worker. No fixture is needed, but with pytest there is one: ``dbqueue_case(queue)``. See docs/testing.md.

Like ``dbqueue`` itself, this package loads what is asked for, and then: pytest imports its plugin in every program's
tests.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbqueue.testing.cases import Case as Case
    from dbqueue.testing.cases import CaseFactory as CaseFactory
    from dbqueue.testing.cases import case as case
    from dbqueue.testing.drain import Drained as Drained
    from dbqueue.testing.drain import Ended as Ended
    from dbqueue.testing.drain import NotDrained as NotDrained
    from dbqueue.testing.process import Process as Process
    from dbqueue.testing.process import ProcessTrouble as ProcessTrouble
else:
    _HOMES = {
        "Case": "cases", "CaseFactory": "cases", "case": "cases",
        "Drained": "drain", "Ended": "drain", "NotDrained": "drain",
        "Process": "process", "ProcessTrouble": "process",
    }  # fmt: skip
    __all__ = [*_HOMES]

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'dbqueue.testing' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"dbqueue.testing.{_HOMES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
