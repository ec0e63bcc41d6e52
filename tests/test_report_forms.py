"""`strandline report`: every form, read by its own reader, and what is said of files that are none."""

import collections
import gzip
import io
import json
import os
import pathlib
import pickle
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from report_jobs import CALL, COMMAND, KEPT, LEAKY, convert

LEAK = f"train_step_(train.py:{KEPT})"


@pytest.fixture(scope="module")
def leaky(report_jobs):
    return report_jobs(LEAKY)


def made(leaky, form, *more):
    done = convert(leaky.file, form, None, *more)
    assert done.code == 0, done.err
    return done.out


def leading(report):
    """The site of the finding."""
    (stack,) = (s["stack_id"] for s in report["findings"][0]["sites_in_finding"])
    (site,) = (site for site in report["sites"] if site["stack_id"] == stack)
    return site


def test_text_and_json_are_what_the_run_wrote(leaky):
    assert leaky.file.with_name("report.txt").read_bytes() == made(leaky, "text").split(b"\n", 1)[1][:-1]
    assert json.loads(made(leaky, "json")) == leaky.report


def folded(text):
    found = collections.Counter()
    for line in text.decode().splitlines():
        stack, _, number = line.rpartition(" ")
        assert " " not in stack
        found[tuple(stack.split(";"))] += int(number)
    return found


def test_folded_stacks_sum_up_to_what_is_alive(leaky):
    stacks = folded(made(leaky, "folded"))
    assert sum(stacks.values()) == sum(site["live_bytes"] for site in leaky.report["sites"])
    site = leading(leaky.report)
    (found,) = (
        number
        for stack, number in stacks.items()
        if stack[: len(stack)][-1].startswith("train_step") and LEAK in stack
    )
    assert found == site["live_bytes"] and found >= 39 * 64 * 64 * 4
    survivors = folded(made(leaky, "folded", "--survivors"))
    assert 0 < sum(survivors.values()) < sum(stacks.values())
    assert all(number <= stacks[stack] for stack, number in survivors.items())


def test_the_flame_graph_is_an_image(leaky):
    for more in [], ["--survivors"]:
        root = xml.etree.ElementTree.fromstring(made(leaky, "flamegraph", *more))
        space = "{http://www.w3.org/2000/svg}"
        assert root.tag == space + "svg"
        boxes = {}
        for group in root.iter(space + "g"):
            boxes[group.find(space + "title").text.split("\n")[0]] = float(
                group.find(space + "rect").get("width")
            )
        total = max(boxes.values())
        (mine,) = (
            width
            for name, width in boxes.items()
            if name.startswith("train_step") and name.endswith(f":{KEPT}")
        )
        live = sum(site["live_bytes"] for site in leaky.report["sites"])
        if not more:
            assert mine / total == pytest.approx(leading(leaky.report)["live_bytes"] / live, rel=0.02)


def test_speedscope(leaky):
    file = json.loads(made(leaky, "speedscope"))
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = file["shared"]["frames"]
    assert all(set(frame) <= {"name", "file", "line", "col"} and frame["name"] for frame in frames)
    assert [p["name"].split()[0] for p in file["profiles"]] == ["live", "survivors", "bytes"]
    for profile in file["profiles"]:
        assert profile["type"] == "sampled" and profile["unit"] == "bytes"
        assert len(profile["samples"]) == len(profile["weights"]) > 0
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert all(0 <= number < len(frames) for stack in profile["samples"] for number in stack)
    live = file["profiles"][0]
    named = {
        tuple((frames[n]["name"], frames[n].get("line")) for n in stack): w
        for stack, w in zip(live["samples"], live["weights"])
    }
    site = leading(leaky.report)
    assert named[tuple((f["function"], f["line"]) for f in reversed(site["stack"]))] == site["live_bytes"]


