"""Imported first, it makes Celery and what comes with it impossible to import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

BARRED = ("celery", "kombu", "billiard", "vine", "amqp")


class Barrier(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in BARRED:
            raise ImportError(f"{fullname} is not installed here")
        return None


assert not [name for name in sys.modules if name.partition(".")[0] in BARRED]
sys.meta_path.insert(0, Barrier())
