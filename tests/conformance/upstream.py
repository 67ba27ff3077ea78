"""Kombu's and Celery's own test suites, and environments to run them in: fetched from PyPI when they are first needed.

Everything lies in one folder beside the repository's other environments, which `make clean` removes. Nothing of it is ever
committed. An environment has dbqueue installed from this tree, so that the broker's URL is found through the entry point, as
it is in an application.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".venv-conformance"

# What Kombu's and Celery's suites import, beside the libraries themselves.
_HELPERS = ("pydantic", "pytest<10", "pytest-subtests", "pytest-timeout", "redis", "tblib")
# How pip says that there is no index to ask. It says the last of them for a version that does not exist as well, but then it
# names the versions that do.
_UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "NameResolutionError", "ProxyError", "(from versions: none)")

NEWEST = "newest"


class IndexUnreachable(Exception):
    """PyPI did not answer, and what is needed is not in the folder yet."""


@dataclass(frozen=True)
class Environment:
    """An interpreter that has dbqueue, and one version of Celery and of Kombu."""

    python: Path
    celery: str
    kombu: str

    def __str__(self) -> str:
        return f"celery {self.celery}, kombu {self.kombu}"

    def suite(self, name: str) -> Path:
        """The folder with the tests of `celery` or `kombu`, of the version installed here. Raises IndexUnreachable."""
        version = {"celery": self.celery, "kombu": self.kombu}[name]
        home = CACHE / "suites" / f"{name}-{version}"
        with _alone():
            if not home.exists():
                home.parent.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                    # Only this one from source: its wheel has no tests, and what it is built with may come as a wheel.
                    _pip(
                        self.python,
                        *("download", "--no-deps", "--no-binary", name, "--dest", folder, f"{name}=={version}"),
                    )
                    _unpack_tests(next(Path(folder).glob("*.tar.gz")), Path(folder) / "tests")
                    (Path(folder) / "tests").rename(home)
        return home


def environment(celery: str | None = None, kombu: str | None = None, *more: str) -> Environment:
    """The environment with these versions, and ``more`` distributions beside them, made if it is missing or if pyproject.toml has changed.

    Without a version of Celery it is the one that runs this, or else the newest, which NEWEST asks for. Without one of Kombu it
    is the newest of the same minor version, as the two are released in pairs. Raises IndexUnreachable.
    """
    celery = celery or _installed("celery") or NEWEST
    if celery == NEWEST:
        wanted = ["celery", f"kombu=={kombu}" if kombu else "kombu"]
    else:
        wanted = [f"celery=={celery}", f"kombu=={kombu or '.'.join(celery.split('.')[:2]) + '.*'}"]
    wanted += [*_HELPERS, *more]
    name = f"python-{sys.version_info.major}.{sys.version_info.minor}-celery-{celery}" + (
        f"-kombu-{kombu}" if kombu else ""
    )
    name += "".join(f"-{re.split('[<>=]', each)[0]}" for each in more)
    folder = CACHE / name
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    contents = hashlib.sha256("\n".join([*wanted, (ROOT / "pyproject.toml").read_text()]).encode()).hexdigest()
    with _alone():
        # What was the newest last week may not be so today.
        if celery == NEWEST or not stamp.exists() or stamp.read_text() != contents:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            _pip(python, "install", "--upgrade", "-e", f"{ROOT}[postgres]", *wanted)
            stamp.write_text(contents)
    asked = "import importlib.metadata as m; print(m.version('celery'), m.version('kombu'))"
    answer = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True, cwd=folder)
    return Environment(python, *answer.stdout.split())


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(python: Path, *arguments: str) -> None:
    command: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments]
    # As variables they reach the pip that pip itself starts for what it builds with.
    impatient = os.environ | {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=impatient)
    if done.returncode:
        said = done.stdout + done.stderr
        error = IndexUnreachable if any(word in said for word in _UNREACHABLE) else RuntimeError
        raise error(f"pip {' '.join(arguments)}:\n{said[-2000:]}")


def _unpack_tests(archive: Path, target: Path) -> None:
    """The folder `t`, as it is called in both, without the rest of the distribution: the installed library is to be tested."""
    with tarfile.open(archive) as source:
        members = []
        for member in source.getmembers():
            _, _, inner = member.name.partition("/")
            if inner.startswith("t/"):
                member.name = inner
                members.append(member)
        source.extractall(target, members, filter="data")


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time, as the tests run in several."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
