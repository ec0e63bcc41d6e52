"""docs/findings.md has a place for every class, reason and note that a report can name."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "findings.md").read_text()


def named(folder, pattern, ending):
    return {
        word
        for path in sorted((ROOT / folder).rglob(f"*.{ending}"))
        for word in re.findall(pattern, path.read_text(), re.M)
    }


def test_every_class_has_a_heading():
    classes = named("src/ledger", r'Class::\w+ => "([a-z-]+)"', "rs")
    assert len(classes) == 5
    assert all(f"\n### {name}\n" in DOC for name in classes), classes


def test_every_reason_has_an_anchor():
    # The kinds of stack frames are no reasons.
    # A crash is a note, with a heading of its own.
    reasons = named("src", r'kind: "([a-z-]+)"', "rs") - {"python", "native", "crash"}
    reasons |= named("src/report", r'^\s+\(?"([a-z]+-[a-z-]+)",', "rs") | named(
        "src/ledger", r'note\(\s*"([a-z]+)"', "rs"
    )
    reasons |= named("src/report", r'kind: "([a-z-]+)"\.to_owned', "rs")
    reasons |= set(
        re.findall(
            r'"(gradients|optimizer-state|training-state|emptied|bounded|in-use)"',
            (ROOT / "python/strandline/_answer.py").read_text(),
        )
    )
    assert {
        "gc",
        "cache",
        "sawtooth",
        "replaces",
        "settled",
        "bounded",
        "emptied",
        "withdrawn",
        "host-memory",
    } <= reasons
    missing = {reason for reason in reasons if f'<a id="{reason}"></a>`{reason}`' not in DOC}
    assert not missing
    assert "\n### crash\n" in DOC


def test_every_note_is_explained():
    notes = named("python/strandline", r'"kind": "([a-z-]+)"', "py") | named(
        "python/strandline", r'_remark\(\s*"([a-z-]+)"', "py"
    )
    assert {"growing-graph", "pinned-memory", "cuda-in-workers"} <= notes
    headings = "".join(line for line in DOC.splitlines() if line.startswith("### "))
    assert all(note in headings for note in notes), notes
