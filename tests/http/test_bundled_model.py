"""What README shows of the bundled model: a digit walk that gets one operation further per loop, and a resume that turns a
wrong answer right; with both of its artifacts."""
import pathlib
import re

import pytest

from daemon import Daemon
from reuse import post, put

ROOT = pathlib.Path(__file__).resolve().parents[2]
WALK = re.search(r'^walk="(.*)"$', (ROOT / "README.md").read_text(), re.M).group(1)


def steps(walk):
    """The last digit after each operation, as a user reads them."""
    value, out = int(re.match(r"Start with (\d)\.", walk).group(1)), []
    for add, take, double in re.findall(r"Add (\d)\.|Take away (\d)\.|(Double it)\.", walk):
        value = (2 * value if double else value + int(add) if add else value - int(take)) % 10
        out.append(str(value))
    return out


@pytest.fixture(scope="module", params=["", "int4"])
def demo(request):
    d = Daemon(ROOT / "config/demo-model" / request.param, "--model-name", "demo-model")
    yield d
    d.stop()


def chat(d, content, **fields):
    return post(d, "/v1/chat/completions", {"model": "demo-model", "temperature": 0, "messages": [{"role": "user", "content": content}],
                                            **fields}, 200)


def test_each_loop_gets_one_operation_further(demo):
    wanted = steps(WALK)
    assert wanted == ["7", "4", "9", "5", "0", "9"]
    for loops in range(1, 17):
        r = chat(demo, WALK, loops=loops)
        assert r["choices"][0]["message"]["content"] == wanted[min(loops, len(wanted)) - 1], loops
        assert r["choices"][0]["finish_reason"] == "stop"


def test_a_resume_turns_the_wrong_answer_right(demo):
    put(demo, "/v1/resume_handles/walk", {"prompt": f"<|user|>{WALK}<|assistant|>", "loops_used": 2, "max_loops": 8})
    for loops, wanted in ((2, "4"), (8, "9")):
        r = post(demo, "/v1/completions", {"model": "demo-model", "temperature": 0, "resume": {"handle": "walk", "loops": loops}}, 200)
        assert r["choices"][0]["text"] == wanted
        used = r["tinyloop"]["reuse"]
        assert (used["iterations_run"], used["iterations_skipped"]) == (loops - 2, 2)


def test_a_stranger_gets_an_honest_answer(demo):
    r = chat(demo, "What is the capital of France?")
    assert "I only know small stories and puzzles" in r["choices"][0]["message"]["content"]
