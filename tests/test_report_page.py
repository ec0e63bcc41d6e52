"""report.html in a real browser: what it shows, that it can be used, and that nothing in it can harm."""

import copy
import json
import re

import pytest
from browser import render
from report_jobs import CALL, KEPT, LEAKY, convert

PLACE = f"train.py:{CALL} in <module> > train.py:{KEPT} in train_step"


@pytest.fixture(scope="module")
def leaky(report_jobs):
    return report_jobs(LEAKY)


@pytest.fixture(scope="module")
def page(leaky):
    return render(leaky.page)


def test_the_page_lies_beside_the_report_and_is_private(leaky):
    assert leaky.page.stat().st_mode & 0o777 == 0o600
    assert f"report: {leaky.shown}" in leaky.err, leaky.err
    text = leaky.page.read_text()
    assert len(text) < 1 << 20
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\(|fetch\(|XMLHttp""", text)
    assert sorted(path.name for path in leaky.page.parent.iterdir()) == [
        "report.html",
        "report.json",
        "report.txt",
    ]


def test_the_verdict_and_the_findings_come_first(page, leaky):
    main = page.one("main")
    assert main.one("h1").words == "Leak"
    (finding,) = main.all("article")
    words = finding.words
    told = leaky.report["findings"][0]
    assert "per-iteration" in words and "/step" in words
    assert PLACE in words
    assert re.sub(r"\s+", " ", told["held_by"]["path"].replace(" > ", " › ")) in words
    assert told["kept_at"]["code"].strip() in words and f"train.py:{KEPT}" in words
    assert told["fix"] in words and told["evidence"] in words
    assert len(finding.all("svg", data_spark="")) == 1
    titles = [heading.words for heading in main.all("h2")]
    assert titles[0] == "Findings"
    assert titles == [link.words for link in page.one("nav").all("a")]
    assert {"Memory over steps", "Flame graph", "Generations", "Segments", "Sites"} <= set(titles)


def test_the_charts_are_drawn(page, leaky):
    (device,) = leaky.report["devices"]
    memory = page.one("section", id="memory")
    lines = {
        path.attributes["data-line"]: path.attributes["d"]
        for path in memory.all("path")
        if "data-line" in path.attributes
    }
    assert {"allocated", "reserved", "peak"} <= set(lines)
    assert lines["allocated"].count("L") == len(device["series"]) - 1
    assert len(memory.all("line", cls="epoch")) >= 2
    assert "validation" in memory.words
    flame = page.one("section", id="flame")
    assert any(
        f"train_step train.py:{KEPT}" in g.attributes["aria-label"] for g in flame.all("g", role="button")
    )
    generations = page.one("section", id="generations")
    bars = [r for r in generations.all("rect") if r.attributes.get("fill") == "var(--leak)"]
    assert len(bars) > 20
    segments = page.one("section", id="segments")
    runs = sum(1 for s in device["segments"] for run in s["runs"] if run[1])
    assert len([r for r in segments.all("rect") if r.attributes["fill"] != "none"]) >= runs


def test_the_table_lists_every_site(page, leaky):
    rows = page.one("table", cls="sites").one("tbody").all("tr")
    assert len(rows) == len(leaky.report["sites"])
    assert "finding" in rows[[PLACE in row.words for row in rows].index(True)].words


def test_it_is_used_with_the_keyboard(leaky):
    shown = render(
        leaky.page,
        after="""
        const key = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
        const chart = document.querySelector("#memory svg[tabindex]");
        chart.focus(); key(chart, "End"); key(chart, "ArrowLeft");
        document.querySelector("#flame input[value=all]").click();
        const root = document.querySelector("#flame g[tabindex='0']");
        root.focus(); key(root, "ArrowDown"); key(document.activeElement, "Enter");
        const map = document.querySelector("#segments svg[tabindex]");
        map.focus(); key(map, "Home");
        const search = document.querySelector("#sites input[type=search]");
        search.value = "train_step"; search.dispatchEvent(new Event("input"));
        [...document.querySelectorAll("#sites th button")].find((b) => b.textContent === "blocks").click();
        document.querySelector("#sites td.place button").click();
        document.getElementById("theme").click();
        """,
    )
    (device,) = leaky.report["devices"]
    assert f"step {device['series'][-2]['step']}" in shown.one("section", id="memory").words
    assert len(shown.one("section", id="flame").one(cls="crumbs").all("button")) == 2
    assert "segment of" in shown.one("section", id="segments").words
    sites = shown.one("section", id="sites")
    rows = [row for row in sites.one("tbody").all("tr") if row.attributes.get("class") != "more"]
    assert 0 < len(rows) < len(leaky.report["sites"])
    blocks = [int(row.all("td")[2].words.replace(",", "")) for row in rows]
    assert blocks == sorted(blocks, reverse=True)
    assert sites.one("tr", cls="more").all("li")
    assert shown.attributes["data-theme"] == "dark"


def test_a_clean_job_says_so(report_jobs):
    job = report_jobs(LEAKY.replace("history.append(", "len("))
    shown = render(job.page, width=420)
    assert shown.one("h1").words == "No leak"
    assert not shown.all("article")
    assert shown.one("section", id="notleaks").all("li")


def test_a_job_without_steps_has_a_page_too(report_jobs):
    shown = render(report_jobs("import torch\nx = torch.ones(3)\n").page)
    assert shown.one("h1").words == "Undecided"
    assert "No step was seen" in shown.words


HOSTILE = [
    "</script><script>document.documentElement.dataset.error = 'pwned'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.documentElement.dataset.error='pwned'\">",
    "]]>\u2028\u2029\x00\x1b[31m'\"&lt;{{script}}{{data}}",
    "javascript:alert(1)",
    "__proto__",
]


def test_nothing_in_a_report_becomes_markup(leaky, tmp_path):
    """Hostile names everywhere a report has a text."""
    report = copy.deepcopy(leaky.report)
    texts = 0

    def poison(value, key=""):
        nonlocal texts
        if isinstance(value, dict):
            return {name: poison(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [poison(inner, key) for inner in value]
        if isinstance(value, str) and key not in {"verdict", "class", "kind", "released_by"}:
            texts += 1
            return HOSTILE[texts % len(HOSTILE)] + value
        return value

    report = poison(report)
    assert texts > 50
    hostile = tmp_path / "report.json"
    hostile.write_text(json.dumps(report))
    made = convert(hostile, "html", tmp_path / "hostile.html")
    assert made.code == 0, made.err
    text = (tmp_path / "hostile.html").read_text()
    assert len(re.findall(r"(?i)</script", text)) == 2 and "<!--" not in text
    shown = render(tmp_path / "hostile.html")
    assert not shown.all("img")
    assert len(shown.all("script")) == 2
    assert "document.documentElement.dataset.error = 'pwned'" in shown.one("main").words


def test_a_monstrous_report_makes_a_page_that_opens(leaky, tmp_path):
    """20,000 sites with deep stacks of their own, a series of 100,000 points, strange numbers."""
    report = copy.deepcopy(leaky.report)
    template = report["sites"][0]
    report["sites"] = []
    for n in range(20_000):
        frame = [
            {"file": f"/srv/{n}/<&{'x' * 100}.py", "line": k, "function": f"f{n}_{k}", "user": k % 2 == 0}
            for k in range(40)
        ]
        report["sites"].append({**template, "stack_id": n + 1, "stack": frame, "live_bytes": 1 << (n % 60)})
    report["devices"][0]["series"] = [
        {"step": n, "allocated": n << 20, "reserved": 1 << 50, "active": n, "peak": (n == 77_777) << 51}
        for n in range(100_000)
    ]
    report["findings"] = report["findings"] * 500
    report["run"]["command"] = ["python"] * 10_000
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    made = convert(path, "html", tmp_path / "big.html")
    assert made.code == 0, made.err
    assert (tmp_path / "big.html").stat().st_size < 5 << 20
    shown = render(tmp_path / "big.html")
    rows = shown.one("table", cls="sites").one("tbody").all("tr")
    assert 100 <= len(rows) <= 500
    assert "Left out" in shown.one("footer").words
    assert "peak 2048.0 TiB" in shown.one("section", id="memory").words
