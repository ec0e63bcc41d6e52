"""Small jobs of each kind of leak and of each usual false alarm: the class, the line that allocates and the
line that keeps must be named, and clean jobs must be left in peace.

A job says its own truth: `# ALLOCATES` marks the lines of which one must be the finding's, `# KEEPS` the
line that stores.
"""

import textwrap

import pytest

HEAD = """
import collections, copy, functools, gc, random
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
random.seed(0)

def make(width=32):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))

def batch(n=8):
    return torch.randn(n, 16), torch.randint(0, 4, (n,))

def update(net, optimizer, n=8):
    x, y = batch(n)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""

LEAKS = {
    "graph_sum": (
        "per-iteration",
        """
        def main():
            net = make()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            x, y = batch()
            running = 0.0
            for step in range(80):
                update(net, optimizer)
                out = net(x)  # ALLOCATES
                held_out = F.cross_entropy(out, y)  # ALLOCATES
                running += held_out  # KEEPS
            print(float(running) > 0)
        main()
        """,
    ),
    "list_of_outputs": (
        "per-iteration",
        """
        class Logger:
            def __init__(self):
                self.outputs = []
            def log(self, value):
                self.outputs.append(value)  # KEEPS
        logger = Logger()
        net = make()
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(80):
            x, y = batch()
            logits = net(x)  # ALLOCATES
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.log(logits.detach())
        """,
    ),
    "views_keep_their_base": (
        "per-iteration",
        """
        net = make(512)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        tokens = []
        for step in range(80):
            update(net, optimizer)
            with torch.no_grad():
                feature = net[0](torch.randn(64, 16))  # ALLOCATES
            tokens.append(feature[:, 0])  # KEEPS
        """,
    ),
    "regrown_by_cat": (
        "per-iteration",
        """
        def main():
            net = make()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            preds = None
            for step in range(120):
                logits = update_and_predict(net, optimizer)
                preds = logits if preds is None else torch.cat((preds, logits))  # ALLOCATES KEEPS
        def update_and_predict(net, optimizer):
            update(net, optimizer)
            with torch.no_grad():
                return net(batch(64)[0])
        main()
        """,
    ),
    "cycle_with_gc_off": (
        "per-iteration",
        """
        class Batch:
            def __init__(self, x):
                self.x = x
                self.me = self  # KEEPS
        gc.disable()
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(80):
            update(net, optimizer)
            b = Batch(torch.randn(256, 16))  # ALLOCATES
        """,
    ),
    "validation_kept": (
        "per-epoch",
        """
        class Run:
            def __init__(self):
                self.net = make()
                self.optimizer = torch.optim.Adam(self.net.parameters())
                self.history = {}
            def validate(self, epoch):
                self.net.eval()
                with torch.no_grad():
                    out = self.net(torch.randn(200, 16))  # ALLOCATES
                self.history[epoch] = out  # KEEPS
        run = Run()
        for epoch in range(12):
            run.net.train()
            for step in range(10):
                update(run.net, run.optimizer)
            run.validate(epoch)
        """,
    ),
    "stored_exceptions": (
        "sporadic",
        """
        def step(net, optimizer, bad):
            x, y = batch(32)
            hidden = net[1](net[0](x))  # ALLOCATES
            if bad:
                raise ValueError("bad batch")
            update(net, optimizer)
        def main():
            net = make()
            optimizer = torch.optim.AdamW(net.parameters())
            errors = []
            for i in range(300):
                try:
                    step(net, optimizer, random.random() < 0.07)
                except ValueError as error:
                    errors.append(error)  # KEEPS
        main()
        """,
    ),
    "backup_never_released": (
        "one-off",
        """
        class Trainer:
            def __init__(self):
                self.net = make(128)
                self.optimizer = torch.optim.AdamW(self.net.parameters())
                self.backup = None
            def snapshot(self):
                self.backup = copy.deepcopy(self.net.state_dict())  # ALLOCATES KEEPS
        trainer = Trainer()
        for epoch in range(10):
            if epoch == 4:
                trainer.snapshot()
            for step in range(20):
                update(trainer.net, trainer.optimizer)
        """,
    ),
}

CLEAN = {
    "plain": """
        net = make()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(120):
            update(net, optimizer)
        """,
    "replay_buffer": """
        net = make()
        optimizer = torch.optim.Adam(net.parameters())
        buffer = collections.deque(maxlen=100)
        for step in range(200):
            buffer.append(torch.randn(32, 16))
            update(net, optimizer)
        """,
    "ring_by_hand": """
        net = make()
        optimizer = torch.optim.Adam(net.parameters())
        seen = []
        for step in range(200):
            seen.append(torch.randn(32, 16))
            if len(seen) > 90:
                seen.pop(0)
            update(net, optimizer)
        """,
    "unfrozen_one_by_one": """
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)], nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(net.parameters())
        for epoch in range(14):
            for i, layer in enumerate(net):
                for p in layer.parameters():
                    p.requires_grad_(i >= 10 - epoch)
            for step in range(12):
                update(net, optimizer)
        """,
    "longer_and_longer": """
        net = make()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(150):
            update(net, optimizer, n=8 + step)
        """,
    "largest_so_far": """
        net = make()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(150):
            update(net, optimizer, n=int(8 * random.paretovariate(1.2)))
        """,
    "two_optimizers_and_an_average": """
        g, d = make(), make()
        average = copy.deepcopy(g).requires_grad_(False)
        og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
        for step in range(100):
            update(d, od)
            update(g, og)
            with torch.no_grad():
                for a, p in zip(average.parameters(), g.parameters()):
                    a.lerp_(p, 0.1)
        """,
    "losses_cleared_every_epoch": """
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(10):
            losses = []
            for step in range(15):
                losses.append(update(net, optimizer).detach())
            print(torch.stack(losses).mean().item() > 0)
        """,
}


def marked(text, word):
    return [n for n, line in enumerate(text.splitlines(), 1) if "#" in line and word in line.split("#", 1)[1]]


@pytest.mark.parametrize("name", sorted(LEAKS))
def test_leak(jobs, python, name):
    kind, body = LEAKS[name]
    text = HEAD + textwrap.dedent(body)
    done = jobs.same(python, jobs.script(text))
    findings = done.report["findings"]
    told = [(f["class"], f["allocated_at"], f["kept_at"]) for f in findings]
    assert len(findings) == 1, told
    (finding,) = findings
    assert finding["class"] == kind, told
    assert finding["allocated_at"]["line"] in marked(text, "ALLOCATES"), told
    assert finding["kept_at"] and finding["kept_at"]["line"] in marked(text, "KEEPS"), (
        told,
        finding["held_by"],
    )
    assert finding["fix"] and finding["evidence"]
    assert done.report["verdict"] == "leak"


@pytest.mark.parametrize("name", sorted(CLEAN))
def test_clean(jobs, python, name):
    done = jobs.same(python, jobs.script(HEAD + textwrap.dedent(CLEAN[name])))
    told = [(f["class"], f["allocated_at"], f["held_by"]) for f in done.report["findings"]]
    assert told == []
    assert done.report["verdict"] == "clean", done.report["reason"]


def test_a_thread_of_torch_shows_its_own_frames(jobs, python):
    """Through the hooks in front of torch's allocator, whatever the caller has in its frame pointer."""
    body = """
        @torch.jit.script
        def work(x: torch.Tensor, kernel: torch.Tensor):
            y = torch.softmax(x, -1)
            z = torch.conv2d(y.view(1, 1, 8, 32), kernel, padding=1)
            return [y, z, torch.cumsum(y, 0), torch.sort(y, 0)[0], torch.topk(y, 2)[0], torch.cat([y, y])]

        @torch.jit.script
        def beside(x: torch.Tensor, kernel: torch.Tensor):
            return torch.jit.wait(torch.jit.fork(work, x, kernel))

        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        kernel, kept = torch.randn(1, 1, 3, 3), []
        for step in range(80):
            kept.append(beside(torch.randn(8, 32), kernel))
            update(net, optimizer)
        """
    done = jobs.same(python, jobs.script(HEAD + textwrap.dedent(body)))
    (finding,) = done.report["findings"]
    places = [site["allocated_at"] for site in finding["sites_in_finding"]]
    assert len(places) >= 5
    named = {place["function"] for place in places}
    assert all(function.startswith("at::_ops::") for function in named), named
    assert any("::cat::" in function for function in named), named
    assert len(finding["stack"]) > 10
    assert finding["stack"][0]["function"] == "c10::DefaultCPUAllocator::allocate"
