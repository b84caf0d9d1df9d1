"""What `schemathesis run` loads as its hooks: the description has to allow exactly what the daemon accepts.

Bodies are judged here once more by another validator, as they were sent, so that the verdict does not depend on what the
generator meant to do. The description in use is that of TINYLOOP_DESCRIPTION, whose bounds are those of the model served."""
import functools
import json
import os
import re

import requests
import schemathesis
from jsonschema import Draft202012Validator

DOCUMENT = json.load(open(os.environ["TINYLOOP_DESCRIPTION"]))
# Codes that say: this request is no request of this route. The others depend on the model, on entries, on other fields.
FORM = {"invalid_json", "invalid_type", "unknown_field", "invalid_id", "invalid_token", "immutable_field", "out_of_range"}
# What a schema cannot say: bytes against characters, sizes of numbers, sums over fields.
BEYOND = re.compile(r"more than 60 characters|nested deeper|prompts for \d+ choices|may have 64 bytes|may hold 16 pairs|"
                    r"stop\[\d+\] has|digits of a number below 2\^64")


@functools.cache
def validator(schema):
    return Draft202012Validator({**json.loads(schema), "components": DOCUMENT["components"]})


def valid(schema, value):
    return validator(json.dumps(schema)).is_valid(value)


def resolved(node):
    while "$ref" in node:
        target = DOCUMENT
        for part in node["$ref"].split("/")[1:]:
            target = target[part]
        node = target
    return node


def as_sent(schema, text):
    """The value that a parameter's text stands for."""
    return int(text) if resolved(schema).get("type") == "integer" and re.fullmatch("[0-9]{1,18}", text) else text


def parameters_ok(path, operation, case):
    for parameter in map(resolved, path.get("parameters", []) + operation.get("parameters", [])):
        place = {"path": case.path_parameters, "query": case.query, "header": case.headers}[parameter["in"]] or {}
        if parameter["name"] not in place:
            continue
        value = place[parameter["name"]]
        if isinstance(value, list): # sent several times: any of them may be the one that counts
            return None
        if not valid(parameter["schema"], as_sent(parameter["schema"], str(value))):
            return False
    return True


def body_ok(operation, case):
    if "requestBody" not in operation:
        return True
    if type(case.body).__name__ == "NotSet":
        return not operation["requestBody"]["required"]
    if isinstance(case.body, bytes):
        return None
    if "\\u0000" in json.dumps(case.body): # no text may hold it, which would need a pattern at every string
        return False
    return valid(operation["requestBody"]["content"]["application/json"]["schema"], case.body)


def error_of(response):
    try:
        body = response.json()
    except ValueError:
        return {}
    return body.get("error", body) if isinstance(body, dict) else {}


@schemathesis.check
def description_is_exact(ctx, response, case):
    path = DOCUMENT["paths"].get(case.operation.path, {})
    operation = path.get(case.method.lower())
    if operation is None or response.status_code == 405:
        return
    verdicts = parameters_ok(path, operation, case), body_ok(operation, case)
    error = error_of(response)
    if False in verdicts and response.status_code < 400:
        raise AssertionError("accepted what the description forbids")
    text = error.get("message") or error.get("detail") or ""
    if verdicts == (True, True) and error.get("code") in FORM and not BEYOND.search(text):
        raise AssertionError(f"refused what the description allows: {text}")


DELETED = set() # paths


@schemathesis.check
def what_is_deleted_stays_deleted(ctx, response, case):
    """Until it is made again. (The check of this kind that comes with schemathesis counts deletions that were refused.)"""
    path = case.formatted_path
    if case.method == "DELETE" and response.status_code in (202, 204):
        DELETED.add(path)
    elif case.method in ("PUT", "POST") and response.status_code < 300:
        DELETED.difference_update({path, response.headers.get("location", [""])[0]})
    elif case.method in ("GET", "PATCH") and response.status_code < 400:
        assert path not in DELETED, "found after it was deleted"


@schemathesis.deserializer("text/event-stream")
def events(ctx, response):
    return response.content.decode("utf-8")


@schemathesis.check
def events_are_described(ctx, response, case):
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    answer = resolved(DOCUMENT["paths"][case.operation.path][case.method.lower()]["responses"]["200"])
    described = answer["content"]["text/event-stream"]["x-event-schema"]
    *blocks, rest = response.content.decode("utf-8").split("\n\n")
    assert rest == "", "the stream ends inside an event"
    data = [b.removeprefix("data: ") for b in blocks if b.startswith("data: ")]
    assert all(b.startswith((": ", "data: ")) and "\n" not in b for b in blocks), "a line that is neither data nor comment"
    if data[-1] == "[DONE]":
        data.pop()
    else:
        error = json.loads(data.pop())
        assert valid({"$ref": "#/components/schemas/Error"}, error), "the stream ends with neither error nor [DONE]"
    for event in data:
        for mistake in validator(json.dumps(described)).iter_errors(json.loads(event)):
            raise AssertionError(f"an event is not as described: {mistake.message} in {event}")


@schemathesis.hook
def after_call(context, case, response):
    if case.operation.path == "/admin/drain" and response.status_code == 200: # or everything after it would be refused
        requests.post(os.environ["TINYLOOP_ADMIN"] + "/admin/undrain", timeout=10)
