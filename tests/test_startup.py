"""What a user meets first: start-up, a wrong setting, a folder that cannot be written, and the last line."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

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


# ---- settings that are not understood --------------------------------------------------------------------


def test_misspelt_settings_are_named_and_the_job_runs_on(jobs, python):
    env = {
        "LD_PRELOAD": str(LIBRARY),
        "STRANDLINE_OUT": str(jobs.out),
        "STRANDLINE_MODE": "hoost",
        "STRANDLINE_QUITE": "1",
        "STRANDLINE_CONF": "fokus:x,slack:much",
    }
    done = jobs.bare(python, jobs.script(train(False)), env=env)
    assert (done.code, done.out) == (0, "done\n"), done.err
    assert done.report["verdict"] == "clean"
    for said in (
        r"STRANDLINE_MODE: there is no mode 'hoost' \(did you mean host\?\).*auto is used",
        r"STRANDLINE_QUITE .*did you mean STRANDLINE_QUIET\?",
        r"'fokus' .*did you mean focus\?.*slack_before_wait",
        r"slack:much .*slack:THOUSANDTHS",
    ):
        assert len(re.findall(said, done.err)) == 1, (said, done.err)


def test_the_command_takes_its_mode_from_the_environment_and_refuses_a_wrong_one(jobs, python):
    script = jobs.script("print('ran')")
    command = [COMMAND, "run", "--out", jobs.out, "--", python, script]
    done = jobs.bare(*command, env={"STRANDLINE_MODE": "hots"})
    assert (done.code, done.out) == (2, ""), "the job did not begin"
    assert lines(done) == [
        "strandline: STRANDLINE_MODE: there is no mode 'hots' (did you mean host?); the modes: auto, heap, observer, "
        "host, off"
    ]
    leaks = jobs.script(train())
    done = jobs.bare(COMMAND, "run", "--out", jobs.out, "--", python, leaks, env={"STRANDLINE_MODE": "off"})
    assert (done.code, lines(done)) == (0, []), "what the environment says counts"
    gate = [COMMAND, "run", "--fail-on-leak", "--out", jobs.out, "--", python, leaks]
    done = jobs.bare(*gate, env={"STRANDLINE_MODE": "off"})
    said = "strandline: STRANDLINE_MODE=off: nothing is watched, so --fail-on-leak sees no leak"
    assert (done.code, lines(done)) == (0, [said]), "a gate that is open says so"
    given = [COMMAND, "run", "--mode", "host", "--out", jobs.out, "--", python, leaks]
    done = jobs.bare(*given, env={"STRANDLINE_MODE": "hots"})
    assert done.code == 0 and done.report["run"]["mode"] == "host", "the option counts more"


def test_the_command_takes_the_folder_from_the_environment(jobs, python):
    script = jobs.script(train(False))
    env = {"STRANDLINE_OUT": "named", "STRANDLINE_MODE": "host"}
    done = jobs.bare(COMMAND, "run", "--", python, script, env=env)
    assert done.code == 0, done.err
    assert len(list((jobs.folder / "named").rglob("report.json"))) == 1
    done = jobs.bare(COMMAND, "run", "--out", "given", "--", python, script, env=env)
    assert len(list((jobs.folder / "given").rglob("report.json"))) == 1, "the option counts more"
    assert len(list((jobs.folder / "named").rglob("report.json"))) == 1


def test_children_that_train_after_a_fork_are_said_to_be_unwatched(jobs, python):
    forks = textwrap.indent(textwrap.dedent(train()), "    ").replace("import torch", "import os, torch", 1)
    script = jobs.script(
        "if True:" + forks.replace("    net =", "    if os.fork():\n        os.wait(); exit()\n    net =", 1)
    )
    done = jobs.run(python, script)
    assert (done.code, done.out) == (0, "done\n"), done.err
    assert re.search(r"no step was seen.*forked 1 child, in which nothing is watched", done.err), done.err
    assert done.report["run"]["forked"] == 1


def test_a_command_within_a_job_speaks_for_its_own_job_alone(jobs, python):
    inner = [str(COMMAND), "run", "--fail-on-leak", "--out", str(jobs.out), "--", str(python), "-c", "pass"]
    done = jobs.bare(COMMAND, "run", "--fail-on-leak", "--out", jobs.out, "--", *inner)
    assert done.code == 0 and done.err.count("nothing was watched") == 1, done.err


@pytest.mark.parametrize("mode", ["heap", "observer"])
def test_a_mode_for_a_gpu_says_what_it_does_without_one(jobs, python, mode):
    command = [COMMAND, "run", "--mode", mode, "--out", jobs.out, "--", python, jobs.script(train())]
    done = jobs.bare(*command, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0 and done.report["run"]["mode"] == "host" and done.report["verdict"] == "leak"
    (said,) = [line for line in lines(done) if f"mode {mode} is for a GPU" in line]
    assert "CPU tensors are accounted instead (mode host)" in said
    assert "CUDA_VISIBLE_DEVICES" in said or "without CUDA" in said


# ---- the Python side -------------------------------------------------------------------------------------


def test_strandline_is_there_before_torch_and_takes_any_phase(jobs, python):
    script = jobs.script("""
        import strandline
        assert not strandline.active()
        strandline.step()
        import torch
        assert strandline.active()
        for name in ("warmup", "eval", "Backward", "", 7):
            with strandline.phase(name):
                torch.ones(3)
        print("ran")
    """)
    done = jobs.run(python, script)
    assert (done.code, done.out) == (0, "ran\n"), done.err


def pythons():
    """This Python, and those of pyenv that have audit hooks and all that came with them."""
    found = {"this": sys.executable}
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    for path in sorted(root.glob("versions/3.*/bin/python3")):
        if tuple(map(int, path.parts[-3].split(".")[:2])) >= (3, 8):
            found[path.parts[-3]] = str(path)
    return [pytest.param(path, id=name) for name, path in found.items()]


WAYS = [(["-X", "dev"], {}), ([], {"PYTHONMALLOC": "debug"}), ([], {}), (["-S", "-I"], {})]


@pytest.mark.parametrize("interpreter", pythons())
@pytest.mark.parametrize("options, env", WAYS, ids=["dev", "debug-malloc", "plain", "bare-bones"])
def test_a_python_that_checks_its_memory_ends_as_without_us(jobs, interpreter, options, env):
    """What is put into Python before it begins must be what Python can release, with any allocator."""
    done = jobs.same(interpreter, *options, "-c", "print('ok')", env=env)
    assert (done.code, done.out, done.err) == (0, "ok\n", "")


SHOWN = """
import strandline, sys
assert strandline.__file__ == "<strandline>/__init__.py" and strandline.__path__ == [], strandline.__spec__
assert strandline.__spec__.name == strandline.__name__ == "strandline" and strandline.__package__ == "strandline"
from strandline import _clock
import importlib
assert importlib.reload(strandline) is strandline and not strandline.active()
strandline.step()
print(strandline.__spec__.loader.__name__, _clock.__file__)
"""


@pytest.mark.parametrize("interpreter", pythons())
@pytest.mark.parametrize("options, env", WAYS, ids=["dev", "debug-malloc", "plain", "bare-bones"])
def test_the_package_is_there_in_any_python_before_anything_was_loaded(jobs, interpreter, options, env):
    done = jobs.run(interpreter, *options, "-c", SHOWN, options=["--quiet"], env=env)
    assert (done.code, done.out, done.err) == (0, "Importer <strandline>/_clock.py\n", "")


def test_what_only_an_installed_package_has_is_found_in_it(jobs, python):
    package = jobs.folder / "strandline"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('the preloaded one is meant')")
    (package / "only_here.py").write_text("print('found', __name__)")
    script = "import strandline.only_here, strandline; print(strandline.__file__)"
    done = jobs.run(python, "-c", script, options=["--quiet"])
    assert done.out == "found strandline.only_here\n<strandline>/__init__.py\n", done.err


def test_the_report_is_named_from_where_the_job_was_started(jobs, python):
    script = train().replace(
        "import torch", "import os, torch; os.makedirs('deep/er'); os.chdir('deep/er')", 1
    )
    done = jobs.run(python, "-c", textwrap.dedent(script), out=jobs.folder / "reports")
    assert done.code == 0 and "; report: reports/rank0-" in lines(done)[-1], done.err


def test_the_installed_package_is_run_in_a_preloaded_process(jobs, python):
    env = {"PYTHONPATH": str(COMMAND.parents[2] / "python")}
    done = jobs.run(python, "-m", "strandline", "--version", options=["--quiet"], env=env)
    assert (done.code, done.err) == (0, "") and done.out.startswith("strandline "), done


INTERRUPTS = """
    import os, signal, sys, torch
    from strandline._around import _plain, around
    from strandline._clock import Clock

    def interrupt(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10):
            pass

    def leave(*args, **kwargs):
        raise SystemExit(3)

    def trouble(*args, **kwargs):
        raise ValueError("of ours")

    def nothing(*args, **kwargs):
        return True

    def original(fails):
        print("called", end=" ")
        if fails:
            raise LookupError("of the original")
        return "result"

    def tried(make, before, after, fails):
        try:
            print(make(original, before, after)(fails))
        except BaseException as error:
            print(type(error).__name__, type(error.__context__).__name__)

    for make in (around, _plain):
        print(type(make(original, nothing, nothing)).__name__)
        for fails in (False, True):
            for before, after in (
                (interrupt, nothing), (leave, nothing), (trouble, nothing),
                (nothing, interrupt), (nothing, leave), (nothing, trouble),
            ):
                tried(make, before, after, fails)

    # An interrupt in the middle of what is done before a backward pass: the next pass is seen again.
    net = torch.nn.Linear(2, 1)
    seen = []
    begins = Clock.backward_begins

    def interrupted(self):
        seen.append("pass")
        if len(seen) == 1:
            interrupt()
        return begins(self)

    Clock.backward_begins = interrupted
    for _ in range(3):
        try:
            net(torch.ones(1, 2)).sum().backward()
        except KeyboardInterrupt:
            print("interrupted")
    print(seen)
