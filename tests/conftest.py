"""What the end-to-end tests are given."""

import sys

import pytest
from runner import Runner


@pytest.fixture
def jobs(tmp_path):
    return Runner(tmp_path)


@pytest.fixture(scope="session")
def python():
    return sys.executable