def fields(message):
    """A protobuf message as {field number: [values]}, by the wire format's own rules."""
    found = collections.defaultdict(list)
    stream = io.BytesIO(message)

    def varint():
        value = shift = 0
        while True:
            (byte,) = stream.read(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while stream.tell() < len(message):
        key = varint()
        if key & 7 == 0:
            found[key >> 3].append(varint())
        else:
            assert key & 7 == 2, "only varints and lengths are used"
            length = varint()
            value = stream.read(length)
            assert len(value) == length
            found[key >> 3].append(value)
    return found


def packed(values):
    numbers = []
    for value in values:
        at = 0
        while at < len(value):
            number = shift = 0
            while True:
                byte = value[at]
                at += 1
                number |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            numbers.append(number)
    return numbers


def test_pprof(leaky):
    profile = fields(gzip.decompress(made(leaky, "pprof")))
    texts = [text.decode() for text in profile[6]]
    assert texts[0] == ""
    types = [(texts[t[1][0]], texts[t[2][0]]) for t in map(fields, profile[1])]
    assert types == [
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
    ]
    assert texts[profile[14][0]] == "inuse_space"
    functions = {f[1][0]: (texts[f[2][0]], texts[f[4][0]]) for f in map(fields, profile[5])}
    lines = {}
    for location in map(fields, profile[4]):
        (line,) = map(fields, location[4])
        lines[location[1][0]] = (*functions[line[1][0]], line[2][0] if line[2] else 0)
    site = leading(leaky.report)
    wanted = [(f["function"], f["file"], f["line"]) for f in site["stack"]]
    samples = [
        (packed(s[1]), packed(s[2]), [(texts[x[1][0]], texts[x[2][0]]) for x in map(fields, s[3])])
        for s in map(fields, profile[2])
    ]
    assert len(samples) == len(leaky.report["sites"])
    (values, labels) = next(
        (values, labels) for stack, values, labels in samples if [lines[n] for n in stack] == wanted
    )
    assert values == [
        site["allocated_blocks"],
        site["allocated_bytes"],
        site["live_blocks"],
        site["live_bytes"],
    ]
    assert ("device", "host") in labels
    assert profile[9] == [leaky.report["run"]["time"] * 10**9]


def test_torch_reads_the_snapshot(leaky, tmp_path):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(made(leaky, "memory_viz"))
    (device,) = leaky.report["devices"]
    used = sum(run[1] for segment in device["segments"] for run in segment["runs"])
    assert used == device["stats"]["allocated_bytes.all.current"] > 0
    assert sum(s["size"] for s in device["segments"]) == device["stats"]["reserved_bytes.all.current"]
    assert sum(s["total_size"] for s in snapshot["segments"]) == sum(s["size"] for s in device["segments"])
    assert sum(s["allocated_size"] for s in snapshot["segments"]) == used
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    summary = viz.segsum(snapshot)
    assert f"segments: {len(device['segments'])}" in summary
    assert f"total_allocated: {viz.Bytes(used)}" in summary
    leaks = [
        e
        for e in snapshot["device_traces"][0]
        if any(f["line"] == KEPT and f["name"] == "train_step" for f in e["frames"])
    ]
    times = [event["time_us"] for event in leaks]
    assert times == sorted(times)
    assert sum(event["size"] for event in leaks) == pytest.approx(
        leading(leaky.report)["live_bytes"], rel=0.1
    )
    text = viz.trace(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in text
    assert f"train.py:{KEPT}:train_step" in viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert "add_local_files" in viz.trace_plot(snapshot) and "add_local_files" in viz.segment_plot(snapshot)
    # And it is a snapshot for strandline itself.
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    convert(leaky.file, "memory_viz", tmp_path / "ours.pickle")
    for file in path, tmp_path / "ours.pickle":
        done = subprocess.run([COMMAND, "replay", "--json", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_addresses_are_numbers_of_any_size(leaky, tmp_path):
    report = leaky.report
    for address in 0, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 2**40:
        report["devices"][0]["segments"][0]["address"] = address
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report))
        assert pickle.loads(convert(path, "memory_viz").out)["segments"][0]["address"] == address


def test_a_report_without_segments_has_a_snapshot_too(leaky, tmp_path):
    report = leaky.report
    del report["devices"][0]["segments"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    snapshot = pickle.loads(convert(path, "memory_viz").out)
    (segment,) = snapshot["segments"]
    of_site = [
        max(site["live_bytes"], sum(g["bytes"] for g in site["generations"])) for site in report["sites"]
    ]
    assert segment["allocated_size"] == sum(of_site)
    viz = pytest.importorskip("torch.cuda._memory_viz")
    viz.segsum(snapshot)


def test_openmetrics_is_read_by_prometheus(leaky):
    parsers = pytest.importorskip("prometheus_client.openmetrics.parser")
    text = made(leaky, "openmetrics").decode()
    found = {family.name: family for family in parsers.text_string_to_metric_families(text)}
    assert all(family.type == "gauge" for family in found.values())
    (device,) = leaky.report["devices"]
    (sample,) = found["strandline_allocated_bytes"].samples
    assert sample.value == device["series"][-1]["allocated"]
    assert sample.labels == {"rank": "0", "pid": str(leaky.report["run"]["pid"]), "device": "host"}
    assert found["strandline_steps"].samples[0].value == 40
    assert found["strandline_run"].samples[0].labels["verdict"] == "leak"
    classes = {s.labels["class"]: s.value for s in found["strandline_findings"].samples}
    assert classes["per-iteration"] == 1 and len(classes) == 5
    growth = found["strandline_finding_growth_bytes"].samples[0]
    assert growth.value == pytest.approx(leaky.report["findings"][0]["bytes_per_step"])
    assert growth.labels["allocated_at"].endswith(f"train.py:{KEPT}")
    assert len(found["strandline_site_live_bytes"].samples) == min(10, len(leaky.report["sites"]))
    # Node exporter's textfile collector reads the older format.
    from prometheus_client.parser import text_string_to_metric_families

    older = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert older["strandline_live_blocks"] == device["live_blocks"]


def test_openmetrics_quotes_what_it_must(leaky, tmp_path):
    parsers = pytest.importorskip("prometheus_client.openmetrics.parser")
    report = leaky.report
    strange = 'a"b\\c\nd{e="f"}.py'
    report["findings"][0]["allocated_at"]["file"] = strange
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    families = parsers.text_string_to_metric_families(convert(path, "openmetrics").out.decode())
    (found,) = (f for f in families if f.name == "strandline_finding_live_bytes")
    assert found.samples[0].labels["allocated_at"] == f"{strange}:{KEPT}"


def test_csv(leaky):
    head, *rows = [line.split(",") for line in made(leaky, "csv").decode().splitlines()]
    assert head == [
        "device",
        "step",
        "epoch",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "peak_bytes",
    ]
    series = leaky.report["devices"][0]["series"]
    assert len(rows) == len(series)
    for row, point in zip(rows, series):
        assert [int(row[1]), *map(int, row[3:])] == [
            point[k] for k in ("step", "allocated", "reserved", "active", "peak")
        ]
    assert rows[-1][2] in {"3", "4"} and rows[0][0] == "-1"


FORMS = [
    "text",
    "json",
    "html",
    "flamegraph",
    "folded",
    "speedscope",
    "pprof",
    "memory_viz",
    "openmetrics",
    "csv",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_written_whole_and_private(leaky, form, tmp_path):
    out = tmp_path / "made"
    out.write_text("what was there before")
    done = convert(leaky.file, form, out)
    assert (done.code, done.out, done.err) == (0, b"", "")
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    if form not in ("text", "html"):
        assert out.read_bytes() == made(leaky, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_report_with_nothing_in_it_has_every_form(form, tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"schema": 1, "verdict": "undecided", "reason": "", "run": {}, "findings": []}')
    done = convert(path, form)
    assert done.code == 0, done.err


def test_several_reports_go_into_a_folder(leaky, tmp_path):
    for rank in range(3):
        folder = tmp_path / "out" / f"rank{rank}-{100 + rank}"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(leaky.file.read_text())
    shown = convert(tmp_path / "out")
    assert shown.code == 0 and shown.out.count(b"strandline: LEAK") == 6, shown.out
    done = convert(tmp_path / "out", "csv", tmp_path / "all")
    assert done.code == 0, done.err
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == [
        f"rank{r}-{100 + r}.csv" for r in range(3)
    ]
    refused = convert(tmp_path / "out", "csv")
    assert refused.code == 2 and "3 reports" in refused.err and "-o DIR" in refused.err
    in_the_way = convert(tmp_path / "out", "csv", tmp_path / "all" / "rank0-100.csv")
    assert in_the_way.code == 2 and "name a folder" in in_the_way.err


def test_what_is_no_report_is_said(leaky, tmp_path):
    whole = leaky.file.read_bytes()
    newer = whole.replace(b'"schema": 1', b'"schema": 2', 1)
    cases = {
        "cut": (whole[: len(whole) // 2], "ends in the middle"),
        "empty": (b"", "ends in the middle"),
        "foreign": (b'{"traceEvents": []}', "not a strandline report"),
        "garbled": (whole.replace(b'"findings"', b'"findings"!', 1), "not a strandline report"),
        "binary": (gzip.compress(whole), "not a strandline report"),
        "newer": (newer, "schema 2"),
    }
    for name, (contents, said) in cases.items():
        path = tmp_path / name
        path.write_bytes(contents)
        for form in "text", "html", "pprof":
            out = tmp_path / "out.file"
            done = convert(path, form, out)
            assert done.code == 2 and done.out == b"" and not out.exists()
            assert (
                done.err.startswith(f"strandline: {path}: ")
                and said in done.err
                and "panicked" not in done.err
            )
    missing = convert(tmp_path / "nowhere" / "report.json")
    assert missing.code == 2 and "no such file" in missing.err
    nothing = convert(pathlib.Path(tmp_path / "none"))
    assert nothing.code == 2
    (tmp_path / "bare").mkdir()
    bare = convert(tmp_path / "bare")
    assert bare.code == 2 and "no report.json in it" in bare.err
    unknown = convert(leaky.file, "pdf")
    assert unknown.code == 2 and "pdf" in unknown.err and "speedscope" in unknown.err
    survivors = convert(leaky.file, "csv", None, "--survivors")
    assert survivors.code == 2 and "folded" in survivors.err


def test_an_output_that_cannot_be_written_is_said(leaky, tmp_path):
    (tmp_path / "file").write_text("")
    below = convert(leaky.file, "html", tmp_path / "file" / "page.html")
    assert below.code == 2 and "page.html" in below.err and "-o OUT" in below.err, below.err
    full = convert(leaky.file, "html", "/dev/full")
    assert full.code == 2 and "/dev/full" in full.err
    null = convert(leaky.file, "html", "/dev/null")
    assert null.code == 0
    named = convert(leaky.file, "html", tmp_path)
    assert named.code == 0 and (tmp_path / f"{leaky.file.parent.name}.html").exists()


def test_a_terminal_is_not_flooded(leaky):
    for form, code in ("pprof", 2), ("html", 2), ("csv", 0):
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [COMMAND, "report", leaky.file, "--format", form],
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)
        os.close(ours)
        assert done.returncode == code
        assert code == 0 or re.search(r"-o report\.\S+", done.err if hasattr(done, "err") else done.stderr)


def test_who_has_read_enough_is_no_error(leaky):
    process = subprocess.Popen(
        [COMMAND, "report", leaky.file, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == b""


def test_the_library_does_not_carry_what_only_the_command_needs():
    library = COMMAND.with_name("libstrandline.so").read_bytes()
    assert b"report.html" in library
    for words in b"speedscope.app", b"inuse_space", b"a site that the report does not list", b"no_stack":
        assert words not in library, words
    assert CALL > KEPT


def test_metrics_are_kept_while_the_job_runs(jobs):
    """The job reads its own file: it is there, whole, and newer each time."""
    parsers = pytest.importorskip("prometheus_client.openmetrics.parser")
    script = jobs.script(
        LEAKY
        + """
import pathlib, sys, time
seen = set()
end = time.monotonic() + 60
while len(seen) < 3 and time.monotonic() < end:
    for x in data:
        train_step(x)
    text = pathlib.Path("job.prom").read_text() if pathlib.Path("job.prom").exists() else ""
    if text:
        assert text.endswith("# EOF\\n"), text
        seen.add(text)
    time.sleep(0.2)
assert len(seen) == 3, len(seen)
"""
    )
    done = jobs.run(sys.executable, script, options=["--openmetrics", "job.prom"])
    assert done.code == 0, done.err
    file = jobs.folder / "job.prom"
    found = {family.name: family for family in parsers.text_string_to_metric_families(file.read_text())}
    assert found["strandline_steps"].samples[0].value == done.report["run"]["steps"]
    assert found["strandline_findings"].samples
    assert file.stat().st_mode & 0o777 == 0o644
    assert not [path for path in jobs.folder.iterdir() if path.name.startswith(".job")]


def test_metrics_that_cannot_be_kept_do_not_stop_the_job(jobs):
    done = jobs.run(sys.executable, jobs.script(LEAKY), options=["--openmetrics", "/proc/job.prom"])
    assert done.code == 0
    assert done.err.count("/proc/job.prom") == 1 and "--openmetrics FILE" in done.err, done.err
    wrong = jobs.run(sys.executable, "-c", "1", options=["--openmetrics", "a,b"])
    assert wrong.code == 2 and "comma" in wrong.err
