"""The page of a run, and of several: its content, and its drawing in a browser if there is one."""

import json
import re
import subprocess
import urllib.parse

import pytest

from tests.train.conftest import command
from tests.zoo.browser import COMMAND
from train.watch import page
from train.watch.metrics import MetricsFile


# Simulates a hand that drags over the first chart, from a quarter of it to the half.
DRAG = """<script>
SVGElement.prototype.setPointerCapture = () => {};  // there is no pointer
const first = document.querySelector("svg"), box = first.getBoundingClientRect();
for (const [kind, share] of [["pointerdown", 0.25], ["pointermove", 0.4], ["pointerup", 0.5]])
  first.dispatchEvent(new PointerEvent(kind, {clientX: box.left + share * box.width}));
</script>"""
PROMPT = "</script><script>document.title = 'broken'</script><b>"


def write_run(folder, *, lr=1e-3, steps=40, norms=False, ended=True):
    folder.mkdir()
    file, samples = MetricsFile(folder / "metrics.jsonl"), MetricsFile(folder / "samples.jsonl")
    file.write(0, validation_loss=5.0)
    for step in range(1, steps + 1):
        more = {"validation_loss": 4.0 - step / 20} if step % 10 == 0 else {}
        more |= {f"gradient_norm/layers.{n:02d}": n + 1.0 for n in range(12)} if norms else {}
        loss = float("nan") if step == 7 else 4 - step / steps
        file.write(step, loss=loss, grad_norm=1.0, tokens=100, balance=1.5, reward=0.5, unheard_of=3, flag=True, **more)
        if step % 20 == 0:
            samples.write(step, prompt=PROMPT, text=f"what step {step} says")
    start = {"time": 1e9, "step": 0, "versions": {"jax": "0.10.2"}, "commit": "abc"}
    end = {"ended": {"time": 1e9 + 60, "step": steps}} if ended else {}
    about = {
        "identity": {"model": "tiny", "data": {"sets": [{"files": {"words.jsonl": "f00d"}}]}, "config": {"layers": 2}},
        "options": {"--lr": lr, "--steps": steps},
        "starts": [start | end],
    }
    (folder / page.RUN).write_text(json.dumps(about))
    return folder


def data_of(path):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def test_the_slowest_process():
    """The slowest of the present processes is found by medians, since each process is late at times."""
    lines = [{"step": n, "own_seconds": [0.1, 9.0 if n == 5 else 0.2, 0.9]} for n in range(1, 10)]
    told = "process 2: 0.9 s of its own a step; the median process has 0.2 s"
    assert page.slowest([{"step": 0, "own_seconds": [5.0] * 4}, *lines]) == {"slowest process": told}
    assert page.slowest([{"step": 1, "loss": 2.0}]) == {}


def test_a_run(tmp_path, capsys):
    run = write_run(tmp_path / "patient")
    (run / page.GOODPUT).write_text('{"seconds": {"step": 30.0, "compile": 10.0, "away": 5.0, "lost": 0.0}}')
    command("train.report", run)
    assert "patient/report.html" in capsys.readouterr().out
    text, data = (run / page.REPORT).read_text(), data_of(run / page.REPORT)
    assert "{{" not in text and "http://www.w3.org/2000/svg" in text
    assert re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org)", text) == [], "nothing is fetched"
    (drawn,) = data["runs"]
    assert drawn["state"] == "Finished, at step 40 of 40" and not drawn["running"] and data["refresh"] == 0
    loss = drawn["curves"]["loss"]
    assert loss["bad"] == [7] and len(loss["steps"]) == len(loss["values"]) == 39 and 7 not in loss["steps"]
    assert drawn["tokens"]["values"][-1] == 4000 and "flag" not in drawn["curves"]
    charts = {section["title"]: [(c["title"], c["keys"]) for c in section["charts"]] for section in data["sections"]}
    assert charts["Learning"] == [("loss", ["loss", "validation_loss"]), ("grad_norm", ["grad_norm"])]
    assert charts["Rewards"] == [("reward", ["reward"])] and charts["Mixture of experts"] == [("balance", ["balance"])]
    assert ("unheard_of", ["unheard_of"]) in charts["Other"]
    assert [(sample["step"], sample["prompt"]) for sample in drawn["samples"]] == [(20, PROMPT), (40, PROMPT)]
    tables = {table["title"]: dict(table["rows"]) for table in data["tables"]}
    assert tables["Options"]["--lr"] == "0.001" and tables["Data"] == {"sets.0.files.words.jsonl": "f00d"}
    assert tables["Goodput"] == {"step": "30.0 s, 75.0%", "compile": "10.0 s, 25.0%", "away": "5.0 s"}
    assert tables["Start"]["commit"] == "abc" and "to step 40" in str(tables["Starts"])


