"""What `-A tests.runtimes.app:queue` finds in a worker process: the jobs of `jobs.py`, on the database that the test
names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dbqueue import settings
from dbqueue.runtime import running, worker
from tests.runtimes.jobs import Jobs, end_with_parent

end_with_parent()
if os.environ["RUNTIMES_FREE"] == "1":
    settings.check_lease_rule = lambda *_: None
    vars(worker)["obstacle"] = lambda row, target, longest: running.obstacle(row, target, running.NEVER)
queue = Jobs(
    os.environ["RUNTIMES_URL"], Path(os.environ["RUNTIMES_FOLDER"]), **json.loads(os.environ["RUNTIMES_OPTIONS"])
).queue
