"""Metrics over HTTP: a scraper's view of a running job, and what hostile clients, forks and taken ports do to it."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from runner import COMMAND, Running, wait_for_line
from test_control import ask as ask_control
from test_control import places, strandline, wait_for

KIND = "application/openmetrics-text; version=1.0.0; charset=utf-8"

TRAIN = """
    import os, sys, threading, time, torch, torch.nn as nn

    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    kept = []

    def serve(threads=0):
        def churn(n):
            while not stop.is_set():
                torch.ones(37 + n, 41).mul(2).sum()
        workers = [threading.Thread(target=churn, args=(n,)) for n in range(threads)]
        [t.start() for t in workers]
        net = nn.Linear(32, 10)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        while not stop.is_set():
            net(torch.randn(16, 32)).sum().backward()
            optimizer.step()
            if len(kept) < 2000:
                kept.append(torch.ones(100))
            time.sleep(0.001)
        [t.join() for t in workers]
        print("done", flush=True)
"""


class Served(Running):
    """A job that listens; where, it has said on stderr."""

    def __init__(self, jobs, python, text="serve()", listen="0", options=(), env=None, plain=False):
        import textwrap

        script = jobs.script(textwrap.dedent(TRAIN) + textwrap.dedent(text))
        listening = [] if plain else ["--openmetrics-listen", listen]
        self.err = jobs.folder / f"err-{time.monotonic_ns()}"
        with self.err.open("w") as err:
            self.process = jobs.start(
                python, script, options=[*listening, *options], env=env, stdin=subprocess.PIPE, stderr=err
            )
        self.pid = self.process.pid

    def said(self):
        return self.err.read_text()

    def waits_to_say(self, text):
        assert wait_for(lambda: text in self.said() or self.process.poll() is not None, 60)
        assert text in self.said(), self.said()
        return self.said()

    @property
    def port(self):
        return int(re.search(r"metrics: http://\S+:(\d+)/metrics", self.waits_to_say("metrics: http://"))[1])

    def finish(self):
        out, _ = self.process.communicate("", timeout=120)
        return self.process.returncode, out, self.said()


def ask(port, method="GET", path="/metrics", host="127.0.0.1", **how):
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request(method, path, **how)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body.decode()


def raw(port, data, seconds=30):
    """Sends bytes, returns all that comes until the other side hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        seen = b""
        while part := connection.recv(65536):
            seen += part
        return seen


def families(text):
    parsers = pytest.importorskip("prometheus_client.openmetrics.parser")
    return {family.name: family for family in parsers.text_string_to_metric_families(text)}


def test_a_scraper_reads_a_running_job(jobs, python):
    with Served(jobs, python, options=["--openmetrics", "job.prom"]) as job:
        port = job.port
        status, headers, text = ask(port)
        assert (status, headers["content-type"]) == (200, KIND)
        assert int(headers["content-length"]) == len(text.encode())
        found = families(text)
        assert found["strandline_run"].samples[0].labels["pid"] == str(job.pid)
        steps = found["strandline_steps"].samples[0].value
        assert steps > 0
        assert wait_for(lambda: families(ask(port)[2])["strandline_steps"].samples[0].value > steps)
        assert wait_for((jobs.folder / "job.prom").exists)
        # Each is of its own moment, and a finding or the time of a step that is new is in the later one alone.
        file = jobs.folder / "job.prom"
        assert wait_for(lambda: set(families(file.read_text())) == set(families(ask(port)[2])))
        # Who watches the job is told where it is.
        _, out, _ = strandline("top", "--once", job.pid)
        assert f"metrics http://127.0.0.1:{port}/metrics" in out
        code, out, err = job.finish()
        assert code == 0 and out == "done\n"
        assert err.count("metrics: ") == 1


