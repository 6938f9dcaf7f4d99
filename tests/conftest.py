import os

import pytest


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """Undo what a test left in the environment: launchers and DeepSpeed set variables that later processes inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
