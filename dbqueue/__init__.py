"""dbqueue: durable jobs in the database that you already have (distribution ``celery-dbqueue``).

The public names are those of ``dbqueue.public``. They are loaded when the first of them is asked for: pytest loads our
plugin, and kombu our transport's names, in programs that may never use a queue, and SQLAlchemy alone takes half a
second.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dbqueue.public import *  # noqa: F403
else:  # a type checker that saw this function would believe that every name exists

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'dbqueue' has no attribute {name!r}")
        if importlib.util.find_spec(f"dbqueue.{name}") is not None:
            return importlib.import_module(f"dbqueue.{name}")
        public = importlib.import_module("dbqueue.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module 'dbqueue' has no attribute {name!r}")
        value = globals()[name] = getattr(public, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


class _WhenKombuComes(importlib.abc.MetaPathFinder):
    """Makes the broker's URL schemes known to kombu as soon as its module of transports is there. Celery loads them by an entry point;
    a program that uses nothing but ``kombu.Connection`` does not get so far, and importing kombu here would cost others 0.1 s."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "kombu.transport":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


class _WhenCeleryHasCome(importlib.abc.MetaPathFinder):
    """Has the messages of Celery's groups gathered, for brokers of ours, before the first group is published. To wait for the import of
    their module would not do: it may be under way when Celery imports kombu, and kombu our plugin. So the first import of another of
    Celery's modules that comes after it is waited for; an app makes several."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("celery.") or not hasattr(sys.modules.get("celery.canvas"), "group"):
            return None
        with contextlib.suppress(ValueError):  # another thread was here
            sys.meta_path.remove(self)
        importlib.import_module("dbqueue.kombu_transport.groups").install()
        return importlib.util.find_spec(fullname)  # whoever came after us in the list would be passed over now


def _register() -> None:
    importlib.import_module("dbqueue.kombu_transport.plugin").register()


if "kombu.transport" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WhenKombuComes())

sys.meta_path.insert(0, _WhenCeleryHasCome())
