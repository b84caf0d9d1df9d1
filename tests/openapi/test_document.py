"""server/openapi.yaml against itself, the sources and a running daemon."""
import hashlib
import json
import pathlib
import re

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

import embed
from daemon import Daemon

METHODS = ("get", "post", "put", "patch", "delete")
SERVER = embed.SERVER


def operations(document):
    return {(method.upper(), path): item[method]
            for path, item in document["paths"].items() for method in METHODS if method in item}


def test_it_is_valid(document):
    mistakes = [e.message for e in OpenAPIV31SpecValidator(document).iter_errors()]
    assert mistakes == []
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert name[0].isupper()


def test_what_is_built_in_is_what_is_written(document):
    assert embed.EMBEDDED.read_text() == embed.embedded(document), "run `make openapi`"


def test_every_part_is_used(document):
    text = json.dumps(document)
    for section, members in document["components"].items():
        for name in members:
            if section != "securitySchemes":
                assert f'"#/components/{section}/{name}"' in text, f"{section}/{name}"


def test_operation_ids_are_unique(document):
    ids = [o["operationId"] for o in operations(document).values()]
    assert len(set(ids)) == len(ids)


def test_version_is_that_of_the_program(document, server):
    assert server.get("/version")[1]["version"] == document["info"]["version"]


@pytest.mark.parametrize("side", ["public", "admin"])
def test_the_daemon_serves_it(document, server, side):
    status, body, headers = server.get("/openapi.json", admin=side == "admin")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert body == document


@pytest.mark.parametrize("side", ["public", "admin"])
def test_routes_are_those_of_the_route_table(document, server, side):
    table = {(e["method"], e["path"]): e["does"] for e in server.get("/", admin=side == "admin")[1]["endpoints"]}
    described = {k: o["summary"] for k, o in operations(document).items() if side in o["x-listeners"]}
    assert described == table


def error_table():
    rows = re.findall(r'\[TL_(?:ERR|CODE)_\w+\] = \{"(\w+)", (\d+), TL_RETRY_(\w+)\}', (SERVER / "http_status.c").read_text())
    assert len(rows) > 60
    return [(name, int(http), retry) for name, http, retry in rows]


def test_error_codes_are_those_of_the_error_table(document):
    schemas, responses = document["components"]["schemas"], document["components"]["responses"]
    assert schemas["ErrorCode"]["enum"] == sorted({name for name, _, _ in error_table()})
    for http in {http for _, http, _ in error_table()} - {405}: # which no operation that is described can answer
        rows = [(name, retry) for name, status, retry in error_table() if status == http]
        codes = schemas[f"Error{http}"]["properties"]["error"]["properties"]["code"]["enum"]
        assert sorted(codes) == sorted(name for name, _ in rows), http
        headers = responses[f"Error{http}"]["headers"]
        assert ("Retry-After" in headers) == ("retry-after-ms" in headers) == any(retry == "LATER" for _, retry in rows), http
        assert ("x-should-retry" in headers) == any(retry == "NEVER" for _, retry in rows), http


def test_open_routes_need_no_key_in_the_description_either(document):
    for o in operations(document).values():
        assert ("x-roles" in o) == ("security" not in o), o["operationId"]
        assert ({"401", "403"} <= set(o["responses"])) == ("x-roles" in o), o["operationId"]


def test_roles_are_those_that_the_daemon_wants(document, model, tmp_path):
    """Every operation with a key of each role, and with none."""
    roles = ("infer", "cache", "admin")
    (tmp_path / "keys").write_text("".join(f"{r}:{hashlib.sha256(r.encode()).hexdigest()}:t:{r}:\n" for r in roles))
    d = Daemon(model, "--api-keys", tmp_path / "keys")
    wrong = []
    try:
        for (method, path), o in operations(document).items():
            for side in o["x-listeners"]:
                for role in (None, *roles):
                    status, reply, _ = d.request(method, path.replace("{id}", "x"), admin=side == "admin",
                                                 headers={"Authorization": f"Bearer {role}"} if role else {})
                    code = reply.get("error", {}).get("code") if isinstance(reply, dict) else None
                    may = "x-roles" not in o or role in o["x-roles"]
                    expected = None if may else "insufficient_role" if role else "invalid_api_key"
                    if (code if code in ("insufficient_role", "invalid_api_key") else None) != expected:
                        wrong.append((method, path, side, role, status, code))
            if path == "/admin/drain":
                d.request("POST", "/admin/undrain", admin=True, headers={"Authorization": "Bearer admin"})
    finally:
        d.stop()
    assert wrong == []


