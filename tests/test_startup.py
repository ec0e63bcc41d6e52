"""What a user meets first: start-up, a wrong setting, a folder that cannot be written, and the last line."""

import pytest
from runner import COMMAND

LIBRARY = COMMAND.parent / "libstrandline.so"

LEAKY = """
    import torch
    kept = []
    net = torch.nn.Linear(64, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(60):
        x = torch.randn(64, 64)
        optimizer.zero_grad()
        net(x).pow(2).mean().backward()
        optimizer.step()
        if KEEP:
            kept.append(x)
    print("done", flush=True)
"""


def train(keep=True):
    return LEAKY.replace("KEEP", str(keep))


def lines(done):
    return done.err.splitlines()


# ---- a folder that cannot be written ---------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False], ids=["leaky", "clean"])
def test_the_exit_code_does_not_hang_on_the_report(jobs, python, keep):
    """A file is in the way of --out: said at the start, judged all the same, and there is a last line."""
    (jobs.folder / "taken").write_text("")
    script = jobs.script(train(keep))
    done = jobs.run(python, script, options=["--fail-on-leak"], out="taken/deeper")
    assert done.code == (3 if keep else 0), done.err
    assert done.out == "done\n"
    first, last = lines(done)[0], lines(done)[-1]
    assert "cannot write" in first and "taken/deeper" in first and "--out DIR" in first, done.err
    assert "only the lines on stderr" in first
    assert last.startswith("strandline: leak: " if keep else "strandline: clean: "), done.err
    assert "no report" in last and "taken/deeper" in last
    assert done.err.count("cannot write") == 1


def test_a_leak_in_a_child_is_judged_without_its_report(jobs, python):
    (jobs.folder / "taken").write_text("")
    jobs.script(train(), "child.py")
    script = jobs.script(f"import subprocess; subprocess.run([{str(python)!r}, 'child.py'], check=True)")
    done = jobs.run(python, script, options=["--fail-on-leak"], out="taken/deeper")
    assert done.code == 3, done.err


# ---- the last line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--fail-on-leak"]], ids=["plain", "fail-on-leak"])
def test_a_job_without_torch_is_told_from_a_clean_one(jobs, python, options):
    done = jobs.run(python, "-c", "print('done')", options=options)
    assert (done.code, done.out) == (0, "done\n")
    assert lines(done) == ["strandline: nothing was watched: torch was never imported"]
    assert not jobs.out.exists()


def test_nothing_is_said_of_a_job_without_torch_where_it_was_not_asked_for(jobs, python):
    assert jobs.run(python, "-c", "pass", options=["--quiet"]).err == ""
    by_hand = {"LD_PRELOAD": str(LIBRARY), "STRANDLINE_MODE": "host"}
    assert jobs.bare(python, "-c", "pass", env=by_hand).err == ""


LAUNCHER = """
    import os, subprocess, sys
    WITH_TORCH
    ranks = [
        subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    for rank in ranks:
        rank.wait()
"""


@pytest.mark.parametrize("torch", ["import torch", ""], ids=["with-torch", "without"])
def test_a_launcher_leaves_the_last_word_to_its_ranks(jobs, python, torch):
    jobs.script(train(), "rank.py")
    done = jobs.run(python, jobs.script(LAUNCHER.replace("WITH_TORCH", torch)), options=["--fail-on-leak"])
    assert done.code == 3, done.err
    assert [report["run"]["rank"] for report in sorted(done.reports(), key=lambda r: r["run"]["rank"])] == [
        0,
        1,
    ]
    last = sorted(line for line in lines(done) if "; report: " in line)
    assert len(last) == 2, done.err
    for rank, line in enumerate(last):
        assert line.startswith(f"strandline: rank {rank}: leak: "), done.err
    assert "nothing was watched" not in done.err
    for rank in range(2):
        assert f"strandline: rank {rank}: LEAK" in done.err


def test_findings_are_seen_while_pytest_captures(jobs, python):
    jobs.script(
        """
        import os, sys
        import torch
        kept = []
        def test_that_passes():
            net = torch.nn.Linear(64, 16)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            for step in range(60):
                x = torch.randn(64, 64)
                optimizer.zero_grad(); net(x).pow(2).mean().backward(); optimizer.step()
                kept.append(x)
            os.write(2, b"captured by pytest")
        """,
        "test_train.py",
    )
    done = jobs.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py")
    assert done.code == 0 and "1 passed" in done.out, done.err
    assert "strandline: LEAK" in done.err and "captured by pytest" not in done.err
    assert "strandline" not in done.out


def test_a_log_in_stderrs_place_is_where_findings_go(jobs, python):
    before = """
    import os
    kept_stderr = os.dup(2)
    os.dup2(os.open("job.log", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    """
    done = jobs.run(python, jobs.script(before + train()))
    log = (jobs.folder / "job.log").read_text()
    assert "strandline: LEAK" in log and "strandline: leak: " in log and done.err == ""
