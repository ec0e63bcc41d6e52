"""Hostile processes: whatever a job does, its output, result and exit code stay what they are without us."""

import os
import signal
import subprocess

import pytest
from runner import COMMAND, ROOT, end, wait_for_line

LIBRARY = COMMAND.parent / "libstrandline.so"

TRAIN = """
    import hashlib, sys, torch, torch.nn as nn

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def train(net, steps=40, kept=None):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for step in range(steps):
            x = torch.randn(16, 32)
            loss = nn.functional.cross_entropy(net(x), torch.randint(0, 10, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if kept is not None:
                kept.append(net(x))
        return net

    def digest(net):
        data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        return hashlib.sha256(data).hexdigest()
"""


def job(text):
    import textwrap

    return textwrap.dedent(TRAIN) + textwrap.dedent(text)


def test_results_are_bit_identical(jobs, python):
    script = jobs.script(job("print(digest(train(model())))"))
    assert jobs.same(python, script).report["verdict"] == "clean"


def test_an_exception_passes_unchanged(jobs, python):
    script = jobs.script(job("train(model())\nraise ValueError('of the job itself')"))
    done = jobs.same(python, script)
    assert done.code == 1 and "of the job itself" in done.err
    assert done.report["run"]["steps"] == 40


def test_os_exit_keeps_its_code_and_leaves_a_report(jobs, python):
    script = jobs.script(job("import os\ntrain(model())\nprint('x', flush=True)\nos._exit(7)"))
    done = jobs.same(python, script)
    assert done.code == 7
    assert done.report["run"]["steps"] == 40


