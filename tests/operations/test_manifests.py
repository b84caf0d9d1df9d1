"""The Kubernetes manifests and the Compose file fit the daemon and each other: settings that exist, ports and labels that meet, times that add up."""
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/http"))

from daemon import TINYLOOPD, Daemon, clean_env  # noqa: E402

K8S = ROOT / "config/kubernetes"


def documents(*paths):
    return {(d["kind"], d["metadata"]["name"]): d for p in paths for d in yaml.safe_load_all((K8S / p).read_text())}


ALL = documents("base/deployment.yaml", "base/services.yaml", "base/disruption.yaml", "monitoring.yaml", "gateway.yaml")
POD = ALL["Deployment", "tinyloop"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
ENV = {e["name"]: e.get("value") for e in CONTAINER["env"]}
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"web:{hashlib.sha256(b'secret').hexdigest()}:web:infer,cache:\n")
    return path


def check_config(env):
    return subprocess.run([str(TINYLOOPD), "--check-config"], env=clean_env(**env), capture_output=True, text=True, timeout=20)


def local(env, keys):
    """The same settings with the paths of this machine."""
    return {**env, "TINYLOOP_MODEL": str(ROOT / "config/demo-model"), "TINYLOOP_BOOT_MANIFEST": str(K8S / "base/boot.json"),
            "TINYLOOP_API_KEYS": str(keys), "TINYLOOP_THREADS": "2"}


def test_the_pods_settings_are_sound(keys):
    r = check_config(local(ENV, keys))
    assert r.returncode == 0, r.stderr
    assert POD["spec"]["enableServiceLinks"] is False
    assert check_config({**local(ENV, keys), "TINYLOOP_PORT": "tcp://10.0.0.1:80"}).returncode == 2 # what those links would be


def test_the_drain_fits():
    pre_stop = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > pre_stop + int(ENV["TINYLOOP_SHUTDOWN_TIMEOUT"])
    service = COMPOSE["x-service"]
    assert int(service["stop_grace_period"].rstrip("s")) > int(service["environment"]["TINYLOOP_SHUTDOWN_TIMEOUT"])


def test_labels_and_ports_meet():
    labels = POD["metadata"]["labels"].items()
    ports = {p["name"] for p in CONTAINER["ports"]}
    for selector in (ALL["Deployment", "tinyloop"]["spec"]["selector"]["matchLabels"],
                     ALL["PodDisruptionBudget", "tinyloop"]["spec"]["selector"]["matchLabels"],
                     ALL["Service", "tinyloop"]["spec"]["selector"], ALL["Service", "tinyloop-pods"]["spec"]["selector"]):
        assert selector.items() <= labels
    for service in ("tinyloop", "tinyloop-pods"):
        assert {p["targetPort"] for p in ALL["Service", service]["spec"]["ports"]} <= ports
    monitor, pods = ALL["ServiceMonitor", "tinyloop"]["spec"], ALL["Service", "tinyloop-pods"]
    assert monitor["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert not monitor["selector"]["matchLabels"].items() <= ALL["Service", "tinyloop"]["metadata"]["labels"].items()
    assert {e["port"] for e in monitor["endpoints"]} <= {p["name"] for p in pods["spec"]["ports"]}
    backend = ALL["HTTPRoute", "tinyloop"]["spec"]["rules"][0]["backendRefs"][0]
    assert backend["port"] in {p["port"] for p in ALL["Service", backend["name"]]["spec"]["ports"]}
    assert ALL["BackendTrafficPolicy", "tinyloop"]["spec"]["targetRefs"][0]["name"] == "tinyloop"


def test_volumes_and_the_user_are_those_of_the_image():
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    uid, gid = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.M).groups()
    security = POD["spec"]["securityContext"]
    assert security["runAsUser"] == int(uid) and security["fsGroup"] == int(gid) and security["runAsNonRoot"]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] and CONTAINER["securityContext"]["capabilities"]["drop"] == ["ALL"]
    mounted = {m["mountPath"] for m in CONTAINER["volumeMounts"]}
    assert set(json.loads(re.search(r"^VOLUME (\[.*\])$", dockerfile, re.M)[1])) <= mounted
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["spec"]["volumes"]}


def test_a_pod_starts_and_has_what_its_manifest_names(keys):
    env = local({k: v for k, v in ENV.items() if k != "TINYLOOP_ADMIN_HOST"}, keys)
    d = Daemon(None, env=env)
    for path in {CONTAINER[p]["httpGet"]["path"] for p in ("startupProbe", "readinessProbe", "livenessProbe")}:
        assert d.get(path)[0] == 200
    auth = {"Authorization": "Bearer secret"}
    assert d.get("/v1/prefix_caches/rules", headers=auth)[1]["status"] == "ready"
    assert d.get("/v1/pool/entries/opening", headers=auth)[1]["status"] == "ready"
    assert d.get("/v1/prefix_caches/rules")[0] == 401
    d.stop()


@pytest.mark.parametrize("service", ["tinyloop", "tinyloop-gpu"])
def test_compose(service):
    s = COMPOSE["services"][service]
    env = {k: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(v)) for k, v in s["environment"].items()}
    r = check_config({**env, "TINYLOOP_MODEL": str(ROOT / "config/demo-model")})
    assert r.returncode == 0, r.stderr
    assert s["read_only"] and s["cap_drop"] == ["ALL"] and s["healthcheck"]["test"][-1] == "--healthcheck"
    assert s["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert s["ports"][0].startswith("${PUBLISH:-127.0.0.1}:") # nobody else without a word


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
@pytest.mark.parametrize("name", ["base", "gpu"])
def test_kustomize(name):
    r = subprocess.run(["kubectl", "kustomize", str(K8S / name)], capture_output=True, text=True, timeout=60)
    assert r.returncode == 0, r.stderr
    kinds = [d["kind"] for d in yaml.safe_load_all(r.stdout)]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "Service"]