"""

EXPECTED = """
KeyboardInterrupt NoneType
SystemExit NoneType
called result
called KeyboardInterrupt NoneType
called SystemExit NoneType
called result
KeyboardInterrupt NoneType
SystemExit NoneType
called LookupError NoneType
called KeyboardInterrupt LookupError
called SystemExit LookupError
called LookupError NoneType
"""


def test_an_interrupt_that_comes_in_our_code_reaches_the_job(jobs, python):
    """Python runs signal handlers wherever its code runs: what they raise is meant for the job."""
    done = jobs.run(python, jobs.script(INTERRUPTS), options=["--quiet"])
    assert done.code == 0, done.err
    want = f"around{EXPECTED}function{EXPECTED}interrupted\n{['pass'] * 3}\n"
    assert done.out == want


FAULTS = """
    import sys, traceback, warnings, torch
    from torch.utils.data import DataLoader, Dataset

    def tried(what):
        try:
            what()
        except Exception:
            traceback.print_exc()

    net = torch.nn.Linear(2, 1)
    loss = net(torch.ones(1, 2)).sum()
    loss.backward()
    tried(lambda: loss.backward())
    tried(lambda: torch.autograd.backward([loss]))
    tried(lambda: torch.optim.SGD([], lr=0.1))
    tried(lambda: torch.optim.Adam(3))

    class Broken(Dataset):
        def __len__(self): return 4
        def __getitem__(self, n): raise KeyError("of the data set")

    class Sampler(torch.utils.data.Sampler):
        def __init__(self): pass
        def __iter__(self): raise LookupError("of the sampler")

    tried(lambda: next(iter(DataLoader(Broken()))))
    tried(lambda: next(iter(DataLoader(Broken(), sampler=Sampler()))))
    tried(lambda: next(iter(DataLoader(Broken(), num_workers=1, sampler=Sampler()))))
    tried(lambda: torch.compile(3, nonsense=True))

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise ArithmeticError("of the backward pass") from KeyError("its cause")

    tried(lambda: Inside.apply(torch.ones(2, requires_grad=True)).sum().backward())
    warnings.simplefilter("always")
    torch.ones(1, requires_grad=True).sum().backward(create_graph=True)
    raise SystemExit(9)