def test_sys_exit_in_the_middle(jobs, python):
    script = jobs.script(job("train(model(), 5)\nsys.exit(11)"))
    assert jobs.same(python, script).code == 11


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_a_step_still_kills(jobs, python, number):
    script = jobs.script(job("print('ready', flush=True)\ntrain(model(), 10**9)"))
    process = jobs.start(python, script)
    wait_for_line(process, "ready")
    import time

    time.sleep(1.0)
    code, _, _ = end(process, number)
    assert code == -number
    (path,) = jobs.out.rglob("report.json")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_hangup_that_is_ignored_stays_ignored(jobs, python):
    script = jobs.script(
        job("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\ntrain(model(), 5)\nprint('on')")
    )
    done = jobs.same(python, script, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert (done.code, done.out) == (0, "on\n")


def test_sigkill_leaves_no_half_written_file(jobs, python):
    script = jobs.script(job("print('ready', flush=True)\ntrain(model(), 10**9)"))
    process = jobs.start(python, script, options=["--every", "3"])
    wait_for_line(process, "ready")
    import json
    import time

    from test_control import wait_for

    assert wait_for(lambda: list(jobs.out.rglob("report.json"))), "reports are written all the time"
    time.sleep(0.5)
    code, _, _ = end(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    for path in jobs.out.rglob("*.json"):
        json.loads(path.read_text())


def test_the_job_s_own_signal_handlers_win(jobs, python):
    script = jobs.script(
        job("""
        import os, signal
        seen = []
        signal.signal(signal.SIGUSR2, lambda *a: seen.append("USR2"))
        signal.signal(signal.SIGTERM, lambda *a: seen.append("TERM"))
        train(model(), 5)
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        train(model(), 5)
        print(seen)
        """)
    )
    assert "['USR2', 'TERM']" in jobs.same(python, script).out


def test_a_handler_set_before_torch_is_kept(jobs, python):
    script = jobs.script(
        "import os, signal\nseen = []\nsignal.signal(signal.SIGUSR2, lambda *a: seen.append('mine'))\n"
        + job("train(model(), 5)\nos.kill(os.getpid(), signal.SIGUSR2)\ntrain(model(), 1)\nprint(seen)")
    )
    assert "['mine']" in jobs.same(python, script).out


def test_a_report_on_request_while_threads_allocate(jobs, python):
    script = jobs.script(
        job("""
        import threading
        stop = threading.Event()
        def churn():
            while not stop.is_set():
                torch.ones(37, 41).mul(2).sum()
        threads = [threading.Thread(target=churn) for _ in range(6)]
        [t.start() for t in threads]
        print("ready", flush=True)
        train(model(), 400)
        stop.set()
        [t.join() for t in threads]
        print("done", flush=True)
        """)
    )
    process = jobs.start(python, script)
    wait_for_line(process, "ready")
    import json
    import time

    for _ in range(50):
        if process.poll() is None:
            process.send_signal(signal.SIGUSR2)
        time.sleep(0.02)
        for path in jobs.out.rglob("report.json"):
            json.loads(path.read_text())
    code, out, _ = end(process)
    assert code == 0 and "done" in out
    assert list(jobs.out.rglob("report.json"))


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_dataloader_workers(jobs, python, context):
    script = jobs.script(
        job(f"""
        import ctypes
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __init__(self):
                self.rows = torch.arange(64 * 32, dtype=torch.float32).view(64, 32)
            def __len__(self):
                return 64
            def __getitem__(self, i):
                self.rows[i] += 1  # into the inherited tensor: the parent's must not change
                extra = torch.full((1000,), float(i)).sum()
                return self.rows[i] + extra * 0

        if __name__ == "__main__":
            data = Data()
            before = data.rows.clone()
            loader = DataLoader(data, 8, num_workers=2, multiprocessing_context="{context}")
            total = 0.0
            for epoch in range(2):
                for batch in loader:
                    total += batch.sum().item()
            print(total, torch.equal(before, data.rows), digest(train(model())))
        """)
    )
    done = jobs.same(python, script)
    if context == "fork":  # with the others, torch itself moves the rows into memory that workers share
        assert "True" in done.out
    assert len(done.reports()) == 1, "workers must write no report of their own"


def test_a_forked_child_is_inert(jobs, python):
    script = jobs.script(
        job("""
        import ctypes, gc, os
        train(model(), 5)
        mine = torch.arange(100000.0)
        preloaded = "libstrandline" in os.environ.get("LD_PRELOAD", "")
        mode = ctypes.PyDLL(None).strandline_mode if preloaded else None
        pid = os.fork()
        if pid == 0:
            mine += 1
            fresh = torch.ones(100000) * 3
            code = 0 if fresh.sum() == 300000 and mine[0] == 1 else 1
            if mode is not None and mode() != 0:
                code = 2
            del mine, fresh
            gc.collect()
            train(model(), 3)
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, mine[0].item(), digest(train(model())))
        """)
    )
    done = jobs.same(python, script)
    assert done.out.startswith("0 0.0 ")
    assert len(done.reports()) == 1


def test_fork_while_another_thread_allocates(jobs, python):
    script = jobs.script(
        job("""
        import os, threading
        # A fork while torch looks at the processor, once per process, hangs its child: torch alone does that too.
        torch.ones(1000).add_(1)
        stop = threading.Event()
        def churn():
            while not stop.is_set():
                torch.ones(1000).add_(1)
        threads = [threading.Thread(target=churn) for _ in range(3)]
        [t.start() for t in threads]
        bad = 0
        for i in range(60):
            pid = os.fork()
            if pid == 0:
                torch.ones(500)
                os._exit(0)
            bad += os.waitpid(pid, 0)[1] != 0
        stop.set()
        [t.join() for t in threads]
        print("bad", bad)
        """)
    )
    assert jobs.same(python, script).out == "bad 0\n"


def test_children_without_torch_notice_nothing(jobs, python):
    script = jobs.script(
        job("""
        import subprocess
        train(model(), 3)
        open("t.c", "w").write("int main(void) { return 0; }")
        for command in (["bash", "-c", "echo hi; true"], ["gcc", "t.c", "-o", "t"], ["./t"], ["ls", "t.c"],
                        [sys.executable, "-c", "print('no torch')"], ["env", "-i", "/bin/true"]):
            done = subprocess.run(command, capture_output=True, text=True)
            print(command[0].rsplit("/", 1)[-1], done.returncode, done.stdout, done.stderr)
        """)
    )
    done = jobs.same(python, script)
    assert len(done.reports()) == 1


def test_torch_imported_in_another_thread(jobs, python):
    script = jobs.script(
        "import threading\n"
        "t = threading.Thread(target=lambda: __import__('torch'))\nt.start()\nt.join()\n"
        + job("print(digest(train(model())))")
    )
    assert jobs.same(python, script).report["run"]["steps"] == 40


def test_isolated_stdin_and_module(jobs, python):
    text = job("print(digest(train(model())), __name__)")
    script = jobs.script(text, "trainmod.py")
    for how in ([python, "-I", script], [python, "-m", "trainmod"]):
        assert jobs.same(*how, cwd=jobs.folder).report["run"]["steps"] == 40
    assert jobs.same(python, "-", stdin=text).report["run"]["steps"] == 40


def test_a_python_without_torch(jobs, python):
    script = jobs.script("print(sum(range(10)))\nraise SystemExit(5)")
    done = jobs.same(python, script)
    assert done.code == 5 and done.reports() == []


def test_preloaded_twice(jobs, python, tmp_path):
    import shutil

    copy = tmp_path / "libcopy.so"
    shutil.copy(LIBRARY, copy)
    script = jobs.script(job("print(digest(train(model())))"))
    done = jobs.same(python, script, env={"LD_PRELOAD": str(copy), "STRANDLINE_MODE": "off"})
    assert len(done.reports()) == 1


def test_an_unwritable_folder_is_said_once_and_the_job_goes_on(jobs, python):
    script = jobs.script(job("print(digest(train(model())))"))
    plain = jobs.bare(python, script)
    done = jobs.run(python, script, out="/proc/strandline-out")
    assert (done.code, done.out) == (plain.code, plain.out)
    first, *_, last = done.err.splitlines()
    assert done.err.count("cannot write") == 1 and "/proc/strandline-out" in first and "--out" in first
    assert last.startswith("strandline: clean: ") and "no report, /proc/strandline-out" in last
    assert "Traceback" not in done.err


def powerless():
    """Root writes wherever it likes; not without these two capabilities."""
    if os.geteuid() != 0:
        return
    import ctypes

    drop_from_bounding_set, dac_override, dac_read_search = 24, 1, 2
    for capability in (dac_override, dac_read_search):
        if ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0) != 0:
            raise OSError("root's power over file modes cannot be given up")


def test_a_read_only_working_directory(jobs, python):
    script = jobs.script(
        job("""
        import pathlib
        try:
            pathlib.Path("mine").write_text("")
        except PermissionError:
            print("read-only")
        print(digest(train(model())))
        """)
    )
    here = jobs.folder / "here"
    here.mkdir()
    here.chmod(0o555)
    plain = jobs.bare(python, script, cwd=here, before=powerless)
    done = jobs.run(python, script, out=False, cwd=here, before=powerless)
    assert (done.code, done.out) == (plain.code, plain.out)
    assert plain.out.startswith("read-only\n")
    first, last = [line for line in done.err.splitlines() if line.startswith("strandline:")]
    assert str(here / "strandline-out") in first and "--out" in first, done.err
    assert last.startswith("strandline: clean: ") and "no report, strandline-out/" in last


def test_a_job_that_closes_what_it_did_not_open(jobs, python):
    """Daemons close every descriptor; a signal must then disturb no file that the job opens later."""
    script = jobs.script(
        job("""
        import os, signal, time
        train(model(), 5)
        preloaded = "libstrandline" in os.environ.get("LD_PRELOAD", "")
        os.closerange(3, 64)
        ends = [os.pipe() for _ in range(16)]
        for _ in range(3):
            if preloaded:
                os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.1)
        for read, write in ends:
            os.write(write, b"whole")
            assert os.read(read, 100) == b"whole"
        print(digest(train(model())))
        """)
    )
    assert jobs.same(python, script).report["run"]["steps"] >= 44  # the second optimizer's first step is none


def test_an_interrupt_is_a_keyboard_interrupt(jobs, python):
    script = jobs.script(
        job("""
        import os, signal
        train(model(), 5)
        os.kill(os.getpid(), signal.SIGINT)
        train(model(), 5)
        """)
    )
    done = jobs.same(python, script)
    assert done.code == -signal.SIGINT and "KeyboardInterrupt" in done.err
    assert done.report["run"]["steps"] == 5


def test_an_abort_stays_one(jobs, python):
    script = jobs.script(job("import os\ntrain(model(), 5)\nprint('x', flush=True)\nos.abort()"))
    assert jobs.same(python, script).code == -signal.SIGABRT


def test_leaving_from_a_signal_handler_in_c(jobs, python):
    """`_exit` may be called in a signal handler, whatever lock the interrupted thread holds."""
    source = jobs.script(
        """
        #include <signal.h>
        #include <sys/time.h>
        #include <unistd.h>
        static void leave(int signal) { (void)signal; _exit(4); }
        void arm(void) {
            struct itimerval soon = {{0, 0}, {0, 300000}};
            signal(SIGALRM, leave);
            setitimer(ITIMER_REAL, &soon, 0);
        }
        """,
        "leave.c",
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", jobs.folder / "leave.so", source], check=True)
    script = jobs.script(
        job(f"""
        import ctypes
        arm = ctypes.CDLL({str(jobs.folder / "leave.so")!r}).arm
        train(model(), 5)
        arm()
        for _ in range(10**9):
            torch.empty(1)
        """)
    )
    for _ in range(3):
        assert jobs.same(python, script).code == 4


def test_a_closed_stderr(jobs, python):
    script = jobs.script(job("kept = []\nprint(digest(train(model(), 60, kept)))"))
    plain = jobs.bare(python, script, before=lambda: os.close(2))
    done = jobs.run(python, script, before=lambda: os.close(2))
    assert (done.code, done.out) == (plain.code, plain.out)
    assert done.report["verdict"] == "leak"


def test_a_script_given_on_the_command_line(jobs, python):
    assert jobs.same(python, "-c", job("print(digest(train(model())))")).report["run"]["steps"] == 40


def test_training_in_another_thread(jobs, python):
    script = jobs.script(
        job("""
        import threading
        def work():
            print(digest(train(model())))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """)
    )
    assert jobs.same(python, script).report["run"]["steps"] == 40


def test_ranks_made_by_spawn_report_for_themselves(jobs, python):
    script = jobs.script(
        job("""
        import torch.multiprocessing as mp
        def work(rank):
            net = train(model(), 40)
            print(rank, digest(net), flush=True)
        if __name__ == "__main__":
            mp.spawn(work, nprocs=1)
        """)
    )
    done = jobs.same(python, script)
    assert [report["run"]["steps"] for report in done.reports()][-1] in (39, 40)


def test_too_large_an_allocation_fails_as_without_us(jobs, python):
    script = jobs.script(
        job("""
        train(model(), 3)
        try:
            torch.empty(1 << 60)
        except RuntimeError as error:
            print("caught", "allocate" in str(error))
        print(digest(train(model())))
        """)
    )
    assert "caught True" in jobs.same(python, script).out


def test_children_by_spawn_do_not_report(jobs, python):
    script = jobs.script(
        job("""
        import multiprocessing as mp
        def work(q):
            q.put(torch.ones(3).sum().item())
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            q = context.Queue()
            p = context.Process(target=work, args=(q,))
            p.start()
            print(q.get())
            p.join()
            print(p.exitcode, digest(train(model())))
        """)
    )
    done = jobs.same(python, script)
    assert len(done.reports()) == 1


def test_fail_on_leak(jobs, python):
    clean = jobs.script(job("train(model(), 60)"), "clean.py")
    leaky = jobs.script(job("kept = []\ntrain(model(), 60, kept)"), "leaky.py")
    failing = jobs.script(job("kept = []\ntrain(model(), 60, kept)\nsys.exit(9)"), "failing.py")
    option = ["--fail-on-leak"]
    assert jobs.run(python, clean, options=option, out=jobs.folder / "a").code == 0
    assert jobs.run(python, leaky, options=option, out=jobs.folder / "b").code == 3
    assert jobs.run(python, failing, options=option, out=jobs.folder / "c").code == 9


def test_wrong_command_lines(jobs):
    assert jobs.bare(COMMAND, "run", "--", "no-such-program").code == 127
    plain = jobs.script("true\n", "plain.txt")
    plain.chmod(0o644)
    assert jobs.bare(COMMAND, "run", "--", plain).code == 126
    done = jobs.bare(COMMAND, "run", "--mode", "gpu", "--", "true")
    assert done.code == 2 and "heap" in done.err
    done = jobs.bare(COMMAND, "report", plain)
    assert done.code == 2 and str(plain) in done.err and "panicked" not in done.err


def test_the_library_needs_nothing_of_cuda_or_python():
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "NEEDED" in line]
    allowed = {
        "libc.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
    }
    assert set(names) <= allowed, names
    assert (ROOT / "Cargo.lock").exists() and os.access(COMMAND, os.X_OK)
