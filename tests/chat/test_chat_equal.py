"""Our chat templates against jinja2, set up as the common library for checkpoints sets it up.

Three parts: the templates in templates/ (each in the manner of a family of models) over random conversations; a list of
snippets, one per construct; and random templates out of a small grammar. What we answer must equal jinja2's answer byte for
byte; where jinja2 raises, we must refuse, and the other way round.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import warnings

import jinja2
import jinja2.ext
import jinja2.sandbox

warnings.simplefilter("ignore", SyntaxWarning)  # random templates index numbers
HERE = pathlib.Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_plain"), [], [], body).set_lineno(line)

    def _plain(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


ENV = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                   extensions=[Generation, jinja2.ext.loopcontrols])
ENV.filters["tojson"] = lambda x, indent=None, ensure_ascii=False: json.dumps(x, ensure_ascii=ensure_ascii, indent=indent)
ENV.globals["raise_exception"] = raise_exception


class Driver:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, template, variables):
        line = json.dumps({"template": template, "tokens": TOKENS, "variables": json.dumps(variables, ensure_ascii=False)},
                          ensure_ascii=False)
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def reference(template, variables):
    try:
        return ENV.from_string(template).render(**TOKENS, **variables), None
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError,
            IndexError) as e:
        return None, e


# ---- conversations

WORDS = ["hello", "a", "I", "<|im_end|>", "<|im_start|>system", "</think>", "<think>", "\n", "\n\n", " ", "  x ", "é", "日本", "🙂",
         "{{ x }}", "{% if %}", "'quote'", '"double"', "\\n", "\t", "<s>", "</s>", "\u00a0", "\u3000", "\u2028", "42", "<tool_response>",
         "</tool_response>", ""]


def text(rng):
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


def value(rng, depth=2):
    kinds = [lambda: text(rng), lambda: rng.randrange(-5, 100), lambda: rng.random() < 0.5, lambda: None, lambda: rng.random() * 100,
             lambda: rng.choice([1e22, 0.1, 1e-7, 100.0, 2.5e15])]
    if depth:
        kinds += [lambda: [value(rng, depth - 1) for _ in range(rng.randrange(3))],
                  lambda: {f"k{i}": value(rng, depth - 1) for i in range(rng.randrange(3))}]
    return rng.choice(kinds)()


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    for i in range(rng.randrange(1, 7)):
        role = "user" if i % 2 == 0 else "assistant"
        if rng.random() < 0.1:
            role = rng.choice(["user", "assistant", "tool", "system"])
        message = {"role": role, "content": text(rng)}
        if rng.random() < 0.1:
            message["content"] = [{"type": "text", "text": text(rng)}, rng.choice([{"type": "image_url"}, {"type": "text", "text": "t"}])]
        if role == "assistant" and rng.random() < 0.3:
            message["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": value(rng), "y": text(rng)}}}
                                     for _ in range(rng.choice([1, 1, 1, 2]))]
        if role == "assistant" and rng.random() < 0.2:
            message["reasoning_content"] = text(rng)
        messages.append(message)
    variables = {"messages": messages, "add_generation_prompt": rng.random() < 0.7}
    if rng.random() < 0.3:
        variables["enable_thinking"] = rng.random() < 0.5
        variables["preserve_thinking"] = rng.random() < 0.5
    if rng.random() < 0.2:
        variables["tools"] = [value(rng), {"type": "function", "function": {"name": "f", "parameters": value(rng)}}]
    return variables


# ---- one construct each: must equal jinja2 in result, or both must refuse

SNIPPETS = r"""
{{ 'a' 'b' }}|{{ "x\n\t\\\"y\u00e9\x41\q" }}|{{ 1 + 2 * 3 - 4 }}|{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 4 / 2 }}
{{ 1.5 + 1 }} {{ 2.0 * 3 }} {{ 0.1 + 0.2 }}|{{ 'a' ~ 1 ~ none ~ true ~ x }}|{{ x }}|{{ x.y }}|{{ x['y'] }}|{{ none.y }}|{{ 'a'.y }}
{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ 'abc'[5] }}|{{ 'äöü'[1] }}{{ 'äöü'[1:] }}{{ 'äöü'[:-1] }}{{ 'abc'[5:] }}|{{ [1,2,3][::-1]|join(',') }}
{{ [1,2,3,4,5][1:4:2]|join }} {{ [1,2,3][-2:]|join }} {{ [1,2,3][:-5]|join }} {{ [1,2,3][10::-1]|join }}|{{ 'a' in 'cat' }} {{ 'z' not in 'cat' }}
{{ 1 in [1,2] }} {{ 'k' in {'k': 1} }} {{ 'a' in x }}|{{ 1 in 'abc' }}|{{ not true or true and false }}|{{ '' or 'b' }} {{ 0 and 1 }} {{ 'a' and 'b' }}
{{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 'a' }} {{ [1] == [1] }} {{ none == x }} {{ x == y }} {{ {'a':1} == {'a':1} }}|{{ 1 < 2 }} {{ 'a' < 'b' }} {{ 2 >= 2 }}
{{ 1 < 'a' }}|{{ 'a' + 1 }}|{{ 'a' + x }}|{{ 'a' * 3 }}|{{ [1] + [2] }}|{{ ([1] + [2])|length }}|{{ -3 }} {{ - 3 + 1 }} {{ -x }}|{{ 1 if true else 2 }}
{{ 1 if false }}|{{ 'a' if x else 'b' if y else 'c' }}|{{ x is defined }} {{ x is undefined }} {{ x is not defined }} {{ messages is defined }}
{{ none is none }} {{ 1 is none }} {{ 'a' is string }} {{ 1 is number }} {{ 1.5 is number }} {{ true is number }} {{ true is boolean }} {{ 1 is integer }} {{ 1.5 is float }}
{{ {} is mapping }} {{ [] is sequence }} {{ 'a' is iterable }} {{ 'a' is sequence }} {{ 1 is iterable }} {{ true is true }} {{ 1 is true }} {{ false is false }}
{{ 3 is odd }} {{ 3 is even }} {{ 3 is eq 3 }} {{ 3 is equalto(4) }} {{ 3 is ne 4 }} {{ 3 is in [3] }}|{{ '  a b '|trim }}.{{ ' a '.strip() }}.{{ 'xxaxx'.strip('x') }}
{{ 'xya'.lstrip('xy') }} {{ 'ayx'.rstrip('xy') }} {{ '\u3000a\u00a0'|trim }}.|{{ 'a b  c'.split() | join('|') }} {{ 'a,b,,c'.split(',')|join('|') }} {{ 'a,b,c'.split(',', 1)|join('|') }}
{{ ' a b '.split(' ')|length }} {{ ''.split(',')|length }} {{ ''.split()|length }} {{ 'a  b c '.split(none, 1)|join('|') }}|{{ 'aXbX'.replace('X', 'yy') }} {{ 'aaa'|replace('a','b',2) }} {{ 'aa'.replace('b','c') }}
{{ 'Ab'|upper }} {{ 'Ab'|lower }} {{ 'aB cD'|capitalize }} {{ 'é'.upper() }}|{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('c') }} {{ 'abc'.find('c') }} {{ 'abc'.find('z') }}
{{ x|default('d') }} {{ ''|default('d') }} {{ ''|default('d', true) }} {{ none|default('d') }} {{ x|default }} {{ ''|d('e', boolean=true) }}
{{ [3,1]|first }} {{ [3,1]|last }} {{ []|first }} {{ 'abc'|list|join('-') }} {{ 'abc'|length }} {{ {'a':1}|length }} {{ 'äb'|length }} {{ x|length }}|{{ 3|length }}
{{ '12'|int }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ 3.9|int }} {{ ' 5 '|int }} {{ '-4'|int }} {{ true|int }}|{{ 5|string + 'a' }} {{ 1.0 }}|{{ 100000.0 * 100000000000.0 * 10.0 }} {{ 10.0 / 3 }}
{{ {'a': [1, 2.5, none, true, 'x"\n\u0001é']}|tojson }}|{{ {'a': [1, {}], 'b': []}|tojson(indent=2) }}|{{ 'a/b<c>&\u2028'|tojson }}|{{ x|tojson }}
{% for i in range(3) %}{{ i }}{% endfor %}{% for i in range(5, 1, -2) %}{{ i }}{% endfor %}{% for i in range(0) %}{% else %}none{% endfor %}|{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}{{ b }}{% endfor %}
{% for k in {'x': 1} %}{{ k }}{% endfor %}{% for c in 'añb' %}[{{ c }}]{% endfor %}{% for q in x %}{{ q }}{% else %}E{% endfor %}|{% for q in none %}{% endfor %}|{% for q in 3 %}{% endfor %}
{% for i in [1,2,3,4] if i is even %}{{ loop.index }}{{ i }}{{ loop.last }}{{ loop.length }} {% endfor %}|{% for i in [1,2,3] %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}|{% set a = 1 %}{% for i in [1] %}{% set a = 2 %}{{ a }}{% endfor %}{{ a }}
{% set ns = namespace(a=1, b='x') %}{% for i in [1,2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}|{% set t %}x{{ 1 }}y{% endset %}[{{ t }}]{{ t|length }}|{% if x %}a{% elif 1 %}b{% else %}c{% endif %}
{% set a = (1, 2) %}{{ a[0] }}{{ a|length }}|{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }},{% endfor %}|{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}|{{ raise_exception('no ' + 'way') }}|{{ ['a', 'b', 'c']|reject('equalto', 'b')|join(',') }}
{{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': 1}.keys()|join }} {{ {'a': 1}.values()|join }} {{ {'a': 1}['a'] }} {{ {'a': 1}.a }}|{{ ', '.join(['a', 'b']) }}|{{ ['b']|join(x) }}
{{ 1 // 0 }}|{{ 1 / 0 }}|{{ 'a'.strip(1) }}|{{ none.strip() }}|{{ x.strip() }}|{{ 3.upper() }}|{{ ''.split('') }}|{{ x() }}|{{ 'a' 'b' if 1 else 'c' }}|{{ (1 + 2) * 3 }}|{{ [1, [2, 3]][1][0] }}|{{ [1,2,]|length }} {{ {'a': 1,}|length }}
{{ messages[0].content }}|{{ messages[-1]['role'] }}|{{ messages[99] }}|{{ messages[99].content }}|{{ messages|length }}|{{ messages[0]|tojson }}|{{ 1 if messages[0].role == 'user' and messages[0].content is string else 2 }}
{% macro f(a, b=2) %}[{{ a }}{{ b }}]{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(b=4, a='x') }}{{ f() }}{{ f(y) }}|{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}|{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(c=2) }}|{{ f(1) }}{% macro f(a) %}{{ a }}{% endmacro %}|{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}|{% macro f(a, b=a ~ '!') %}{{ b }}{% endmacro %}{{ f('q') }}
{% macro f() %}{{ i }}{{ x }}{{ t }}{% endmacro %}{% set t = 'top' %}{% for i in [1, 2] %}{{ f() }}{% endfor %}|{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}G{% endmacro %}{{ f() }}|{% macro f() %}{% set t = 2 %}{{ t }}{% endmacro %}{% set t = 1 %}{{ f() }}{{ t }}
{% set ns = namespace(n=0) %}{% macro f(k) %}{% set ns.n = ns.n + k %}{% endmacro %}{{ f(2) }}{{ f(3) }}{{ ns.n }}|{% macro f(m) %}{% for c in m %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}{% endmacro %}{% for m in ['abc', 'xyz'] %}{{ f(m)|upper }};{{ f(m ~ 'b')|length }}{% endfor %}
{% macro f(c) -%} {%- if c is string -%} {{- c -}} {%- else -%} {%- for p in c -%} {{- f(p) ~ loop.index -}} {%- endfor -%} {%- endif -%} {%- endmacro -%} {{ f(['a', ['b', 'c']]) }} {{ f(messages[0].content) == messages[0].content }}|{% macro f() %}{{ loop }}{% endmacro %}{% for i in [1] %}{{ f() }}{% endfor %}
{% macro f() %}{{ g() }}{% endmacro %}{{ f() }}{% macro g() %}G{% endmacro %}|{% macro f(m) %}{{ m }}{% endmacro %}{{ f(f(f(1))) }}|{% macro f(a) %}{% set x = a %}{{ x }}{% endmacro %}{{ f(1) }}{{ x }}|{{ messages|tojson(ensure_ascii=false) }}|{{ 'é'|tojson(ensure_ascii=False, indent=2) }}
{{ messages[0].content|upper }}|{{ messages[0]['content'].split(' ')[-1] }}|{{ 1.5 // 1 }}|{{ [1,2,3]|reverse|join }}|{{ ([]|reverse|list|join) ~ 'x' }}|{{ 'a' not in ['b'] and not 'b' in ['c'] }}|{{ not x is defined }}|{{ 2 - -1 }}|{{ true + 1 }}
"""
SPACES = ["a\n  {% if 1 %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if 1 -%}\n  b  {%- endif %}\n\nc", "a {%+ if 1 %} b\n{% endif +%}\nc\n\n", "x{# c #}\ny", " {# c #}\ny\n",
          "x {#- c -#} y", "  {{ 1 }}\n {{- 2 }}\n{{ 3 -}} \n z", "\r\na\r{% if 1 %}\r\nb{% endif %}\r\n", "{% if 1 %}{% endif %}  {% if 1 %}\n{% endif %} \n", "\t{% set a = 1 %}\n\t{{ a }}\n",
          "{{ '}}' }}{{ '%}' }}{{ {'a': {'b': 1}}['a']['b'] }}", "{% if 1 %}\n\n\nx{% endif %}", "a\n{#\n#}\nb", "   {%- if 1 %}   {%- endif %}  ", "{%- set a -%}\n q \n{%- endset -%}\n[{{ a }}]",
          "x\n    {% if 1 %}y{% endif %}\n", "x{% if 1 %}\n    {% if 1 %}\n    y\n    {% endif %}\n{% endif %}", "{{ 1 }}\n  {% if 1 %}\nq\n  {%- endif +%}\nr"]
REFUSED = {"{% if 1 %}{% macro f() %}{% endmacro %}{% endif %}": "'macro'", "{% macro f() %}{% endmacro %}{% macro f() %}{% endmacro %}": "'f'",
           "{% macro f() %}{% endmacro %}{{ f }}": "only be called", "{% macro f(a=1, b) %}{% endmacro %}": "without a default",
           "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "32 deep", "{% macro range() %}{% endmacro %}": "'range'", "{% call f() %}{% endcall %}": "'call'",
           "\n\n{% include 'x' %}": "line 3", "{{ x|urlize }}": "'urlize'", "{{ x is upper }}": "'upper'",
           "{{ x.encode() }}": "'encode'", "{{ lipsum() }}": "'lipsum'", "{{ 2 ** 3 }}": "'**'", "{% raw %}{% endraw %}": "'raw'", "{% for x in y recursive %}{% endfor %}": "'recursive'",
           "{{ 1 < 2 < 3 }}": "comparisons", "{% if 1 %}": "ends inside", "{{ 1 ": "no end", "{% endif %}": "'endif'", "{{ 'a }}": "no end", "{# x": "no end", "{{ }}": "missing", "{{ a b }}": "goes on"}


# ---- random templates

def expr(rng, depth):
    if depth == 0:
        return rng.choice(["1", "2", "-3", "'a'", "' b\\n'", "x", "none", "true", "false", "m.content", "m['role']", "messages[0].content", "messages",
                           "[1, 'b']", "{'a': 1}", "''", "loop.index0", "bos_token", "1.5", "m"])
    e = lambda: expr(rng, depth - 1)  # noqa: E731
    return rng.choice([
        lambda: f"({e()} + {e()})", lambda: f"({e()} ~ {e()})", lambda: f"({e()} == {e()})", lambda: f"({e()} and {e()})",
        lambda: f"({e()} or {e()})", lambda: f"(not {e()})", lambda: f"({e()} in {e()})", lambda: f"({e()} is {rng.choice(['defined', 'string', 'none', 'mapping', 'number', 'not string'])})",
        lambda: f"({e()} | {rng.choice(['trim', 'length', 'upper', 'default(1)', 'tojson', 'list', 'first', 'last', 'string', 'capitalize'])})",
        lambda: f"({e()} if {e()} else {e()})", lambda: f"{e()}[{rng.choice(['0', '-1', ':1', '1:', '::-1', '0:2'])}]",
        lambda: f"{e()}.{rng.choice(['strip()', 'split()', 'upper()', 'role', 'split(' + chr(39) + 'a' + chr(39) + ')[0]', 'lstrip()'])}",
        lambda: f"({e()} {rng.choice(['-', '*', '//', '%', '<', '>=', '!='])} {e()})"])()


def block(rng, depth):
    out = ""
    for _ in range(rng.randrange(1, 4)):
        sign = lambda: rng.choice(["", "", "-"])  # noqa: E731
        gap = rng.choice(["", " ", "\n", "\n  ", "x", " y\n", "<|im_end|>"])
        kind = rng.randrange(5 if depth else 2)
        inner = block(rng, depth - 1) if kind > 1 else ""
        out += gap
        if kind < 2:
            out += f"{{{{{sign()} {expr(rng, rng.randrange(3))} {sign()}}}}}"
        elif kind == 2:
            out += f"{{%{sign()} if {expr(rng, 1)} {sign()}%}}{inner}{{%{sign()} else {sign()}%}}{gap}{{%{sign()} endif {sign()}%}}"
        elif kind == 3:
            out += f"{{%{sign()} for m in messages {sign()}%}}{inner}{{%{sign()} endfor {sign()}%}}"
        else:
            out += f"{{%{sign()} set x = {expr(rng, 2)} {sign()}%}}{inner}"
    return out


# Where we are narrower than Python on purpose: a prompt has no use for these, and a sentence beats a surprise.
NARROWER = ["cannot be written as text", "has no slices", "slice of a string can only", "wants whole numbers here", "cannot compare a list",
            "' cannot take "]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--bin", required=True)
    args.add_argument("--random", type=int, default=4000)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--template", action="append", default=[], help="more templates: files, or tokenizer_config.json")
    args = args.parse_args()
    driver, rng = Driver(args.bin), random.Random(args.seed)
    passed = failed = skipped = refused = 0

    def check(name, template, variables):
        nonlocal passed, failed, skipped, refused
        want, why = reference(template, variables)
        got = driver.ask(template, variables)
        if why is None and any(part in got.get("error", "") for part in NARROWER):
            skipped += 1
            return
        good = got.get("text") == want if why is None else "error" in got
        if good and why is None:  # nothing of the conversation may count as template text
            secret = [json.dumps(m["content"]) for m in variables["messages"]]
            marked = "".join(c for c, p in zip(got["text"].encode().decode("latin-1"), got["plain"]) if p == "0")
            good = not any("<|secret|>" in s for s in secret) or "<|secret|>" not in marked
        passed, failed = passed + good, failed + (not good)
        refused += why is not None
        if not good and failed < 8:
            print(f"{name}: {template[:300]!r}\n  over {json.dumps(variables, ensure_ascii=False)[:400]}\n"
                  f"  jinja2: {str(want)[:300]!r} {why!r}\n  ours:   {str(got)[:400]}")

    files = sorted((HERE / "templates").glob("*.jinja"))
    templates = {f.stem: f.read_text() for f in files}
    for extra in args.template:
        content = pathlib.Path(extra).read_text()
        templates[extra] = json.loads(content)["chat_template"] if extra.endswith(".json") else content
    for name, template in templates.items():
        for _ in range(150):
            variables = conversation(rng)
            if rng.random() < 0.3:
                message = rng.choice(variables["messages"])
                if isinstance(message["content"], str):
                    message["content"] += "<|secret|>"
                else:
                    message["content"][0]["text"] += "<|secret|>"
            check(name, template, variables)
    fixed = {"messages": [{"role": "user", "content": "Hello  there"}, {"role": "assistant", "content": "Hi <|im_end|>"}]}
    for line in SNIPPETS.strip().splitlines():
        for snippet in split_snippets(line):
            check("snippet", snippet, fixed)
    for template in SPACES:
        check("spaces", template, fixed)
    for template, part in REFUSED.items():
        got = driver.ask(template, fixed)
        good = part in got.get("error", "")
        passed, failed = passed + good, failed + (not good)
        if not good:
            print(f"refused: {template!r} should be refused with {part!r}: {got}")
    for _ in range(args.random):
        check("random", block(rng, 2), conversation(rng))
    print(f"{skipped} answers left out: values that we refuse on purpose; jinja2 refused {refused}, and so did we")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


def split_snippets(line):
    """Snippets of a line stand between '|' outside of any tag."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(line):
        if line.startswith(("{{", "{%"), i):
            depth += 1
        if line.startswith(("}}", "%}"), i) and depth:
            depth -= 1
        if c == "|" and depth == 0 and not line[:i].endswith("{"):
            out.append(line[start:i])
            start = i + 1
    return [*out, line[start:]]


sys.exit(main())
