"""What Prometheus and Grafana are given fits what the daemon says: promtool judges the text, the rules and every expression of the dashboard,
and each metric that they name is there."""
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/http"))

from daemon import Daemon  # noqa: E402

RULES = ROOT / "config/prometheus/tinyloop.rules.yml"
DASHBOARD = ROOT / "config/grafana/tinyloop.json"


def promtool(*args, text=None):
    r = subprocess.run(["promtool", *map(str, args)], input=text, capture_output=True, text=True, timeout=60)
    return r.returncode, r.stdout + r.stderr


@pytest.fixture(scope="module")
def metrics():
    """The text after every kind of request: fresh, prefix cache, resume, pool, refused, not found."""
    d = Daemon(ROOT / "config/demo-model")
    ids = list(range(10, 90))
    d.request("PUT", "/v1/prefix_caches/p", {"prompt": ids, "loops": 4})
    d.request("PUT", "/v1/resume_handles/r", {"prompt": ids, "loops_used": 2, "max_loops": 8})
    d.request("POST", "/v1/pool/entries", {"prompt": ids, "loops": 8})
    for more in ({"pool": "off"}, {"prefix_cache": "p"}, {"resume": {"handle": "r", "loops": 4}, "prompt": [5]}, {"prompt": ids + [5]}):
        assert d.request("POST", "/v1/completions", {"model": "demo-model", "prompt": [5, 6], "max_tokens": 3, **more})[0] == 200, more
    assert d.request("POST", "/v1/completions", {"model": "demo-model", "prompt": [5], "loops": 99})[0] == 400
    assert d.get("/nothing")[0] == 404
    text = d.get("/metrics", admin=True)[1]
    d.stop()
    return text


def test_the_text_is_what_prometheus_expects(metrics):
    code, out = promtool("check", "metrics", text=metrics)
    assert code == 0 and out.strip() == "", out


def test_configuration_and_rules():
    code, out = promtool("check", "config", ROOT / "config/prometheus/prometheus.yml")
    assert code == 0, out
    code, out = promtool("test", "rules", ROOT / "config/prometheus/tinyloop.rules.test.yml")
    assert code == 0, out


def names(expression):
    return set(re.findall(r"\b(?:tinyloop|process)_[a-z0-9_]+\b", expression))


def expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(p["title"], t["expr"]) for p in panels for t in p.get("targets", [])]


def test_every_metric_exists(metrics):
    there = set(re.findall(r"^([a-z0-9_]+)[{ ]", metrics, re.M))
    text = re.sub(r"(summary|description): .*", "", RULES.read_text())
    assert names(text) - there == set()
    for title, expr in expressions():
        assert (names(expr) or "up{" in expr) and names(expr) - there == set(), title


def test_the_dashboard_shows_every_metric_that_matters(metrics):
    families = set(re.findall(r"^# TYPE (\S+)", metrics, re.M))
    shown = {re.sub(r"_(bucket|sum|count)$", "", n) for _, e in expressions() for n in names(e)}
    assert families - shown == {"tinyloop_build_info", "tinyloop_model_info", "tinyloop_worker_steps_total", "process_virtual_memory_bytes",
                                "process_max_fds", "process_start_time_seconds"}


def test_expressions_of_the_dashboard_are_promql(tmp_path):
    rules = {"groups": [{"name": "g", "rules": [
        {"record": f"panel:{i}", "expr": re.sub(r"\$__rate_interval", "5m", e).replace("$job", ".*").replace("$instance", ".*")}
        for i, (_, e) in enumerate(expressions())]}]}
    path = tmp_path / "rules.yml" # JSON is YAML
    path.write_text(json.dumps(rules))
    code, out = promtool("check", "rules", path)
    assert code == 0, out


def test_panels_do_not_overlap():
    taken = {}
    for p in json.loads(DASHBOARD.read_text())["panels"]:
        g = p["gridPos"]
        assert g["x"] + g["w"] <= 24
        for x in range(g["x"], g["x"] + g["w"]):
            for y in range(g["y"], g["y"] + g["h"]):
                assert taken.setdefault((x, y), p["title"]) == p["title"]
