"""`strandline check`, `diff` and `merge` as CI and a person call them."""

import copy
import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET

import pytest
from runner import COMMAND

MIB = 1 << 20


def frame(file, line, function, user=True):
    return {"file": file, "line": line, "function": function, "kind": "python", "user": user}


def finding(rate=MIB, kind="per-iteration", file="/src/app/train.py", line=42, held="train.py: global kept"):
    return {
        "class": kind,
        "confidence": 0.9,
        "device": -1,
        "live_bytes": 40 * MIB,
        "live_blocks": 40,
        "bytes_per_step": rate if kind != "one-off" else 0.0,
        "bytes_per_epoch": 10.0 * rate,
        "evidence": "38 of the last 40 steps left a block behind",
        "released_by": "nothing",
        "allocated_at": frame(file, line, "train_step"),
        "stack": [frame("/lib/torch/nn.py", 7, "linear", False), frame(file, line, "train_step")],
        "called_at_step": 12,
        "held_by": {"path": held, "kind": "list"},
        "kept_at": {"file": file, "line": line + 1, "code": "kept.append(loss)"},
        "fix": "append a number",
    }


def site(live, file="/src/app/model.py", line=17, function="forward", blocks=3, device=-1):
    return {
        "device": device,
        "stack_id": line,
        "allocated_at": frame(file, line, function),
        "stack": [frame(file, line, function)],
        "live_bytes": live,
        "live_blocks": blocks,
        "phase": "forward",
        "generations": [],
        "history": [],
    }


def report(
    findings=(), sites=(), verdict=None, steps=40, rank=0, world=1, peak=100 * MIB, time=1000, device=-1
):
    leaks = [f for f in findings if f["class"] != "fragmentation"]
    return {
        "schema": 1,
        "verdict": verdict or ("leak" if leaks else "clean"),
        "reason": "as the test says",
        "run": {
            "command": ["python", "train.py"],
            "pid": 100 + rank,
            "rank": rank,
            "world_size": world,
            "mode": "host",
            "steps": steps,
            "epochs": 4,
            "time": time,
        },
        "devices": [
            {
                "device": device,
                "stats": {},
                "peak_bytes": peak,
                "live_bytes": sum(s["live_bytes"] for s in sites),
                "live_blocks": sum(s["live_blocks"] for s in sites),
                "sites": len(sites),
            }
        ],
        "findings": list(findings),
        "not_leaks": [],
        "sites": list(sites),
    }


@pytest.fixture
def write(tmp_path):
    def write(told, name="rank0-1"):
        path = tmp_path / name / "report.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told))
        return path

    return write


