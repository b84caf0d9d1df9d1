"""What a test has found so far, and the judge of texts."""
import datetime
import json
import re

import jsonschema

CHECKER = jsonschema.FormatChecker()


@CHECKER.checks("time", raises=ValueError)
def is_time(text):
    return not isinstance(text, str) or datetime.time.fromisoformat(text.replace("Z", "+00:00")) is not None


BLANKS = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def _pattern(validator, pattern, value, schema):
    """As ECMAScript reads it, where Python differs."""
    text = re.sub(r"(?<!\\)\$", r"\\Z", pattern).replace("\\S", f"[^{BLANKS}]").replace("\\s", f"[{BLANKS}]")
    if isinstance(value, str) and not re.search(text, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def judge(schema, draft=jsonschema.Draft202012Validator):
    return jsonschema.validators.extend(draft, {"pattern": _pattern})(schema, format_checker=CHECKER)


class Score:
    def __init__(self):
        self.passed = self.failed = self.cut = 0

    def check(self, good, what, *context):
        if good:
            self.passed += 1
            return True
        self.failed += 1
        if self.failed <= 20:
            print("FAILED", what, *(f"\n  {c!r:.600}" for c in context))
        return False


def valid(validator, text):
    """None if text is JSON that validates; else the reason."""
    try:
        value = json.loads(text)
        error = next(validator.iter_errors(value), None)
        return error and error.message
    except ValueError as e:
        return str(e)
