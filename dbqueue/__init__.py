"""dbqueue: durable jobs in the database that you already have (distribution ``celery-dbqueue``).

The public names are those of ``dbqueue.public``. They are loaded when the first of them is asked for: pytest loads our
plugin, and kombu our transport's names, in programs that may never use a queue, and SQLAlchemy alone takes half a
second.
"""

import importlib
import importlib.util
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