def strandline(*arguments, **env):
    done = subprocess.run(
        [COMMAND, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **env}, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


# ---- check ------------------------------------------------------------------------------------------------


def test_exit_codes(write, tmp_path):
    clean, leaky = write(report(), "a/x"), write(report([finding()]), "b/x")
    young = write(report(verdict="undecided", steps=5), "c/x")
    assert strandline("check", clean)[0] == 0
    code, out, err = strandline("check", leaky)
    assert (code, err) == (3, "")
    assert "FAIL" in out and "+1.0 MiB/step" in out and "train.py:43 (kept.append(loss))" in out
    assert strandline("check", young)[0] == 5
    assert strandline("check", young, "--allow-undecided")[0] == 0
    assert strandline("check", tmp_path)[0] == 3, "one that leaks outweighs one that is undecided"
    assert strandline("check", clean, young)[0] == 5
    for wrong in (
        [tmp_path / "nowhere"],
        [clean, "--max-growth", "much"],
        [clean, "--budget", "x"],
        [clean, "--suppressions", tmp_path / "nowhere"],
        [clean, "--baseline", tmp_path / "nowhere"],
        [clean, "--fail-on-increase"],
        [clean, "--junit", "/proc/nowhere/x.xml"],
        [clean, "--tolerance", "-3"],
    ):
        code, _, err = strandline("check", *wrong)
        assert code == 2 and err and "panicked" not in err, wrong
    (tmp_path / "empty").mkdir()
    code, _, err = strandline("check", tmp_path / "empty")
    assert code == 2 and "no report.json" in err


@pytest.mark.parametrize(
    ("limit", "code"),
    [("0 B/step", 3), ("1 MiB/step", 3), ("3 MiB/step", 0), ("29MiB/epoch", 3), ("30 MiB/epoch", 0)],
)
def test_growth_is_the_sum_of_all_findings(write, limit, code):
    path = write(report([finding(MIB), finding(2 * MIB, file="/src/b.py")]))
    assert strandline("check", path, "--max-growth", limit)[0] == code


def test_a_block_that_is_kept_once_counts_over_the_run(write):
    path = write(report([finding(kind="one-off")]))  # 40 MiB in 40 steps
    assert strandline("check", path)[0] == 3
    assert strandline("check", path, "--max-growth", "0.9MiB/step")[0] == 3
    assert strandline("check", path, "--max-growth", "1.1MiB/step")[0] == 0


def test_what_is_undecided_is_not_said_to_be_nothing(write):
    growth = {"what": "22 times", "decides": "more steps", "device": -1, "bytes": 3 * MIB}
    code, out, _ = strandline("check", write({**report(), "undecided": [growth]}))
    assert code == 0 and "no leak is known, 1 growth undecided" in out
    assert "nothing accumulates" not in out
    assert "nothing accumulates" in strandline("check", write(report()))[1]


def test_fragmentation_is_not_growth_but_is_told(write):
    path = write(report([finding(kind="fragmentation")], verdict="fragmentation"))
    code, out, _ = strandline("check", path)
    assert code == 0 and "fragmentation, not checked" in out


def test_budgets(write):
    path = write(report(sites=[site(30 * MIB), site(12 * MIB, line=18), site(MIB, file="/src/other.py")]))
    for budget, code in [
        ("model.py=41MiB", 3),
        ("model.py=42MiB", 0),
        ("model.py:17=30MiB", 0),
        ("model.py:17$=29MiB", 3),
        ("^forward$=42MiB", 3),
        ("nothing-like-it=0", 0),
    ]:
        got, out, _ = strandline("check", path, "--budget", budget)
        assert got == code, (budget, out)
    code, out, _ = strandline("check", path, "--budget", "model.py=1GiB", "--budget", "other.py=1KiB")
    assert code == 3 and "1.0 MiB in 1 site" in out and "none of" not in out


def test_suppressions(write, tmp_path):
    path = write(report([finding(), finding(file="/src/b.py", held="b.py: global other")]))
    known = tmp_path / "known.supp"

    def check(*lines):
        known.write_text("\n".join(lines))
        return strandline("check", path, "--suppressions", known)

    code, out, _ = check("# two of them", "leak:train.py", "leak:/src/b.py")
    assert code == 0 and "2 findings suppressed" in out
    assert check("leak:train.py")[0] == 3
    assert check("leak:global kept", "leak:global other")[0] == 0, "holders are matched"
    assert check("leak:^linear$")[0] == 0, "and every function of the stack"
    code, out, _ = check("leak:no such")
    assert code == 3 and "leak:no such suppressed nothing" in out
    code, _, err = check("leak:x", "race:y")
    assert code == 2 and "known.supp:2" in err


def test_a_baseline(write):
    before = write(report([finding(MIB)], peak=100 * MIB), "before")
    same = write(report([finding(1.05 * MIB, line=50)], peak=105 * MIB), "same")
    faster = write(report([finding(1.2 * MIB)]), "faster")
    other = write(report([finding(MIB), finding(10, file="/src/new.py")]), "other")
    higher = write(report([finding(MIB)], peak=120 * MIB), "higher")
    gate = ["--baseline", before, "--fail-on-increase"]
    assert strandline("check", same, *gate)[0] == 0, "what is known is accepted, wherever its line went"
    for path, part in [
        (faster, "was +1.0 MiB/step"),
        (other, "new:"),
        (higher, "the peak of the host was 100.0 MiB"),
    ]:
        code, out, _ = strandline("check", path, *gate)
        assert code == 3 and part in out, out
        code, out, _ = strandline("check", path, "--baseline", before)
        assert code == 0 and "against the baseline" in out
    assert strandline("check", faster, *gate, "--tolerance", "25")[0] == 0
    assert strandline("check", same, *gate, "--max-growth", "0 B/step")[0] == 3, "both may be asked for"


def test_a_baseline_of_many_ranks(write, tmp_path):
    for rank in range(2):
        write(report(peak=(rank + 1) * 100 * MIB, rank=rank, world=2), f"old/rank{rank}-1")
        write(report(peak=(rank + 1) * 100 * MIB, rank=rank, world=2), f"new/rank{rank}-2")
    gate = ["--baseline", tmp_path / "old", "--fail-on-increase"]
    assert strandline("check", tmp_path / "new", *gate)[0] == 0
    write(report(peak=190 * MIB, rank=0, world=2), "new/rank0-2")
    assert strandline("check", tmp_path / "new", *gate)[0] == 3
    write(report(rank=7), "new/rank7-2")
    code, _, err = strandline("check", tmp_path / "new", *gate)
    assert code == 2 and "rank 7" in err


def test_junit_is_read_back(write, tmp_path):
    bad = finding(held="<\"&'> \x01 ]]>")
    path = write(report([bad], [site(MIB)]))
    out = tmp_path / "results.xml"
    code, _, _ = strandline("check", path, "--budget", "model.py=2MiB", "--junit", out)
    assert code == 3
    root = ET.parse(out).getroot()
    (suite,) = root.findall("testsuite")
    assert (
        (suite.get("tests"), suite.get("failures")) == ("2", "1") == (root.get("tests"), root.get("failures"))
    )
    growth, budget = suite.findall("testcase")
    assert growth.get("classname") == "strandline.growth" and budget.find("failure") is None
    assert "<\"&'> \ufffd ]]>" in growth.find("failure").text


def test_github_annotations(write):
    path = write(report([finding(held="100 %\nsure")]))
    code, out, _ = strandline("check", path, "--github", GITHUB_WORKSPACE="/src")
    assert code == 3
    (line,) = [line for line in out.splitlines() if line.startswith("::")]
    assert line.startswith(
        "::error file=app/train.py,line=43,title=strandline%3A grows by at most 0 B/step::"
    )
    assert "100 %25%0Asure" in line


# ---- diff -------------------------------------------------------------------------------------------------


def test_diff_names_what_grew(write):
    a = write(
        report(
            sites=[
                site(10 * MIB),
                site(5 * MIB, line=30, function="embed"),
                site(MIB, line=99, function="old"),
            ]
        ),
        "a",
    )
    later = [
        site(16 * MIB, blocks=9),
        site(4 * MIB, line=33, function="embed"),
        site(2 * MIB, line=1, function="new"),
    ]
    b = write(report([finding()], later, steps=80, peak=130 * MIB), "b")
    code, out, err = strandline("diff", "--json", a, b.parent)
    assert (code, err) == (0, "")
    told = json.loads(out)
    changes = {(s["function"]): (s["change_bytes"], s["change_blocks"], s["lines"]) for s in told["sites"]}
    assert changes == {
        "forward": (6 * MIB, 6, [17, 17]),
        "new": (2 * MIB, 3, [None, 1]),
        "embed": (-MIB, 0, [30, 33]),
        "old": (-MIB, -3, [99, None]),
    }
    assert [s["function"] for s in told["sites"]][:2] == ["forward", "new"]
    assert told["findings"][0]["change"] == "new"
    code, out, _ = strandline("diff", a, b)
    for part in ("+6.0 MiB", "model.py:33 in embed  (was line 30)", "host peak", "+30.0 MiB", "new"):
        assert part in out, out
    code, out, _ = strandline("diff", a, a)
    assert code == 0 and "no listed site changed" in out


def test_diff_says_what_a_report_does_not_list(write):
    first, second = report(sites=[site(10 * MIB)]), report(sites=[site(9 * MIB, line=3, function="other")])
    first["devices"][0]["sites"] = second["devices"][0]["sites"] = 60
    code, out, _ = strandline("diff", write(first, "a"), write(second, "b"))
    assert code == 0 and "not among the largest sites" in out and "10.0 MiB" in out


def test_diff_refuses_what_it_cannot_compare(write, tmp_path):
    a = write(report(), "many/a")
    write(report(), "many/b")
    code, _, err = strandline("diff", a, tmp_path / "many")
    assert code == 2 and "2 reports" in err and "strandline merge" in err
    broken = tmp_path / "report.json"
    broken.write_text("{")
    code, _, err = strandline("diff", a, broken)
    assert code == 2 and str(broken) in err


# ---- merge ------------------------------------------------------------------------------------------------


def test_merge_names_the_rank_that_differs(write, tmp_path):
    for rank in range(4):
        more = 50 * MIB if rank == 2 else 0
        told = report(
            [finding()] if rank != 3 else [],
            [site(10 * MIB, device=rank), site(MIB + more, line=5, function="gather", device=rank)],
            rank=rank,
            world=5,
            peak=100 * MIB + more,
            steps=40 if rank != 1 else 20,
            device=rank,
        )
        for one in told["findings"]:
            one["device"] = rank
        write(told, f"rank{rank}-{rank}")
    old = report(rank=0, world=5, peak=7, time=1)
    write(old, "rank0-99")
    code, out, err = strandline("merge", "--json", tmp_path)
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["verdict"] == "leak" and told["missing"] == [4] and told["superseded"] == 1
    assert told["totals"]["peak_bytes"] == 450 * MIB and told["totals"]["bytes_per_step"] == 3 * MIB
    (common,) = told["findings"]
    assert common["ranks"] == [0, 1, 2] and common["live_bytes"] == 120 * MIB
    skew = {one["what"]: one for one in told["skew"]}
    assert (skew["peak"]["rank"], skew["peak"]["device"], skew["peak"]["site"]["function"]) == (
        2,
        2,
        "gather",
    )
    assert skew["peak"]["site"]["live_bytes"] == 51 * MIB and skew["peak"]["site"]["median_bytes"] == MIB
    assert (skew["steps"]["rank"], skew["steps"]["value"]) == (1, 20)
    code, out, _ = strandline("merge", tmp_path)
    for part in (
        "no report of rank 4",
        "rank 0-2, together 120.0 MiB live",
        "skew  rank 2",
        "model.py:5 in gather",
    ):
        assert part in out, out
    assert out.count("kept.append(loss)") == 1


def test_merge_of_equal_ranks_finds_no_skew(write, tmp_path):
    for rank in range(3):
        write(report(sites=[site(MIB)], rank=rank, world=3), f"rank{rank}-1")
    told = json.loads(strandline("merge", "--json", tmp_path)[1])
    assert told["skew"] == [] and told["missing"] == [] and told["verdict"] == "clean"
    one = copy.deepcopy(report())
    write(one, "alone/rank0-1")
    assert strandline("merge", tmp_path / "alone")[0] == 0


def test_live_bytes_are_those_of_the_last_step_or_said_to_be_unknown(write, tmp_path):
    ended, nothing = report(), report(rank=1, world=2)
    ended["devices"][0]["series"] = [
        {"step": 39, "allocated": 7 * MIB, "reserved": 8 * MIB, "active": 0, "peak": 0}
    ]
    a, b = write(ended, "rank0-1"), write(nothing, "rank1-1")
    _, out, _ = strandline("merge", tmp_path)
    assert re.search(r"0 +host +clean +40 +7\.0 MiB", out) and re.search(
        r"1 +host +clean +40 +unknown", out
    ), out
    _, out, _ = strandline("diff", a, b)
    assert re.search(r"host live +7\.0 MiB +unknown\n", out), out
    told = json.loads(strandline("merge", "--json", tmp_path)[1])
    assert [rank["live_bytes"] for rank in told["ranks"]] == [7 * MIB, None]