"""


def test_no_frame_of_ours_is_in_the_users_tracebacks(jobs, python):
    """Nor in warnings. (Module.train keeps one: dynamo has to see through it.)"""
    done = jobs.same(python, jobs.script(FAULTS))
    assert done.code == 9 and done.err.count("Traceback (most") == 9 and "<strandline>" not in done.err


DISGUISES = """
    import copy, inspect, pickle, sys, torch
    bare = {}
    for owner, name in (
        (torch.autograd, "backward"), (torch.utils.data.DataLoader, "__iter__"), (torch.optim.Optimizer, "__init__"),
    ):
        function = getattr(owner, name)
        assert sys.argv[1] == "bare" or type(function).__module__ == "strandline._around", function
        bare[name] = (
            str(inspect.signature(function)), function.__module__, function.__qualname__, function.__doc__,
            pickle.loads(pickle.dumps(function)) is function, copy.deepcopy(function) is function,
            repr(function).split(" at ")[0],
        )
    print(bare, inspect.signature(torch.optim.SGD), inspect.signature(torch.optim.Optimizer))
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    @torch.compile(backend="eager", fullgraph=True)
    def whole(x):
        net.eval()
        y = net(x)
        net.train()
        return y.sum()
    whole(torch.ones(1, 2)).backward()
    print(net.training, [p.grad.shape for p in net.parameters()])
