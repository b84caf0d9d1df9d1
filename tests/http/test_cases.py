"""The table of known faults names tests that are there."""
import pathlib
import re

HERE = pathlib.Path(__file__).parent


def test_every_case_names_a_test():
    defined = {}
    for f in HERE.glob("test_*.py"):
        defined[f.name] = set(re.findall(r"^def (test_\w+)", f.read_text(), re.M))
    everywhere = set().union(*defined.values())
    rows = [l for l in (HERE / "CASES.md").read_text().splitlines() if re.match(r"\| C\d+ ", l)]
    assert len(rows) >= 50
    for row in rows:
        names = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", row.split("|")[3])
        for file, name in names:
            assert not file or file in defined, row
            assert not name or name in (defined[file] if file else everywhere), row