def test_what_is_asked_otherwise(jobs, python):
    with Served(jobs, python) as job:
        port = job.port
        status, headers, body = ask(port, "HEAD")
        assert (status, headers["content-type"], body) == (200, KIND, "")
        assert int(headers["content-length"]) > 100
        assert ask(port, path="/metrics?name=x")[0] == 200
        assert [ask(port, path=path)[0] for path in ("/", "/metric", "/metrics/x", "/../metrics")] == [
            404
        ] * 4
        status, headers, _ = ask(port, "POST", body=b"x" * 100_000)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert [ask(port, method)[0] for method in ("PUT", "DELETE", "OPTIONS")] == [405] * 3
        assert ask(port, headers={"Host": "rebound.example"})[0] == 421
        assert raw(port, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert raw(port, b"\x16\x03\x01\x00\xa5\x01").startswith(b"HTTP/1.1 400 ")
        assert raw(port, b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        line = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
        assert raw(port, line + b"y" * 8192 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
        assert raw(port, b"GET /" + b"a" * 1_000_000).startswith(b"HTTP/1.1 431 ")
        assert ask(port)[0] == 200
        assert job.finish()[0] == 0


def test_slow_and_silent_clients_hinder_nobody(jobs, python):
    with Served(jobs, python, "serve(2)") as job:
        port = job.port
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
        for one in silent[::3]:
            one.sendall(b"GET /met")
        # Who asks and never reads.
        deaf = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
        for one in deaf:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(ask(port)[0] == 200 for _ in range(5))
        code, out, err = strandline("dump", job.pid)
        assert (code, err) == (0, "") and json.loads(Path(out.strip()).read_text())["run"]["pid"] == job.pid
        with open(f"/proc/{job.pid}/status") as status:
            threads = int(re.search(r"Threads:\s+(\d+)", status.read())[1])
        assert threads < 40, "a thread for each connection"
        # The last of the silent ones is sent away, too, in its time.
        assert silent[-1].recv(1) == b""
        for one in [*silent, *deaf]:
            one.close()
        assert job.finish()[0] == 0


def test_scrapes_dumps_and_reports_at_the_same_time(jobs, python):
    with Served(jobs, python, "serve(4)", options=["--every", "20"]) as job:
        port = job.port

        def scrape(_):
            status, _, text = ask(port)
            return status == 200 and text.endswith("# EOF\n")

        def dump(n):
            code, out, _ = strandline("dump", *(["--signal"] if n % 2 else []), job.pid)
            with open(out.strip()) as file:
                return code == 0 and json.load(file)["schema"] == 1

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            scrapes = pool.map(scrape, range(200))
            dumps = pool.map(dump, range(10))
            assert all(scrapes) and all(dumps)
        code, out, _ = job.finish()
        assert (code, out) == (0, "done\n")


def test_a_child_does_not_keep_the_port(jobs, python):
    text = """
        def fork():
            while not os.path.exists("go"):
                time.sleep(0.05)
            pid = os.fork()
            if pid == 0:
                time.sleep(300)
                os._exit(0)
            import subprocess
            other = subprocess.Popen(["sleep", "300"], close_fds=False)
            print("children", pid, other.pid, flush=True)
        threading.Thread(target=fork).start()
        serve()
    """
    with Served(jobs, python, text) as job:
        port = job.port
        (jobs.folder / "go").touch()
        children = [int(pid) for pid in job.process.stdout.readline().split()[1:]]
        try:
            job.process.kill()
            job.process.wait()
            assert len(children) == 2
            for pid in children:
                os.kill(pid, 0)
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def free_ports(count):
    """The first of so many ports in a row, which nobody else is given meanwhile; a job that asks for them by number
    gets them: a port that is bound, and not listened at, may be bound again by who sets SO_REUSEADDR."""
    with contextlib.ExitStack() as taken:
        for first in range(20000 + os.getpid() % 20000, 60000, count):
            with contextlib.ExitStack() as held:
                try:
                    for port in range(first, first + count):
                        one = held.enter_context(socket.socket())
                        one.bind(("127.0.0.1", port))
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                except OSError:
                    continue
                taken.push(held.pop_all())
                break
        else:
            raise AssertionError("no free ports")
        yield first


def test_a_port_that_is_taken_is_said_once_and_the_job_goes_on(jobs, python):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Served(jobs, python, listen=str(port), options=["--quiet"]) as job:
            job.waits_to_say("metrics are not served")
            code, out, err = job.finish()
            assert (code, out) == (0, "done\n")
            assert err.count("\n") == 1 and f"127.0.0.1:{port}" in err and "or 0 for any free one" in err


def test_each_rank_of_a_host_has_a_port_of_its_own(jobs, python):
    with free_ports(3) as first, contextlib.ExitStack() as running:
        env = {"STRANDLINE_CONF": f"openmetrics_listen:{first}", "WORLD_SIZE": "3"}
        ranks = [
            running.enter_context(
                Served(jobs, python, plain=True, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)})
            )
            for n in range(3)
        ]
        for n, job in enumerate(ranks):
            assert job.port == first + n
            (sample,) = families(ask(first + n)[2])["strandline_run"].samples
            assert sample.labels["rank"] == str(n)
        assert [job.finish()[0] for job in ranks] == [0, 0, 0]


def test_torchrun_leaves_the_ports_to_its_ranks(jobs, python):
    """The launcher imports torch, too, and has the same environment."""
    script = jobs.script(
        """
        import os, time, torch, urllib.request
        net = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        port = int(os.environ["PORT"]) + int(os.environ["LOCAL_RANK"])
        until = time.monotonic() + 200
        while time.monotonic() < until:
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            time.sleep(0.01)
            try:
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            except OSError:
                continue
            assert f'rank="{os.environ["RANK"]}",pid="{os.getpid()}"' in text, text
            print("scraped", os.environ["RANK"], flush=True)
            break
        """
    )
    with free_ports(2) as first:
        done = jobs.run(
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
            env={"PORT": str(first)},
            options=["--openmetrics-listen", str(first)],
        )
    assert done.code == 0, done.err[-3000:]
    assert sorted(line for line in done.out.splitlines() if "scraped" in line) == ["scraped 0", "scraped 1"]
    assert "not served" not in done.err, done.err


def test_beyond_this_host_only_where_it_is_asked_for(jobs, python):
    with Served(jobs, python) as job:
        assert ask(job.port)[0] == 200
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = [line[1] for line in listening if line[1].endswith(f":{job.port:04X}") and line[3] == "0A"]
        assert mine == [f"0100007F:{job.port:04X}"]
        assert job.finish()[0] == 0
    with Served(jobs, python, listen="0.0.0.0:0", options=["--quiet"]) as job:
        assert "whoever reaches this address" in job.waits_to_say("metrics: http://0.0.0.0:")
        assert ask(job.port, headers={"Host": "node7.cluster"})[0] == 200
        assert job.finish()[0] == 0


def test_nothing_listens_unless_it_is_asked_to(jobs, python):
    with Served(jobs, python, "print('ready', flush=True)\nserve()", plain=True) as job:
        wait_for_line(job.process, "ready")
        # One that listens would have begun before the control socket tells of steps.
        (path,) = places(job.pid)
        live = '{"strandline":1,"ask":"live"}'
        assert wait_for(lambda: path.exists() and ask_control(path, live)[0]["ok"]["steps"] > 0, 60)
        names = [path.read_text().strip() for path in Path(f"/proc/{job.pid}/task").glob("*/comm")]
        assert "strandline" in {name[:10] for name in names} and "strandline-http" not in names
        code, _, err = job.finish()
        assert code == 0 and "metrics" not in err


def test_a_worker_does_not_take_the_port(jobs, python):
    """One that was spawned has the same environment, and allocates; it makes no steps."""
    script = jobs.script(
        """
        import multiprocessing as mp, time, torch
        def work(queue):
            for _ in range(3000):
                torch.ones(3)
            time.sleep(1.5)
            queue.put(torch.ones(1).item())
        if __name__ == "__main__":
            context = mp.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(queue.get())
            child.join()
        """
    )
    done = jobs.run(python, script, options=["--openmetrics-listen", "0"])
    assert (done.code, done.out) == (0, "1.0\n")
    assert "metrics" not in done.err, done.err


def test_addresses_that_are_none(jobs):
    for wrong in ("everywhere", "70000", "host:1", "1.2.3.4"):
        done = jobs.bare(COMMAND, "run", "--openmetrics-listen", wrong, "--", "true")
        assert done.code == 2 and wrong in done.err and "0.0.0.0:9400" in done.err, done.err


def test_the_job_s_end_does_not_wait_for_clients(jobs, python):
    with Served(jobs, python) as job:
        idle = [socket.create_connection(("127.0.0.1", job.port), timeout=60) for _ in range(3)]
        assert job.finish()[0] == 0
        assert all(one.recv(1) == b"" for one in idle)
