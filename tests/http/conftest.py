import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import tinymodel  # noqa: E402
from daemon import TINYLOOP, TINYLOOPD, Daemon  # noqa: E402


def pytest_configure():
    for program in (TINYLOOP, TINYLOOPD):
        if not program.exists():
            raise pytest.UsageError(f"{program} is missing: run make")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tinymodel.make(TINYLOOP, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory):
    """Slow enough that a request can be caught at any stage, also on a GPU if its steps are short: see slow_server."""
    return tinymodel.make(TINYLOOP, tmp_path_factory.mktemp("deep") / "tiny", core_layers=8)


@pytest.fixture(scope="session")
def server(model):
    d = Daemon(model)
    yield d
    d.stop()


@pytest.fixture(scope="session")
def slow_server(deep_model):
    d = Daemon(deep_model, "--step-rows", 16)
    yield d
    d.stop()


@pytest.fixture
def start(model):
    """Daemons of one test, ended after it."""
    running = []

    def go(*flags, model_dir=model, **kw):
        d = Daemon(model_dir, *flags, **kw)
        running.append(d)
        return d

    yield go
    for d in running:
        if d.process.poll() is None:
            d.process.kill()
            d.process.wait()
