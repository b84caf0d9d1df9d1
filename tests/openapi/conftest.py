import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "http")]

import tinymodel  # noqa: E402
from daemon import TINYLOOP, Daemon  # noqa: E402
from test_chat import chat_model  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return chat_model(tinymodel.make(TINYLOOP, folder / "plain"), folder / "tiny")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    d = Daemon(model, "--state-dir", tmp_path_factory.mktemp("state"), "--tenant-entries", 65536, "--max-entries", 65536)
    yield d
    d.stop()


@pytest.fixture(scope="session")
def document():
    import embed
    return embed.load()
