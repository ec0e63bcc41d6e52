"""Jobs that crash: the report is written, and the death stays what it is without us."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import time

import pytest
from runner import COMMAND, LIMIT, end, wait_for_line
from test_control import ask, places, wait_for

# CI does fewer than the 30 that were promised.
CRASHES = int(os.environ.get("STRANDLINE_CRASHES", "6"))
# What a crash may be put off for by strandline, and what a busy machine may add to that.
BOUND = 5 + 25

TRAIN = """
    import ctypes, faulthandler, os, signal, sys, threading, time
    import torch, torch.nn as nn

    kept = []

    def train(steps=45, leak=True):
        net = nn.Linear(32, 10)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(steps):
            loss = net(torch.randn(16, 32)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if leak:
                kept.append(torch.ones(1000))

    def null():
        ctypes.string_at(0)

    def machine_code(code):
        import mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        ctypes.CFUNCTYPE(None)(at)()

    def past_the_end():
        import mmap, tempfile
        file = tempfile.TemporaryFile()
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        mapped[0]

    def send(number):
        os.kill(os.getpid(), number)
        time.sleep(60)  # it may come to another thread
"""

# How to crash by itself, and the signal that comes of it.
WAYS = {
    "os.abort()": signal.SIGABRT,
    "null()": signal.SIGSEGV,
    "past_the_end()": signal.SIGBUS,
    "machine_code(bytes([0x31, 0xc9, 0xf7, 0xf1]))": signal.SIGFPE,
    "machine_code(bytes([0x0f, 0x0b]))": signal.SIGILL,
}
SIGNALS = sorted(WAYS.values())


@pytest.fixture(autouse=True)
def no_core_files():
    """Crashes here are many, and on purpose."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def job(text):
    import textwrap

    return textwrap.dedent(TRAIN) + textwrap.dedent(text)


def only(done):
    """The one report of a run, which is whole: nothing else lies beside it."""
    (report,) = done.reports()
    (folder,) = {path.parent for path in done.folder.rglob("report.json")}
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json", "report.txt"]
    return report


def crashed(done, number, why=True):
    assert done.code == -number, (done.code, done.err[-3000:])
    report = only(done)
    assert report["run"]["written"] == "crash"
    assert report["run"]["crash"]["signal"] == signal.Signals(number).name
    assert report["run"]["crash"].get("left_out", []) == []
    if why:
        assert done.err.count(f"crash ({signal.Signals(number).name}): ") == 1, done.err[-3000:]
    return report


@pytest.mark.parametrize("way", WAYS)
def test_each_signal_by_what_raises_it(jobs, python, way):
    """Everything that the job itself prints is the same as without us, and so is its death."""
    script = jobs.script(job(f"train()\nprint('before', flush=True)\n{way}\nprint('after')"))
    done = jobs.same(python, script)
    report = crashed(done, WAYS[way], why=False)
    assert done.out == "before\n" and report["run"]["steps"] == 45
    crash = report["run"]["crash"]
    assert crash["thread"] == report["run"]["pid"]
    if way == "null()":
        assert crash["address"] == "0x0"
    assert ("address" in crash) == (WAYS[way] != signal.SIGABRT)
    (remark,) = [remark for remark in report["remarks"] if remark["kind"] == "crash"]
    assert crash["signal"] in remark["what"] and "not looked for" in remark["because"]


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_as_another_process_sends_it(jobs, python, number):
    process = jobs.start(python, jobs.script(job("print('ready', flush=True)\ntrain(10**9, leak=False)")))
    wait_for_line(process, "ready")
    assert wait_for_steps(process.pid)
    began = time.monotonic()
    code, _, err = end(process, number)
    assert code == -number and time.monotonic() - began < BOUND
    name = signal.Signals(number).name
    reports = [json.loads(path.read_text()) for path in jobs.out.rglob("report.json")]
    # It may have come while the thread held what the report needs: then that is said.
    if reports and reports[0]["run"]["written"] == "crash":
        assert reports[0]["run"]["crash"]["sent_by"] == os.getpid()
        assert f"crash ({name}): " in err and "address" not in reports[0]["run"]["crash"]
    else:
        assert f"crash ({name}): no report" in err, err


def wait_for_steps(pid):
    """The job is in the middle of its training."""
    (path,) = places(pid)

    def steps():
        answers = ask(path, '{"strandline":1,"ask":"live"}') if path.exists() else []
        return answers and answers[0]["ok"]["steps"] > 2

    return wait_for(steps, 60)


def test_what_leaked_is_told_and_that_holders_were_not_looked_for(jobs, python):
    done = jobs.run(python, jobs.script(job("train(12)\ntrain(60)\nnull()")))
    report = crashed(done, signal.SIGSEGV)
    assert report["verdict"] == "leak", report["reason"]
    finding = report["findings"][0]
    assert "train.py" in finding["allocated_at"]["file"]
    # Found and searched before the crash, or not: never an answer that nobody looked for.
    assert (finding["held_by"] is None) == ("holder_note" in finding)
    text = next(done.folder.rglob("report.txt")).read_text()
    assert "the job crashed: SIGSEGV at address 0x0" in text
    assert "report: " in done.err and "LEAK" in done.err


def test_a_finding_that_waits_for_its_holder_is_told_without_one(jobs, python):
    """Nothing of Python runs between the step that calls it and the crash."""
    script = jobs.script(
        job("""
        for _ in range(80):
            kept.append(torch.ones(1000))
            ctypes.CDLL(None).strandline_step()
        null()
        """)
    )
    report = crashed(jobs.run(python, script), signal.SIGSEGV)
    assert report["verdict"] == "leak", report["reason"]
    assert {finding["held_by"] for finding in report["findings"]} == {None}
    assert "crashed before" in report["findings"][0]["holder_note"]
    text = next(jobs.out.rglob("report.txt")).read_text()
    assert "crashed before" in text and "no Python object was found" not in text


def test_a_thread_that_is_not_the_main_one(jobs, python):
    script = jobs.script(
        job("""
        train()
        thread = threading.Thread(target=null)
        thread.start()
        thread.join()
        """)
    )
    report = crashed(jobs.run(python, script), signal.SIGSEGV)
    assert report["run"]["crash"]["thread"] != report["run"]["pid"]


def test_several_threads_at_once(jobs, python):
    script = jobs.script(
        job("""
        train()
        barrier = threading.Barrier(8)
        c = ctypes.CDLL(None)
        def work():
            barrier.wait()
            c.abort()
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        """)
    )
    crashed(jobs.run(python, script), signal.SIGABRT)


@pytest.mark.parametrize("way", ["os.abort()", "null()"])
def test_under_load(jobs, python, way):
    script = jobs.script(
        job(f"""
        stop = threading.Event()
        def churn(n):
            while not stop.is_set():
                torch.ones(37 + n, 41).mul(2).sum()
        [threading.Thread(target=churn, args=(n,), daemon=True).start() for n in range(8)]
        train(12, leak=False)
        {way}
        """)
    )
    for n in range(CRASHES):
        out = jobs.folder / f"out{n}"
        began = time.monotonic()
        done = jobs.run(python, script, out=out)
        assert done.code == -WAYS[way] and time.monotonic() - began < LIMIT
        told = [json.loads(path.read_text()) for path in out.rglob("report.json")]
        name = WAYS[way].name
        if told:
            assert told[0]["run"]["crash"]["signal"] == name and f"crash ({name}): " in done.err
        else:
            assert f"crash ({name}): no report" in done.err, done.err


def test_while_signals_from_outside_come_at_any_moment(jobs, python):
    """SIGABRT finds the main thread anywhere: in our heap, in our ledger, in the middle of a report."""
    script = jobs.script(
        job("""
        def churn(n):
            while True:
                torch.ones(37 + n, 41).mul(2).sum()
        [threading.Thread(target=churn, args=(n,), daemon=True).start() for n in range(3)]
        print("ready", flush=True)
        train(10**9, leak=False)
        """)
    )
    for n in range(CRASHES):
        process = jobs.start(python, script, options=["--every", "1"], out=jobs.folder / f"o{n}")
        wait_for_line(process, "ready")
        assert wait_for_steps(process.pid)
        time.sleep(0.013 * n)
        began = time.monotonic()
        code, _, err = end(process, signal.SIGABRT)
        assert code == -signal.SIGABRT and time.monotonic() - began < BOUND
        (path,) = (jobs.folder / f"o{n}").rglob("report.json")
        report = json.loads(path.read_text())
        if report["run"]["written"] == "crash":
            assert "crash (SIGABRT): " in err
        else:
            assert "crash (SIGABRT): no report" in err, err


def test_a_crash_in_the_thread_that_writes_a_report(jobs, python):
    """It holds the lock of the writing, and now and then others."""
    script = jobs.script(
        job("""
        train()
        threading.Timer(1.0, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGABRT)).start()
        while True:
            ctypes.CDLL(None).strandline_report(None)
        """)
    )
    done = jobs.run(python, script)
    assert done.code == -signal.SIGABRT
    report = only_report(done)
    if report["run"]["written"] == "crash":
        assert report["findings"] is not None and "crash (SIGABRT): " in done.err
    else:
        assert "crash (SIGABRT): no report" in done.err, done.err


def only_report(done):
    (path,) = done.folder.rglob("report.json")
    return json.loads(path.read_text())


def test_a_thread_that_crashes_while_a_library_is_loaded(jobs, python):
    """It holds the loader's lock, which the names of native frames need."""
    source = jobs.folder / "broken.c"
    source.write_text("__attribute__((constructor)) static void f(void) { *(volatile int *)0 = 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", jobs.folder / "broken.so", source], check=True)
    script = jobs.script(job(f"train()\nctypes.CDLL({str(jobs.folder / 'broken.so')!r})"))
    began = time.monotonic()
    done = jobs.run(python, script)
    assert done.code == -signal.SIGSEGV and time.monotonic() - began < LIMIT
    report = only(done)
    assert report["run"]["written"] == "crash" and report["sites"]
    assert report["run"]["crash"]["left_out"] == ["the names of native frames"]
    assert "the names of native frames" in next(done.folder.rglob("report.txt")).read_text()


