"""Whose module is ``dbqueue``? Another project's distribution of that name installs into the same folder as ours."""

from __future__ import annotations

import re
from importlib import metadata

from dbqueue.errors import ForeignDistribution

OURS = "celery-dbqueue"


def check_distribution() -> None:
    """Raises ForeignDistribution if a distribution other than celery-dbqueue brings a top-level ``dbqueue``."""
    for distribution in metadata.distributions():
        if not _brings_dbqueue(distribution):
            continue
        name = str(distribution.metadata["Name"] or "(without a name)")
        if re.sub(r"[-_.]+", "-", name).lower() != OURS:
            raise ForeignDistribution(
                f"the installed distribution {name!r} also brings a package named dbqueue, and the two overwrite each "
                f"other: pip uninstall -y {name} {OURS} && pip install {OURS}"
            )


def _brings_dbqueue(distribution: metadata.Distribution) -> bool:
    # RECORD is searched as text: parsing the files of every distribution would take longer than most commands.
    record = "\n" + (distribution.read_text("RECORD") or "")
    if "\ndbqueue/__init__.py," in record or "\ndbqueue.py," in record:
        return True
    return "dbqueue" in (distribution.read_text("top_level.txt") or "").split()
