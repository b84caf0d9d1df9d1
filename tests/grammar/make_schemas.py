"""Random JSON schemas out of what the engine supports, and instances of them made without it."""
import datetime
import ipaddress
import json
import string
import uuid

NAMES = ["a", "b", "ab", "abc", "name", "id", "value", "x-y", "with space", "quo\"te", "back\\slash", "tab\t", "é", "日本", "", "/", "~",
         "items", "children", "k1", "k2", "k3"]
TEXTS = ["", "a", "hello world", "quo\"te", "back\\slash", "line\nend", "tab\t", "é", "日本語", "\u0001", "\x7f", "{}", "[1,2]", "null", "x" * 30,
         "emoji 😀", "/", "  ", "'"]
PATTERNS = [  # with texts that match, by hand
    ("^[a-z]+$", ["a", "hello"]), ("^[A-Z]{2,4}-\\d{3}$", ["AB-123", "ABCD-000"]), ("abc", ["abc", "xxabcyy", "\"abc\\"]),
    ("^(foo|bar)?$", ["", "foo", "bar"]), ("^a|b$", ["a", "axx", "xxb"]), ("\\.txt$", ["a.txt", ".txt"]), ("^[^\"]*$", ["", "x\\y", "é"]),
    ("^\\w+@\\w+\\.(com|org)$", ["a@b.com"]), ("^.{3}$", ["abc", "é日x"]), ("^[\\u00e0-\\u00ff]+$", ["éà"]), ("^\\S+( \\S+)*$", ["a b c"])]
FORMATS = {
    "date": lambda r: (datetime.date(1, 1, 1) + datetime.timedelta(days=r.randrange(3650000))).isoformat(),
    "time": lambda r: "%02d:%02d:%02d%s" % (r.randrange(24), r.randrange(60), r.randrange(60), r.choice(["Z", "+01:30", "-23:59", ".5Z"])),
    "uuid": lambda r: str(uuid.UUID(int=r.getrandbits(128))),
    "ipv4": lambda r: str(ipaddress.IPv4Address(r.getrandbits(32))),
    "ipv6": lambda r: str(ipaddress.IPv6Address(r.getrandbits(128) & (r.getrandbits(128) if r.random() < 0.5 else (0xFFFF << 112 | 0xFFFF)))),
    "email": lambda r: r.choice(["a@b.co", "first.last+tag@mail.example.org"]),
    "hostname": lambda r: r.choice(["localhost", "a-b.example.com"]),
    "uri": lambda r: r.choice(["http://a.b", "https://example.com:8080/x/y?q=1#f"]),
}