"""


def test_what_stands_around_torchs_functions_looks_like_them(jobs, python):
    script = jobs.script(DISGUISES)
    bare = jobs.bare(python, script, "bare")
    assert bare.code == 0, bare.err
    ours = jobs.run(python, script, "ours", options=["--quiet"])
    assert (ours.code, ours.out) == (0, bare.out), ours.err


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


def test_a_stranger_in_the_same_folder_is_no_rank_of_ours(jobs, python):
    """Another job writes its report into the same --out while this one, which has children, runs."""
    script = jobs.script("""
        import json, os, pathlib, subprocess, torch
        subprocess.run(["true"])
        place = pathlib.Path(os.environ["STRANDLINE_OUT"], "rank0-1")
        place.mkdir(parents=True)
        report = {"schema": 1, "verdict": "clean", "run": {"pid": 1, "launched_by": ["1:1"]}}
        (place / "report.json").write_text(json.dumps(report))
        torch.ones(10)
        print("done")
    """)
    done = jobs.run(python, script)
    assert (done.code, done.out) == (0, "done\n")
    assert len(list(jobs.out.glob("*/report.html"))) == 1 and "report: " in lines(done)[-1], done.err


def test_what_an_outer_run_said_of_its_job_is_not_true_of_an_inner_one(jobs):
    stale = {"STRANDLINE_JOB": "1", "STRANDLINE_LAUNCHER": "1", "STRANDLINE_VERDICT": "gone:secret"}
    show = ["sh", "-c", "env | grep -E '^STRANDLINE_(JOB|LAUNCHER|VERDICT)=' | sort"]
    (job,) = jobs.run(*show, env=stale).out.splitlines()
    assert re.fullmatch(r"STRANDLINE_JOB=\d{2,}", job)
    launcher, verdict = jobs.run(*show, env=stale, options=["--fail-on-leak"]).out.splitlines()
    assert re.fullmatch(r"STRANDLINE_LAUNCHER=\d{2,}", launcher)
    assert re.fullmatch(r"STRANDLINE_VERDICT=strandline-.*:[0-9a-f]{32}", verdict)


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
    os.dup2(os.open("job.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    """
    done = jobs.run(python, jobs.script(before + train()))
    log = (jobs.folder / "job.log").read_text()
    assert "strandline: LEAK" in log and "strandline: leak: " in log and done.err == ""


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps-stderr", "closes-stderr"])
def test_a_data_file_that_was_given_stderrs_number_is_left_alone(jobs, python, keeps):
    before = f"""
    import os
    {"kept_stderr = os.dup(2)" if keeps else ""}
    os.close(2)
    data = open("data.bin", "wb", buffering=0)
    assert data.fileno() == 2
    data.write(b"data of the job")
    """
    done = jobs.run(python, jobs.script(before + train()))
    assert (done.code, done.out) == (0, "done\n")
    assert (jobs.folder / "data.bin").read_bytes() == b"data of the job"
    assert ("strandline: LEAK" in done.err) == keeps and done.report["verdict"] == "leak"


def test_a_stderr_that_nobody_reads_kills_no_job(jobs, python):
    """A program that leaves SIGPIPE as it is would die of what we say."""
    source = jobs.script(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <signal.h>
        #include <unistd.h>
        int main(void) {
            int (*say)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "strandline_say");
            if (!say) return 1;
            say("of a native program");
            /* One that waits already is the job's own. */
            sigset_t set, waiting;
            sigemptyset(&set);
            sigaddset(&set, SIGPIPE);
            sigprocmask(SIG_BLOCK, &set, 0);
            raise(SIGPIPE);
            say("again");
            sigpending(&waiting);
            return sigismember(&waiting, SIGPIPE) == 1 ? 0 : 2;
        }
        """,
        "native.c",
    )
    subprocess.run(["cc", "-o", jobs.folder / "native", source, "-ldl"], check=True)
    for command in ([python, "-c", "pass"], ["bash", "-c", "true; true"], [jobs.folder / "native"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            list(map(str, jobs.command(*command))), env=jobs.environment(), cwd=jobs.folder, stderr=write
        )
        os.close(write)
        assert done.returncode == 0, command


def test_a_full_pipe_that_the_job_reads_itself_does_not_stop_it(jobs, python):
    """The reader needs Python's lock, which the thread that says something has."""
    before = """
    import os
    read, write = os.pipe()
    os.dup2(write, 2)
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    """
    done = jobs.run(python, jobs.script(before + train()))
    assert (done.code, done.out) == (0, "done\n")