def checker(document, schema):
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", "components": document["components"]})


@pytest.mark.parametrize("path, schema, body", [
    ("/v1/completions", "CompletionChunk", {"prompt": ["the", "in"], "logprobs": 2, "echo": True, "n": 2, "return_tokens": True,
                                            "return_logits_hash": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", "ChatCompletionChunk",
     {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 3, "n": 2, "return_tokens": True,
      "chat_template_kwargs": {"enable_thinking": True}, "stream_options": {"include_usage": True}}),
])
def test_events_of_a_stream_are_described(document, server, path, schema, body):
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0, "stream": True, "return_progress": True, **body}
    status, text, headers = server.request("POST", path, asked)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *events, end = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert end == "[DONE]" and len(events) > 5
    for event in events:
        assert [e.message for e in checker(document, schema).iter_errors(json.loads(event))] == [], event


def test_problems_are_described(document, server):
    status, text, headers = server.request("POST", "/v1/detokenize", {"tokens": [1, 100000]},
                                           headers={"Accept": "application/problem+json"})
    assert (status, headers["Content-Type"]) == (400, "application/problem+json")
    assert [e.message for e in checker(document, "Problem").iter_errors(text)] == []


@pytest.mark.parametrize("expected, request_text", [
    (417, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nExpect: soon\r\n\r\n"),
    (501, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n"),
    (400, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
    (400, "GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n"),
    (400, "POST /v1/estimate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    (413, "POST /v1/estimate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"),
    (414, "GET /" + "x" * 40000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    (431, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + "x" * 40000 + "\r\n\r\n"),
], ids=lambda v: str(v)[:3])
def test_each_mistake_of_the_transport_is_described(document, server, expected, request_text):
    with server.raw() as raw:
        status, body, _ = raw.send(request_text).answer()
    assert status == expected
    assert [e.message for e in checker(document, f"Error{status}").iter_errors(json.loads(body))] == []


def test_fields_of_the_native_routes_are_those_of_the_parsers(document, server):
    """Each described field is known to its route: a value of a wrong type is never an unknown field."""
    schemas = document["components"]["schemas"]
    for (method, path), o in operations(document).items():
        if "requestBody" not in o:
            continue
        reference = o["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[pathlib.PurePosixPath(reference).name]
        for name in schema.get("properties", {}) if schema.get("additionalProperties") is False else ():
            body = {name: [["neither"]]}
            if path == "/v1/estimate" and name in ("loops_used", "max_loops"):
                body["kind"] = "resume_handle"
            reply = server.request(method, path.replace("{id}", "x"), body, admin="admin" in o["x-listeners"])[1]
            assert reply["error"]["code"] not in ("unknown_field", "immutable_field"), (path, name)
        if schema.get("additionalProperties") is False:
            reply = server.request(method, path.replace("{id}", "x"), {"surely_unknown": 1}, admin="admin" in o["x-listeners"])[1]
            assert reply["error"]["code"] in ("unknown_field", "immutable_field"), path


def test_examples_work(document, server):
    """In the order of the document: what a later one needs has been made by an earlier one."""
    n = 0
    for (method, path), o in operations(document).items():
        if "requestBody" not in o:
            continue
        reference = o["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        name = pathlib.PurePosixPath(reference).name
        for example in document["components"]["schemas"][name]["examples"]:
            assert [e.message for e in checker(document, name).iter_errors(example)] == []
            body = example | ({"model": "tiny"} if "model" in example else {})
            status, reply, _ = server.request(method, path.replace("{id}", "example"), body, admin="admin" in o["x-listeners"])
            assert status < 300, (path, reply)
            n += 1
    assert n > 15