def schema(r, depth=0, refs=()):
    """One schema; refs are names in $defs that may be referred to."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "bounded", "text", "any"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 3 + ["map", "tuple", "anyOf", "oneOf", "types", "allOf"]
    if refs and depth > 0:
        kinds += ["ref"] * 2
    s = globals()["_" + r.choice(kinds)](r, depth, refs)
    if r.random() < 0.1 and "$ref" not in s:
        s["description"] = "some words"
    return s


def document(r):
    """A whole schema, perhaps with definitions that refer to each other."""
    names = ["node", "leaf", "a/b"][: r.choice([0, 0, 1, 2, 3])]
    s = schema(r, 0, names)
    if names:
        defs = {}
        for i, name in enumerate(names):  # a cycle always passes through something that may be left out
            defs[name] = _object(r, 1, names, closed_cycle=True) if i == 0 else schema(r, 2, names[i + 1:])
        s = dict(s)
        s["$defs"] = defs
    return s


def _string(r, depth, refs): return {"type": "string"}
def _boolean(r, depth, refs): return {"type": "boolean"}
def _null(r, depth, refs): return {"type": "null"}
def _number(r, depth, refs): return {"type": "number"}
def _integer(r, depth, refs): return {"type": "integer"}
def _any(r, depth, refs): return {}
def _ref(r, depth, refs): return {"$ref": "#/$defs/" + r.choice(refs).replace("~", "~0").replace("/", "~1")}
def _const(r, depth, refs): return {"const": _value(r, 0)}
def _enum(r, depth, refs): return {"enum": [_value(r, 1) for _ in range(r.randint(1, 5))]}


def _value(r, depth):
    kind = r.randrange(8 if depth < 2 else 6)
    if kind < 2:
        return r.choice(TEXTS)
    if kind < 6:
        return r.choice([0, 1, -1, 42, 2 ** 53, 0.5, -2.25, 1e-7, 3.14159, True, False, None])
    if kind == 6:
        return [_value(r, depth + 1) for _ in range(r.randrange(3))]
    return {r.choice(NAMES): _value(r, depth + 1) for _ in range(r.randrange(3))}


def _bounded(r, depth, refs):
    s = {"type": r.choice(["integer", "number"])}
    lo, hi = sorted(r.choice([r.randint(-12, 12), r.randint(-1000, 100000), r.randint(-10 ** 9, 10 ** 9)]) for _ in range(2))
    if r.random() < 0.7:
        s[r.choice(["minimum", "exclusiveMinimum"])] = lo
    if r.random() < 0.7:
        s[r.choice(["maximum", "exclusiveMaximum"])] = hi + 2
    return s


def _text(r, depth, refs):
    s, kind = {"type": "string"}, r.random()
    if kind < 0.4:
        lo = r.choice([0, 0, 1, 3, 30])
        s["minLength"] = lo
        if r.random() < 0.8:
            s["maxLength"] = lo + r.choice([0, 1, 5, 60])
    elif kind < 0.7:
        s["pattern"] = r.choice(PATTERNS)[0]
    else:
        s["format"] = r.choice(list(FORMATS))
    return s


def _object(r, depth, refs, closed_cycle=False):
    names = r.sample(NAMES, r.randint(0, 5))
    s = {"type": "object", "properties": {n: schema(r, depth + 1, refs) for n in names}}
    s["required"] = [n for n in names if r.random() < 0.5]
    if closed_cycle:  # what refers back may be missing
        s["required"] = [n for n in s["required"] if "$ref" not in json.dumps(s["properties"][n])]
    if r.random() < 0.3:
        s["additionalProperties"] = r.choice([True, False, {"type": "integer"}, {"type": "string", "maxLength": 3}])
    if r.random() < 0.1 and len(s["required"]):
        s["minProperties"] = 1
    return s


def _map(r, depth, refs):
    s = {"type": "object", "additionalProperties": schema(r, depth + 1, refs)}
    if r.random() < 0.3:
        s["maxProperties"] = r.randint(1, 4)
    return s


def _array(r, depth, refs):
    s = {"type": "array", "items": schema(r, depth + 1, refs)}
    lo = r.choice([0, 0, 1, 2]) if "$ref" not in json.dumps(s) else 0
    if lo or r.random() < 0.2:
        s["minItems"] = lo
    if r.random() < 0.5:
        s["maxItems"] = lo + r.choice([0, 1, 3, 30])
    return s


def _tuple(r, depth, refs):
    n = r.randint(1, 3)
    s = {"type": "array", "prefixItems": [schema(r, depth + 1, refs) for _ in range(n)]}
    cyclic = "$ref" in json.dumps(s)
    s["minItems"] = 0 if cyclic else r.randint(0, n)
    s["items"] = r.choice([False, {"type": "null"}])
    if r.random() < 0.3:
        s["maxItems"] = r.randint(s["minItems"], n + 2)
    return s


def _anyOf(r, depth, refs):
    kids = [schema(r, depth + 1, refs) for _ in range(r.randint(1, 3))]
    return {"anyOf": kids + ([{"type": "null"}] if "$ref" in json.dumps(kids) else [])}


def _oneOf(r, depth, refs):
    kids = [{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}, {"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}]
    return {"oneOf": r.sample(kids, r.randint(1, 4))}


def _types(r, depth, refs):
    return {"type": r.sample(["string", "integer", "null", "boolean", "object"], r.randint(1, 3))}


def _allOf(r, depth, refs):
    names = r.sample(NAMES, 4)
    parts = [{"type": "object", "properties": {n: schema(r, 3) for n in names[:2]}, "required": names[:1]},
             {"properties": {n: schema(r, 3) for n in names[2:]}, "required": names[3:]}]
    return {"allOf": parts}


SOUP = {
    "type": lambda r, d: r.choice(["object", "array", "string", "integer", "number", "null", "boolean"]) if r.random() < 0.6
    else r.sample(["object", "array", "string", "integer", "number", "null", "boolean"], 2),
    "properties": lambda r, d: {n: soup(r, d + 1) for n in r.sample(["a", "b", "ab", "$id", "type"], r.randint(0, 3))},
    "required": lambda r, d: r.sample(["a", "b", "c"], r.randint(0, 2)),
    "additionalProperties": lambda r, d: r.choice([True, False, soup(r, d + 1)]),
    "minProperties": lambda r, d: r.randint(0, 2), "maxProperties": lambda r, d: r.randint(0, 3),
    "items": lambda r, d: r.choice([True, False, soup(r, d + 1)]), "prefixItems": lambda r, d: [soup(r, d + 1) for _ in range(r.randint(1, 2))],
    "minItems": lambda r, d: r.randint(0, 2), "maxItems": lambda r, d: r.randint(0, 3), "uniqueItems": lambda r, d: r.random() < 0.5,
    "minLength": lambda r, d: r.randint(0, 3), "maxLength": lambda r, d: r.randint(0, 5), "pattern": lambda r, d: r.choice(PATTERNS)[0],
    "format": lambda r, d: r.choice(list(FORMATS) + ["date-time", "int32", "double"]),
    "minimum": lambda r, d: r.choice([-5, 0, 0.5, 7]), "maximum": lambda r, d: r.choice([-2, 3, 2.5, 99]),
    "exclusiveMinimum": lambda r, d: r.choice([-5, 0, 3.5]), "exclusiveMaximum": lambda r, d: r.choice([9, 1.5]), "multipleOf": lambda r, d: r.choice([1, 2]),
    "enum": lambda r, d: [_value(r, 1) for _ in range(r.randint(1, 3))], "const": lambda r, d: _value(r, 1),
    "anyOf": lambda r, d: [soup(r, d + 1) for _ in range(r.randint(1, 3))], "allOf": lambda r, d: [soup(r, d + 1) for _ in range(r.randint(1, 3))],
    "not": lambda r, d: soup(r, d + 1), "propertyNames": lambda r, d: {"maxLength": 1}, "contains": lambda r, d: soup(r, d + 1),
    "patternProperties": lambda r, d: {"^a": soup(r, d + 1)}, "$ref": lambda r, d: r.choice(["#/$defs/x", "#/$defs/y"]),
    "title": lambda r, d: "words", "default": lambda r, d: 1}


def soup(r, depth=0):
    """Keywords thrown together, of which only some can be kept: most of these are refused."""
    if depth > 3:
        return {"type": "null"}
    kind = r.random()
    groups = [["properties", "required", "additionalProperties", "minProperties", "maxProperties", "allOf", "$ref", "propertyNames", "patternProperties"],
              ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"], ["minLength", "maxLength", "pattern", "format"],
              ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"], ["enum", "const", "anyOf", "not"]]
    keys = r.sample(groups[r.randrange(5)], r.randint(0, 3)) if kind < 0.9 else r.sample(list(SOUP), r.randint(1, 3))
    if r.random() < 0.5:
        keys.append("type")
    out = {k: SOUP[k](r, depth) for k in keys}
    if depth == 0 and "$ref" in json.dumps(out):
        out["$defs"] = {"x": soup(r, 2), "y": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    return out


# ---- instances -----------------------------------------------------------------------------------------------------------


class TooDeep(Exception):
    pass


def instance(r, s, root, depth=0):
    """A value that s allows, as the engine's documentation says it may be written: properties in order, nothing undeclared."""
    if depth > 12:
        raise TooDeep()
    if s is True or not set(s) - {"description", "$defs"}:
        return _value(r, 0)
    if "$ref" in s:
        node = root
        for part in s["$ref"][2:].split("/"):
            node = node[part.replace("~1", "/").replace("~0", "~")]
        return instance(r, node, root, depth + 1)
    if "const" in s:
        return s["const"]
    if "enum" in s:
        return r.choice(s["enum"])
    for key in ("anyOf", "oneOf"):
        if key in s:
            return instance(r, r.choice(s[key]) if depth < 8 else s[key][-1], root, depth + 1)
    if "allOf" in s:
        out = {}
        for part in s["allOf"]:
            out.update(instance(r, {**part, "type": "object"}, root, depth + 1))
        return out
    kind = s["type"] if isinstance(s["type"], str) else r.choice(s["type"])
    if kind == "null":
        return None
    if kind == "boolean":
        return r.random() < 0.5
    if kind in ("integer", "number"):
        lo = s.get("minimum", s.get("exclusiveMinimum", -10 ** 6 - 1) + 1)
        hi = s.get("maximum", s.get("exclusiveMaximum", 10 ** 10 + 1) - 1)
        lo, hi = min(lo, hi) if "minimum" not in s and "exclusiveMinimum" not in s else lo, max(lo, hi)
        x = r.choice([lo, hi, r.randint(lo, hi)])
        if kind == "number" and lo < hi and r.random() < 0.5:
            x = min(max(lo, x - 0.5), hi)
        return x
    if kind == "string":
        return _string_of(r, s)
    if kind == "array":
        lo, hi = s.get("minItems", 0), s.get("maxItems", 99)
        first, rest = s.get("prefixItems", []), s.get("items", True)
        most = min(hi, len(first) if rest is False else max(lo, len(first)) + 3)
        n = r.randint(lo, most) if depth < 6 else lo
        return [instance(r, first[i] if i < len(first) else rest, root, depth + 1) for i in range(n)]
    out, others = {}, s.get("additionalProperties", "properties" not in s)
    for name, sub in s.get("properties", {}).items():
        if name in s.get("required", []) or (depth < 5 and r.random() < 0.5):
            out[name] = instance(r, sub, root, depth + 1)
    if others is not False and depth < 5:
        for _ in range(r.randrange(3)):
            name = r.choice(NAMES + ["other", "naming", "a b", "ü", "\n"])
            if name not in s.get("properties", {}) and len(out) < s.get("maxProperties", 99):
                out[name] = instance(r, others, root, depth + 1)
    return out


def _string_of(r, s):
    if "pattern" in s:
        return r.choice(dict(PATTERNS)[s["pattern"]])
    if "format" in s:
        return FORMATS[s["format"]](r)
    lo, hi = s.get("minLength", 0), s.get("maxLength", 40)
    text = r.choice(TEXTS)
    while len(text) < lo:
        text += r.choice(string.ascii_letters + "é\"\n😀")
    return text[:hi]


def written(r, value):
    """The value as JSON in one of the usual layouts."""
    style = r.randrange(4)
    if style == 0:
        return json.dumps(value, ensure_ascii=False)
    if style == 1:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2 if style == 2 else 4)
