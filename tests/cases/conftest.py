from tests.runtimes.conftest import jobs as jobs
from tests.runtimes.conftest import make_queue as make_queue
from tests.runtimes.conftest import queue as queue
from tests.runtimes.conftest import start as start
from tests.runtimes.conftest import told as told
