"""End to end: --focus, epochs counted, short paths, notes, force_cleanup."""

import re

HEAD = """
import gc, pathlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader
sys.path.insert(0, str(pathlib.Path(__file__).parent))
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def update():
    loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""

METRICS = """
import torch
kept = []

def update():
    kept.append(torch.randn(64, 64))
"""

TWO_LEAKS = (
    HEAD
    + """
import my_metrics
mine = []
for step in range(70):
    update()
    my_metrics.update()
    mine.append(torch.randn(32, 32))
"""
)


def shown(command):
    """Functions and lines of the findings that a text shows."""
    return re.findall(r"allocated at  .*?(\w+\.py):\d+ in (?:<module>|\w+)  +\(", command)


def test_focus_on_a_package(jobs, python):
    jobs.script(METRICS, "my_metrics.py")
    done = jobs.run(python, jobs.script(TWO_LEAKS), options=["--focus", "my_metrics"])
    assert done.code == 0
    assert done.err.count("LEAK") == 1 and "my_metrics.py:6" in done.err, done.err
    assert len(done.report["findings"]) == 2, "the report's data are whole"
    (path,) = done.folder.rglob("report.txt")
    text = path.read_text()
    assert "focus on my_metrics: 1 finding and" in text and "are hidden" in text
    assert text.count("strandline: LEAK  per-iteration") == 1 and "mine.append" not in text
    assert "strandline: LEAK  2 findings" in text, "the verdict is that of the whole run"
    folder = path.parent
    from runner import COMMAND

    other = jobs.bare(COMMAND, "report", folder, "--focus", "train")
    assert "mine.append" in other.out and "focus on train" in other.out
    whole = jobs.bare(COMMAND, "report", folder, "--focus", "")
    assert whole.out.count("LEAK  per-iteration") == 2 and "focus on" not in whole.out


def test_focus_by_the_environment(jobs, python):
    jobs.script(METRICS, "my_metrics.py")
    done = jobs.run(python, jobs.script(TWO_LEAKS), env={"STRANDLINE_CONF": "focus:my_metrics"})
    assert done.err.count("LEAK") == 1 and "my_metrics.py:6" in done.err, done.err


def test_epochs_are_passes_over_the_loader(jobs, python):
    body = """
for epoch in range(12):
    for batch in DataLoader(data, batch_size=4):
        update()
"""
    done = jobs.run(python, jobs.script(HEAD + "data = list(range(20))\n" + body))
    assert (done.report["run"]["epochs"], done.report["run"]["steps"]) == (12, 60)


def test_the_last_line_names_the_report_as_one_types_it(jobs, python):
    done = jobs.run(python, jobs.script(HEAD + "for _ in range(12): update()"), out="here")
    last = done.err.strip().splitlines()[-1]
    assert re.search(r"report: here/rank0-\d+/report\.html$", last), last


def test_tables_of_phases_and_of_the_run(jobs, python):
    done = jobs.run(python, jobs.script(HEAD + "for _ in range(60): update()"))
    text = next(done.folder.rglob("report.txt")).read_text()
    assert re.search(r"trend: allocated flat, reserved flat, peak flat", text), text
    assert re.search(r"host by phase, per step over the last \d+ steps", text)
    (device,) = done.report["devices"]
    phases = {phase["phase"]: phase for phase in device["phases"]}
    flow = device["flow"]
    assert flow["allocated_bytes"] == sum(phase["recent_allocated"] for phase in phases.values())
    assert flow["freed_bytes"] == sum(phase["recent_freed"] for phase in phases.values())
    assert abs(flow["allocated_bytes"] - flow["freed_bytes"]) < 4096
    kept = phases["forward"]["recent_allocated"] - phases["forward"]["recent_freed"]
    returned = phases["backward"]["recent_freed"] - phases["backward"]["recent_allocated"]
    assert kept > 0 and returned > 0, "the forward pass keeps what the backward pass frees"
    assert sum(window["last_step"] - window["first_step"] + 1 for window in device["windows"]) == 60
    assert "docs/findings.md" in text


def test_a_phase_of_the_jobs_own_is_shown_by_its_name(jobs, python):
    body = """
import strandline
for _ in range(60):
    with strandline.phase("rollout"):
        net(torch.randn(64, 8))
    update()
"""
    done = jobs.run(python, jobs.script(HEAD + body))
    assert done.code == 0, done.err
    (device,) = done.report["devices"]
    phases = {phase["phase"]: phase for phase in device["phases"]}
    assert phases["rollout"]["recent_allocated"] > 0, phases
    assert re.search(r"\n  rollout +", next(done.folder.rglob("report.txt")).read_text())


def test_force_cleanup_tells_the_three_apart(jobs, python):
    body = """
class Cycle:
    def __init__(self):
        self.me, self.x = self, torch.zeros(1 << 20)
gc.disable()
for _ in range(12):
    update()
big = torch.zeros(32 << 20)
del big
Cycle()
import strandline
for action, allocated, reserved, objects in strandline.force_cleanup():
    print(action, allocated >= 4 << 20, reserved >= 64 << 20, bool(objects))
"""
    done = jobs.run(python, jobs.script(HEAD + body))
    assert done.out.splitlines() == [
        "gc.collect() True False True",
        "empty the cache False True False",
        "synchronize False False False",
    ], done.out + done.err
    assert "force_cleanup" in done.err