def test_runs_compared(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=1e-2, steps=60, norms=True, ended=False)]
    command("train.compare", *runs, "--out", tmp_path / "both.html")
    data = data_of(tmp_path / "both.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b"] and data["refresh"] == page.REFRESH
    assert data["tables"][0]["title"] == "What differs"
    drawn = (tmp_path / "both.html").read_text()
    assert 'title === "What differs" ? "differs"' in drawn and drawn.index('id="differs"') < drawn.index('id="charts"')
    assert data["tables"][0]["rows"] == [["--lr", "0.001", "0.01"], ["--steps", "40", "60"]]
    (norms,) = next(section["charts"] for section in data["sections"] if section["title"] == "Layers")
    assert norms["title"] == "gradient_norm" and norms["keys"] == [f"gradient_norm/layers.{n:02d}" for n in range(12)]
    with pytest.raises(SystemExit, match=r"empty has no metrics\.jsonl"):
        command("train.report", tmp_path / "empty")


def test_old_and_damaged_runs(tmp_path):
    """Runs of versions that wrote less, or with a truncated run.json, are drawn with the data that they have."""
    run = write_run(tmp_path / "old")
    (run / page.RUN).write_text('{"identity": {}, "opt')
    (run / "samples.jsonl").unlink()
    page.write([run], run / page.REPORT)
    data = data_of(run / page.REPORT)
    assert data["runs"][0]["state"] == "Stopped, at step 40" and data["tables"] == []


def test_a_long_run_is_thinned(tmp_path):
    """A run of more than 2,000 points is thinned to the lowest and highest ones, so that no spike is lost."""
    points = lambda count: [{"step": n, "loss": n % 7 / 100} for n in range(count)]
    whole, thinned = (page.curves(points(2 * page.BUCKETS + more))["loss"]["steps"] for more in (0, 1))
    assert list(whole) == list(range(2 * page.BUCKETS)) and len(thinned) <= 2 * page.BUCKETS
    lines = [{"step": n, "loss": 100.0 if n == 33_333 else 1.0 + n % 7 / 100} for n in range(100_000)]
    curve = page.curves(lines)["loss"]
    assert len(curve["steps"]) <= 2 * page.BUCKETS + 2 and curve["steps"][-1] == 99_999
    assert curve["values"][curve["steps"].index(33_333)] == 100.0 and min(curve["values"]) == 1.0


@pytest.mark.skipif(COMMAND is None, reason="no chromium or chrome on PATH")
def test_in_a_browser(tmp_path):
    """The page's script runs to the end, draws each curve, writes samples as text, and zooms as its address says."""
    run = write_run(tmp_path / "seen", norms=True)
    page.write([run], run / page.REPORT)

    def dom(path=run / page.REPORT, **view):
        address = path.as_uri() + "#" + urllib.parse.quote(json.dumps(view))
        flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
        return subprocess.run([COMMAND, *flags, address], capture_output=True, text=True, timeout=60).stdout

    whole = dom()
    assert "<title>seen</title>" in whole and f'data-drawn="{whole.count("<svg")}"' in whole
    assert whole.count('data-key="') == 2 + 1 + 1 + 1 + 1 + 1 + 12, "a path for each curve"
    assert "&lt;script&gt;document.title = 'broken'&lt;/script&gt;&lt;b&gt;" in whole and "what step 40 says" in whole
    line = lambda text: re.findall(r'd="([^"]*)" data-key="loss"', text)[0]
    zoomed = dom(**{"from": 10, "to": 20})
    assert line(zoomed) != line(whole) and ">14</text>" in zoomed and ">14</text>" not in whole
    assert line(dom(log=True)) != line(whole) and dom(off=["loss"]).count('data-key="loss"') == 0
    assert ">4000</text>" in dom(x="tokens")
    dragged = tmp_path / "dragged.html"
    dragged.write_text((run / page.REPORT).read_text().replace("</body>", f"{DRAG}</body>"))
    assert ">12</text>" in dom(dragged) and ">12</text>" not in whole, "all charts show steps 6 to 17"
