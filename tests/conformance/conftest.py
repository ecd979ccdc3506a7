"""Lets pytest explain the assertions of the conformance suites."""

import pytest

pytest.register_assert_rewrite("rankwise.testing.conformance")
