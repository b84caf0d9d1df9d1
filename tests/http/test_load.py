"""The short form of the load programs; tests/load/run.py --long is the whole."""
import sys

from daemon import ROOT

sys.path.insert(0, str(ROOT / "tests/load"))


def test_short_load(model):
    import run
    r = run.run(model, long=False)
    assert r.failed == 0 and r.passed >= 7