def test_a_job_that_runs_out_of_stack(jobs, python):
    source = jobs.folder / "deep.c"
    source.write_text(
        "int deep(int n) { volatile char here[4096]; here[0] = n; return n < 0 ? 0 : deep(n + 1) + here[0]; }\n"
    )
    library = jobs.folder / "deep.so"
    subprocess.run(["cc", "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    script = jobs.script(job(f"train()\nctypes.CDLL({str(library)!r}).deep(0)"))
    crashed(jobs.same(python, script), signal.SIGSEGV, why=False)


# ---- those who handle the same signals ---------------------------------------------------------------------


@pytest.mark.parametrize("way", ["os.abort()", "null()", "past_the_end()"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_faulthandler_prints_its_traceback(jobs, python, way, order):
    text = job(f"{'' if order == 'before' else 'faulthandler.enable()'}\ntrain()\n{way}")
    script = jobs.script(("import faulthandler\nfaulthandler.enable()\n" if order == "before" else "") + text)
    done = jobs.run(python, script)
    crashed(done, WAYS[way])
    assert done.err.count("Fatal Python error") == 1 and "train.py" in done.err, done.err
    plain = jobs.bare(python, script)
    assert (plain.code, plain.out) == (done.code, done.out)
    # But for the thread's address it is the same.
    trace = [line for line in plain.err.splitlines() if line.startswith(("Fatal Python", "  File"))]
    assert len(trace) > 1 and trace == [line for line in done.err.splitlines() if line in trace], done.err


def test_faulthandler_by_the_environment(jobs, python):
    done = jobs.run(python, jobs.script(job("train()\nnull()")), env={"PYTHONFAULTHANDLER": "1"})
    crashed(done, signal.SIGSEGV)
    assert done.err.count("Fatal Python error: Segmentation fault") == 1


def test_torch_s_own_handlers(jobs, python):
    script = jobs.script(
        job("""
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        train()
        os.abort()
        """)
    )
    done = jobs.run(python, script)
    crashed(done, signal.SIGABRT)
    assert "SIGABRT" in jobs.bare(python, script).err.splitlines()[0], "torch prints its traces without us"
    assert jobs.bare(python, script).err.splitlines()[0].split("(")[0] in done.err


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_job_s_own_is_honoured(jobs, python, when):
    own = "signal.signal(signal.SIGABRT, lambda *_: seen.append('mine'))"
    before = f"import signal\nseen = []\n{own if when == 'before' else ''}\n"
    script = jobs.script(
        before
        + job(f"""
        {own if when == "after" else ""}
        train()
        os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(0.1)
        print(seen)
        """)
    )
    done = jobs.same(python, script)
    assert (done.code, done.out) == (0, "['mine']\n")
    assert [report["run"]["written"] for report in done.reports()] == ["exit"]


def test_a_handler_by_sigaction_is_honoured(jobs, python):
    source = jobs.folder / "own.c"
    source.write_text(
        "#include <signal.h>\n#include <unistd.h>\n"
        'static void h(int n) { (void)n; if (write(1, "mine\\n", 5)) {} _exit(7); }\n'
        "void own(void) { struct sigaction a = {0}; a.sa_handler = h; sigaction(SIGSEGV, &a, 0); }\n"
    )
    library = jobs.folder / "own.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = jobs.same(
        python, jobs.script(job(f"train()\nown = ctypes.CDLL({str(library)!r}).own\nown()\nnull()"))
    )
    assert (done.code, done.out) == (7, "mine\n")


def test_a_signal_that_the_job_ignores(jobs, python):
    script = jobs.script(
        "import signal\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
        + job("train()\nos.kill(os.getpid(), signal.SIGABRT)\nprint('alive')")
    )
    done = jobs.same(python, script)
    assert (done.code, done.out) == (0, "alive\n")


# ---- children, supervisors, switches -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["os.abort()", "null()"])
def test_a_forked_child_dies_at_once_and_writes_nothing(jobs, python, way):
    script = jobs.script(
        job(f"""
        train()
        pid = os.fork()
        if pid == 0:
            {way}
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    here = jobs.folder / "here"
    here.mkdir()
    done = jobs.run(python, script, cwd=here)
    assert done.out.split()[0] == str(int(-WAYS[way])) and done.code == -signal.SIGKILL
    assert [r["run"]["written"] for r in done.reports() if r["run"]["written"] == "crash"] == []
    assert "crash (" not in done.err


def test_the_supervisor_passes_the_death_on(jobs, python):
    script = jobs.script(job("train()\nos.abort()"))
    done = jobs.run(python, script, options=["--fail-on-leak"])
    assert done.code == 128 + signal.SIGABRT
    assert only(done)["run"]["crash"]["signal"] == "SIGABRT"


def test_it_can_be_switched_off(jobs, python):
    for word in ("off", "0"):
        script = jobs.script(job("train(5, leak=False)\nos.abort()"))
        done = jobs.run(python, script, env={"STRANDLINE_CRASH": word})
        assert done.code == -signal.SIGABRT and done.reports() == [] and "crash (" not in done.err


def test_a_folder_that_cannot_be_written_is_named(jobs, python):
    done = jobs.run(python, jobs.script(job("train()\nnull()")), out="/proc/nowhere")
    assert done.code == -signal.SIGSEGV
    assert "crash (SIGSEGV): no report: cannot write /proc/nowhere" in done.err


def test_a_crash_after_the_end_was_told_writes_nothing_new(jobs, python):
    script = jobs.script(
        job("""
        train()
        class Last:
            def __del__(self):
                os.abort()
        import builtins
        builtins.last = Last()
        """)
    )
    done = jobs.run(python, script)
    assert done.code == -signal.SIGABRT
    assert only(done)["run"]["written"] == "exit" and "crash (" not in done.err


def test_a_core_file_is_still_to_be_had(jobs, python):
    """The kernel says in the status whether it dumped one; where cores go elsewhere, it says so without us too."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard != resource.RLIM_INFINITY and os.geteuid() != 0:
        pytest.skip("core files are limited here")
    script = jobs.script(job("train(5)\nnull()"))
    dumped = []
    for command in ([str(python), str(script)], [str(c) for c in jobs.command(python, script)]):
        pid = os.fork()
        if pid == 0:
            limit()
            os.chdir(jobs.folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.execve(command[0], command, jobs.environment())
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        dumped.append(os.WCOREDUMP(status))
    assert dumped[0] == dumped[1]


def test_the_kernel_s_own_words_about_a_fault_are_kept(jobs, python):
    """A debugger that waits for the last signal sees the fault's code and address."""
    source = jobs.folder / "watch.c"
    source.write_text(
        "#include <signal.h>\n#include <stdio.h>\n#include <string.h>\n#include <sys/ptrace.h>\n"
        "#include <sys/wait.h>\n#include <unistd.h>\n"
        "int main(int n, char **a) { (void)n; pid_t p = fork(); if (!p) { ptrace(PTRACE_TRACEME, 0, 0, 0); "
        "execv(a[1], a + 1); _exit(9); }\n int s; while (waitpid(p, &s, 0) == p && WIFSTOPPED(s)) {\n"
        " int g = WSTOPSIG(s); siginfo_t i; memset(&i, 0, sizeof i); ptrace(PTRACE_GETSIGINFO, p, 0, &i);\n"
        ' if (g == SIGSEGV || g == SIGABRT) printf("%d %d %p\\n", g, i.si_code, g == SIGSEGV ? i.si_addr : 0);\n'
        " ptrace(PTRACE_CONT, p, 0, g == SIGTRAP ? 0 : g); }\n"
        ' printf("%d\\n", WIFSIGNALED(s) ? WTERMSIG(s) : -1); return 0; }\n'
    )
    watch = jobs.folder / "watch"
    subprocess.run(["cc", "-o", watch, source], check=True)
    for way, number in (("null()", signal.SIGSEGV), ("os.abort()", signal.SIGABRT)):
        script = jobs.script(job(f"train(5, leak=False)\n{way}"))
        plain = jobs.bare(watch, python, script)
        *seen, died = plain.out.splitlines()
        assert died == str(int(number)) and len(seen) == 1, plain.out + plain.err
        env = {
            "LD_PRELOAD": str(COMMAND.with_name("libstrandline.so")),
            "STRANDLINE_MODE": "host",
            "STRANDLINE_OUT": str(jobs.out),
        }
        ours = jobs.bare(watch, python, script, env=env)
        # Once for our handler, once for the kernel, and both say the same.
        assert ours.out.splitlines() == [*seen, *seen, died], ours.out + ours.err


def test_the_main_thread_keeps_a_stack_for_handlers_that_it_has(jobs, python):
    class Stack(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

    assert ctypes.sizeof(Stack) == 24
    script = jobs.script(
        "import ctypes\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('at', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]\n"
        "mine = ctypes.create_string_buffer(1 << 17)\n"
        "given = Stack(ctypes.addressof(mine), 0, 1 << 17)\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(given), None) == 0\n"
        + job("""
        now = Stack()
        assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(now)) == 0
        print(now.at == given.at, now.size)
        """)
    )
    assert jobs.run(python, script).out == f"True {1 << 17}\n"
