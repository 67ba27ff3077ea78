"""What the server process that the children are forked from imports before the first of them. It is imported nowhere else.

A SIGTERM that a service manager sends to a whole group must not end it: the children, whose jobs may end, would seem dead to the parent.
Nor may an application that cannot be imported: each child tries again, and tells why.
"""

from __future__ import annotations

import importlib
import os
import signal
from contextlib import suppress

import dbqueue.runtime.processes  # noqa: F401

# Not a name of the settings' own, which refuse those that they do not know. Absent: some tool looks at all modules.
_names = os.environ.pop("_DBQUEUE_PRELOAD", None)
if _names is not None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _name in filter(None, _names.split(",")):
        with suppress(BaseException):
            importlib.import_module(_name)
