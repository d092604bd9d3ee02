"""The page that a run ends with, that of several, and both in a browser."""

import html
import json
import math
import re
import shlex
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest

from tests.lib.cli_support import python
from tests.lib.nightly import nightly
from tests.lib.run_support import go, shell
from trainer.assemble.shown_samples import _by_loss
from trainer.core.errors import TrainError
from trainer.features.page import page as page_module

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

# Tells what the page is like by its title, once it was drawn over another axis.
PROBE = """
<script>
  let injected = 0;
  const faults = [], refused = [], wide = document.documentElement;
  addEventListener("error", (event) => faults.push(event.message));
  addEventListener("securitypolicyviolation", (event) => refused.push(event.violatedDirective));
  // Behind errors of images, which come on their own time.
  addEventListener("load", () => setTimeout(() => {
    const path = () => document.querySelector("figure path").getAttribute("d");
    const before = path();
    document.querySelector("[data-x=tokens]").click();
    const after = path(), set = (name, kind, values) => {
      const input = Object.assign(document.getElementById(name), values);
      input.dispatchEvent(new Event(kind));
    };
    set("log", "change", { checked: true });
    set("smooth", "input", { value: 0.5 });
    const changed = path(), svg = document.querySelector("figure svg");
    const at = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + at.width / 2 }));
    const read = document.querySelector("figcaption span").textContent;
    document.getElementById("theme").click();
    const theme = wide.dataset.theme;
    const seen = { width: innerWidth, scroll: wide.scrollWidth, before, after };
    Object.assign(seen, { changed, read, theme, faults, refused, injected });
    document.body.insertAdjacentHTML("beforeend", `<pre id="probe">${JSON.stringify(seen)}</pre>`);
  }, 500));
</script>
"""
INJECTED = "<script>injected = 1</script><img src='data:,' onerror='injected = 2'>"


def hash_of(script):
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def test_a_run_ends_with_its_page_and_two_are_compared(capsys):
    with mock.patch.object(page_module, "write_page", wraps=page_module.write_page) as written:
        first = go("steps=4 eval.every=2")
    assert [call.args[1] for call in written.call_args_list] == [first.folder / "report.html"]
    second = go("steps=4 eval.every=2 optimizer.lr=0.003")
    page = (first.folder / "report.html").read_text()
    assert "completed</span>" in page
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert f"default-src 'none'; script-src {hash_of(script)}; " in policy
    assert "http" not in policy
    assert f"{first.result['eval_loss']:.4f}" in page
    assert page.count('class="rank"') == 1
    shown = [line for line in capsys.readouterr().out.splitlines() if "report.html" in line]
    assert len(shown) == 2
    before = {path.name for path in first.folder.iterdir()}
    with pytest.raises(TrainError, match="not finite"):
        go("steps=9 optimizer.lr=1e30 nonfinite.limit=1")
    failed = max(first.folder.parent.glob("*/status.json"), key=lambda path: path.stat().st_mtime)
    assert "failed</span>" in (failed.parent / "report.html").read_text()
    assert shell(f"report run={first.folder},{second.folder}") == 0
    both = Path("outputs/report.html").read_text()
    table = both.partition('<table class="runs">')[2].partition("</table>")[0]
    assert re.findall(r'data-head="([^"]*)"', table)[0] == "optimizer.lr"
    assert ">0.003</td>" in table
    assert f'<a href="{first.folder.relative_to(Path("outputs").absolute())}/report.html">' in table
    assert {path.name for path in first.folder.iterdir()} == before


def test_a_page_is_made_without_torch(tmp_path):
    run = go("steps=1")
    code = (
        "import sys; from trainer.cli.main import run;"
        f"assert run(['report', 'run={run.folder}']) == 0; assert 'torch' not in sys.modules"
    )
    done = python(shlex.join(["-c", code]), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_worst_samples_are_shown_with_their_texts(capsys):
    run = go("steps=2")
    assert "eval.predictions=true" in (run.folder / "report.html").read_text()
    assert shell(f"evaluate run={run.folder} trust=[tests] eval.predictions=true") == 0
    worst = json.loads((run.folder / "evaluate.json").read_text())["worst"]
    losses = [line["loss"] for line in worst]
    assert losses == sorted(losses, reverse=True)
    page = (run.folder / "report.html").read_text()
    assert all(line["text"] for line in worst)
    assert f"id {worst[0]['id']}" in page
    order = sorted([{"loss": each} for each in (1.0, math.nan, 3.0, math.inf)], key=_by_loss)
    assert [math.isfinite(each["loss"]) for each in order] == [False, False, True, True]
    assert order[2]["loss"] == 3.0


@pytest.mark.parametrize("width", [nightly(360), nightly(1200)])
def test_a_browser_draws_it_and_nothing_scrolls_sideways(tmp_path, width):
    assert BROWSER, "no Chromium is installed"
    run = go("steps=6 eval.every=2")
    text = (run.folder / "report.html").read_text()
    # A window has a least width; a frame has not.
    inner = tmp_path / "inner.html"
    own = hash_of(PROBE.strip().removeprefix("<script>").removesuffix("</script>"))
    text = text.replace("script-src ", f"script-src {own} ", 1)
    inner.write_text(text.replace("<script type", f"{PROBE}{INJECTED}<script type", 1))
    outer = f'<iframe src="inner.html" width="{width}" height="900"></iframe>'
    outer += "<script>onload = () => setTimeout(() => { document.body.textContent ="
    outer += " frames[0].document.getElementById('probe').textContent; }, 1000);</script>"
    (tmp_path / "outer.html").write_text(f"<!doctype html><body>{outer}</body>")
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    argv += ["--allow-file-access-from-files", "--virtual-time-budget=3000"]
    argv += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "outer.html").as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(re.search(r"\{.*\}", done.stdout, re.DOTALL)[0])
    assert seen["faults"] == []
    assert (seen["injected"], seen["refused"]) == (0, ["script-src-elem", "script-src-attr"])
    assert seen["width"] == width
    assert seen["scroll"] <= width
    assert seen["before"].startswith("M")
    assert len({seen["before"], seen["after"], seen["changed"]}) == 3
    assert re.match(r"tokens \d+training [\d.]+held out [\d.]+$", seen["read"])
    assert seen["theme"] == "dark"
