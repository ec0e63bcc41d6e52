"""Checks on a machine with a GPU: each says what it saw or why it failed, and all of them make one table.

Must not know: what is checked.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import time


class Skipped(Exception):
    """What a check needs is not here."""


class Failed(Exception):
    """What was seen is not what is promised."""


def must(true, what):
    if not true:
        raise Failed(what)


def run_all(checks, width, out=None):
    """Runs (name, function) of each and prints its row; a cost decides nothing. The exit code; `out` gets the rows as
    JSON."""
    rows = []
    for name, check in checks:
        began = time.time()
        try:
            outcome, said = "PASS", check()
        except Skipped as reason:
            outcome, said = "skipped", str(reason)
        except Failed as reason:
            outcome, said = "FAIL", str(reason)
        except subprocess.TimeoutExpired as late:
            outcome, said = "FAIL", f"did not end within {late.timeout:.0f} s"
        except Exception as error:  # a check that cannot read what it got has failed
            outcome, said = "FAIL", f"{type(error).__name__}: {error}"
        if name.startswith("cost"):
            outcome = "info" if outcome == "PASS" else "no cost"
        rows.append((name, outcome, said))
        print(f"{name:<{width}}{outcome:<9}{time.time() - began:5.1f} s  {said}", flush=True)
    passed, failed, skipped = (
        sum(outcome == word for _, outcome, _ in rows) for word in ("PASS", "FAIL", "skipped")
    )
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    if out:
        pathlib.Path(out).write_text(json.dumps(rows, indent=1))
    return 1 if failed or not passed else 0
