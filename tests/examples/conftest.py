import pytest

pytest.register_assert_rewrite("tests.examples.scenarios", "tests.examples.lab")
