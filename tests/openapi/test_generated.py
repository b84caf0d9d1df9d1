"""Requests made from the description by schemathesis, against a real daemon: no status of 5xx, no answer that the description
does not know, nothing accepted that it forbids, nothing refused for its form that it allows.

TINYLOOP_GENERATED=N asks for about N random requests with another seed each time, and beside them tries every bound of every
field, and sequences of requests on what was made; without it there are some 200, the same ones every time."""
import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
WANTED = int(os.environ.get("TINYLOOP_GENERATED", "0"))
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
          "response_schema_conformance,unsupported_method,description_is_exact,events_are_described,"
          "what_is_deleted_stays_deleted")


def narrowed(document, model):
    """The description with the bounds of the model that is served, so that more requests get past the parsers."""
    document = copy.deepcopy(document)
    limits, schemas = model["limits"], document["components"]["schemas"]
    for name, bound in (("TokenId", limits["vocab_size"] - 1), ("Window", limits["max_seq_len"]), ("Loops", limits["max_loops"]),
                        ("LoopsOrNull", limits["max_loops"]), ("MaxTokens", 16)):
        schemas[name]["maximum"] = bound
    fields = schemas["GenerationFields"]["properties"]
    fields["model"]["enum"] = schemas["ModelName"]["enum"] = [model["id"]]
    schemas["ModelName"]["enum"] += [None]
    fields["n"]["maximum"] = 3
    fields["max_queue_ms"]["minimum"] = fields["timeout_ms"]["minimum"] = 60000 # less may be an honest 503
    fields["store_resume"]["properties"]["max_loops"]["maximum"] = limits["max_loops"]
    fields["pool"]["anyOf"][1]["properties"]["register_tokens"]["maximum"] = limits["max_seq_len"]
    schemas["EstimateRequest"]["properties"]["tokens"]["maximum"] = limits["max_seq_len"]
    return document


@pytest.mark.parametrize("side", ["public", "admin"])
def test_every_answer_is_as_described(server, document, side, tmp_path):
    model = server.get("/v1/models")[1]["data"][0]
    paths = {path: item for path, item in document["paths"].items()
             if side in next(v for k, v in item.items() if k in ("get", "post", "put", "patch", "delete"))["x-listeners"]}
    n_operations = sum(k in ("get", "post", "put", "patch", "delete") for item in paths.values() for k in item)
    described = tmp_path / "openapi.json"
    described.write_text(json.dumps(narrowed({**document, "paths": paths}, model)))
    port = server.port if side == "public" else server.admin_port
    program = pathlib.Path(sys.executable).parent / "schemathesis"
    command = [str(program), "run", str(described), "--url", f"http://127.0.0.1:{port}", "--checks", CHECKS,
               "--continue-on-failure", "--no-color", "--no-shrink", "--request-timeout", "60",
               "--generation-allow-x00", "false", "--generation-with-security-parameters", "false",
               "--suppress-health-check", "all", "--warnings", "off"]
    if WANTED:
        command += ["--phases", "coverage,fuzzing,stateful", "--generation-database", "none", "-n", str(max(1, WANTED // 64))]
    else:
        command += ["--phases", "fuzzing", "-n", "4", "--generation-deterministic"]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": "checks", "PYTHONPATH": str(HERE), "TINYLOOP_DESCRIPTION": str(described),
           "TINYLOOP_ADMIN": f"http://127.0.0.1:{server.admin_port}"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    made = re.search(r"(\d+) generated", run.stdout)
    print(run.stdout[-20000:], run.stderr[-2000:])
    assert made and int(made[1]) >= n_operations
    assert run.returncode == 0, f"{made[0]}: see above"
    print(f"{side}: {made[0]}")
    server.control()
