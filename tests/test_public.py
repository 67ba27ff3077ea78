"""``dbqueue`` loads its public names when they are asked for, and looks like any other module meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dbqueue
from dbqueue import public


def test_every_public_name_is_there() -> None:
    assert sorted(public.__all__) == list(public.__all__)
    for name in public.__all__:
        assert getattr(dbqueue, name) is getattr(public, name)
    assert {*public.__all__, "__version__"} <= set(dir(dbqueue))
    assert dbqueue.errors.QueueError is dbqueue.QueueError  # a module of it needs no import of its own either


def test_no_other_name_is() -> None:
    for name in ("nonsense", "sqlalchemy", "__path_of_nothing__"):
        with pytest.raises(AttributeError, match=rf"module 'dbqueue' has no attribute '{name}'"):
            getattr(dbqueue, name)


def test_the_package_itself_weighs_nothing() -> None:
    program = (
        "import sys, dbqueue, dbqueue.testing; assert 'sqlalchemy' not in sys.modules\n"
        "from dbqueue import *; from dbqueue.testing import *; print(DBQueue.__name__, case.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "DBQueue case\n"
