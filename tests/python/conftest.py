"""Lets tests import the package from the source tree, and gives them a stand-in for the library."""

import ctypes
import pathlib
import sys

import pytest
from fake_library import FakeLibrary

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))


@pytest.fixture
def library():
    return FakeLibrary()


@pytest.fixture(scope="session")
def built_library():
    """The library itself, loaded and not started."""
    from runner import COMMAND
    from strandline._library import Library

    return Library(ctypes.PyDLL(str(COMMAND.parent / "libstrandline.so")))
