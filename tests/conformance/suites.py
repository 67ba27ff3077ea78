"""What is run of each suite, what is left out and why, and what belongs to the smoke subset.

A pattern is the test's file, class and name below upstream's t/integration, as fnmatch takes it, brackets being themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    name: str
    smoke: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    left_out_of_process: dict[str, str] = field(default_factory=dict)
    """With a worker in a process of its own."""
    left_out_of_dbqueue: dict[str, str] = field(default_factory=dict)
    """With dbqueue worker besides."""
    left_out_of_own_results: dict[str, str] = field(default_factory=dict)
    """With results in our database too."""
    needs_redis: bool = False
    """Its tasks take notes in Redis, wherever results are kept."""
    slow_tests: tuple[str, ...] = ()
    """They try out dozens of combinations, some of which wait for seconds."""
    worker_files: tuple[str, ...] = ()
    """Whose tests want the session's worker, whether they say so or not."""


_REDIS = "about the protocol of Celery's Redis transport or backend"
_BACKEND = "about another result backend"
_NO_BROKER = "no broker takes part"
_REDIS_KEYS = "looks at Redis' own keys and channels of results"
_REACHES_IN = "looks into the worker's memory, which is another process"
_AT_THE_END = "wants a message that is acknowledged before its task ends; here it ends with its row"
_WAITS = "wants an ETA that waits in the worker; here all wait in the database"
_CELERY_WORKER = "starts celery worker itself"
_IN_PLACE = (
    "wants a result that is stored before an error callback that is called in place; here both end in one transaction"
)

KOMBU = Suite(
    "kombu",
    smoke=(
        "TestBasicFunctionality::test_*connect",
        "TestBasicFunctionality::test_*publish_consume",
        "TestExchangeTypes::test_fanout",
        "TestPriority::test_publish_requeue_consume",
        "TestMessage::*",
        "TestEventLoop::*",
        "TestFailover::test_publish_consume",
    ),
    left_out={
        "TestFailover::test_failover_switches_to_alternate_url": (
            "compares Connection.port, which kombu leaves unset for any URL with a plus in its scheme"
        ),
    },
)

CELERY = Suite(
    "celery",
    smoke=(
        "test_tasks.py::test_tasks::test_basic_task",
        "test_tasks.py::test_tasks::test_reject_with_requeue*",
        "test_tasks.py::test_tasks::test_fail",
        "test_tasks.py::test_tasks::test_task_retried_once",
        "test_tasks.py::test_tasks::test_task_retried_priority",
        "test_inspect.py::*test_ping",
        "test_inspect.py::*test_registered",
        "test_canvas.py::test_chain::test_complex_chain",
        "test_canvas.py::test_chain::test_chain_of_chords_with_two_tasks",
        "test_canvas.py::test_chord::test_group_chain",
        "test_canvas.py::test_chord::test_nested_chord",
        "test_canvas.py::test_chord::test_priority*",
        "test_canvas.py::test_chord::test_add_to_chord",
        "test_canvas.py::test_chord::test_error_propagates_from_chord*",
    ),
    left_out={
        "test_backend.py*": _BACKEND,
        "test_backend_leak_in_fixture_teardown.py*": _REDIS,
        "test_cache_backend.py*": _BACKEND,
        "test_connection_recovery.py*": _REDIS,
        "test_database_backend.py*": _BACKEND,
        "test_native_delayed_delivery_binding.py*": "about RabbitMQ's own queues, and asks its management interface",
        "test_redis_backend.py*": _BACKEND,
        "test_security.py*": "about signed messages, and expected to fail upstream",
        "test_events_state_memory_leak.py*": "about the memory broker",
        "test_mem_leak_in_exception_handling.py*": "about the memory broker",
        "test_request_backend_down.py*": "about the memory broker",
        "test_logfile_format.py*": _NO_BROKER,
        "test_upgrade.py*": _NO_BROKER,
        "test_loader.py*": _NO_BROKER,
        "test_worker.py::test_django_fixup*": _NO_BROKER,
    },
    left_out_of_process={
        "test_canvas.py::test_stamping_mechanism::test_task_received_has_access_to_stamps": _REACHES_IN,
        "test_canvas.py::test_stamping_mechanism::test_linking_stamped_sig": _REACHES_IN,
        "test_canvas.py::test_stamping_mechanism::test_err_linking_stamped_sig": _REACHES_IN,
        "test_inspect.py::test_Inspect::test_conf": _REACHES_IN,
        "test_inspect.py::test_Inspect::test_stats": "wants the worker to have the process id of the tests",
        "test_inspect.py::test_Inspect::test_hello_stamps_received_revoked_ids_locally": _REACHES_IN,
        "test_tasks.py::test_tasks::test_send_task_without_ignore_result_*": _REACHES_IN,
        "test_tasks.py::test_tasks::test_revoked_by_headers_simple_canvas": _REACHES_IN,
        "test_tasks.py::test_tasks::test_revoked_by_headers_complex_canvas": _REACHES_IN,
        "test_tasks.py::test_trace_log_arguments::*": _REACHES_IN,
        "test_tasks.py::test_task_redis_result_backend::test_retry_preserves_ignore_result_*": _REACHES_IN,
        "test_tasks.py::test_task_replacement::test_replaced_task_nesting_level_*": _REACHES_IN,
        "test_tasks.py::test_task_replacement::test_replaced_task_nesting_chain": _REACHES_IN,
        "test_tasks.py::test_signal_bound_method_receivers::*": _REACHES_IN,
    },
    left_out_of_dbqueue={
        "test_inspect.py::test_Inspect::test_active": _AT_THE_END,
        "test_inspect.py::test_Inspect::test_query_task": _AT_THE_END,
        "test_inspect.py::test_Inspect::test_scheduled": _WAITS,
        "test_worker.py*": _CELERY_WORKER,
        "test_serialization.py*": _CELERY_WORKER,
        "test_group_chains.py::*::test_pending_chord_keeps_header_errback*": _IN_PLACE,
    },
    left_out_of_own_results={
        "test_canvas.py::test_chord::test_chord_on_error": _REDIS_KEYS,
        "test_canvas.py::test_chord::test_redis_subscribed_channels_leak": _REDIS_KEYS,
        "test_tasks.py::test_task_redis_result_backend::test_ignoring_result_no_subscriptions": _REDIS_KEYS,
        "test_tasks.py::test_task_redis_result_backend::test_asyncresult_*_cancels_subscription": _REDIS_KEYS,
    },
    needs_redis=True,
    slow_tests=(
        "*allow_error_cb_on_chord_header*",
        "*test_upgraded_chord_link_error_with_header_errback_enabled*",
        "*test_nested_chord_header_link_error*",
        "*test_chord_error_propagation_with_different_body_types*",
        "*test_revoked_by_headers_complex_canvas*",
    ),
    worker_files=("test_tasks.py", "test_canvas.py", "test_group_chains.py", "test_inspect.py"),
)

SUITES = {suite.name: suite for suite in (KOMBU, CELERY)}
