"""Kept by objects with a meaning of their own: hooks, caches, closures, exceptions, futures, models."""

from . import pattern

pattern(
    "hook appends to its module",
    """
m = nn.Sequential(nn.Linear(8, 8)); m[0].acts = []
def keep(mod, i, o):
    mod.acts.append(i[0])  # KEEP
m[0].register_forward_hook(keep)
for _ in range(12):
    x = torch.randn(4, 8); note(x)
    with torch.no_grad(): m(x)
    del x; tick()
ask()
""",
    "list",
    r"\.acts\[\d+\]",
)

pattern(
    "hook sets an attribute once",
    """
m = nn.Linear(8, 8)
def keep(mod, i, o):
    note(o)
    mod.output = o.detach()  # KEEP
h = m.register_forward_hook(keep)
m(torch.randn(4, 8)); h.remove(); tick(); ask()
""",
    "attribute",
    r"m\.output",
    r"= None|del",
)

pattern(
    "hooks added and never removed",
    """
m = nn.Linear(8, 8)
def watch(m):
    x = torch.randn(64); note(x)
    m.register_forward_hook(lambda mod, i, o: x.sum())  # KEEP
for _ in range(12):
    watch(m); tick()
ask()
""",
    None,
    r"m\._forward_hooks\[\d+\]\.<closure x>",
    r"remove",
)

pattern(
    "exceptions kept",
    """
def train_step(x):
    feats = x * 2; note(feats)
    raise ValueError("bad")
def main():
    failures = []
    for i in range(12):
        try: train_step(torch.randn(64))
        except ValueError as err:
            failures.append((i, err))  # KEEP
        tick()
    ask()
main()
""",
    "exception",
    r"failures\[\d+\]\[1\]\.__traceback__ > frame of train_step\(\) > local feats",
    r"traceback",
)

pattern(
    "class level registry",
    """
class State:
    _shared = {"dl": []}
    def __init__(self): self.__dict__ = self._shared
class Trainer:
    def __init__(self, x):
        State._shared["dl"].append(x)  # KEEP
for _ in range(12):
    x = torch.randn(64); note(x); Trainer(x); del x; tick()
ask()
""",
    "list",
    r"State\._shared\['dl'\]\[\d+\]",
)

pattern(
    "partial in a list",
    """
reports = []
def show(step, pixels): pass
for i in range(12):
    x = torch.randn(64); note(x)
    reports.append(functools.partial(show, i, pixels=x))  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"global reports\[\d+\]\.keywords\['pixels'\]",
    r"pixels",
)

pattern(
    "closures in a list",
    """
trials = []
def study():
    x = torch.randn(64); note(x)
    def fn(): return x
    trials.append({"fn": fn})  # KEEP
for i in range(12):
    study(); tick()
ask()
""",
    "list",
    r"trials\[\d+\]\['fn'\]\.<closure x>",
    r"captures the tensor x",
)

pattern(
    "futures kept",
    """
from concurrent.futures import ThreadPoolExecutor
def job():
    x = torch.randn(64); note(x); return x
def main():
    futs = []
    with ThreadPoolExecutor(1) as pool:
        for i in range(12):
            f = pool.submit(job)
            futs.append(f)  # KEEP
            f.result(); del f; tick()
        ask()
main()
""",
    "list",
    r"futs\[\d+\]\._result",
    r"future",
)

pattern(
    "old optimizers",
    """
class T:
    def __init__(self): self.p = nn.Parameter(torch.randn(64)); self.cycles = []
    def cycle(self):
        opt = torch.optim.Adam([self.p])
        self.cycles.append(opt)  # KEEP
        self.p.grad = torch.randn(64); opt.step()
        note(opt.state[self.p]["exp_avg"])
t = T()
for _ in range(12):
    t.cycle(); tick()
ask()
""",
    "list",
    r"t\.cycles\[\d+\]\.state\[<Parameter>\]\['exp_avg'\]",
    r"optimizers that no longer step",
)

pattern(
    "old models",
    """
study = {}
def run(i):
    m = nn.Sequential(nn.Linear(16, 16), nn.ReLU()); note(m[0].weight)
    study[i] = m  # KEEP
for i in range(12):
    run(i); tick()
ask()
""",
    "dict",
    r"global study\[\d+\]",
    r"models",
)

pattern(
    "state dict backup",
    """
class T:
    def __init__(self): self.m = nn.Linear(16, 16); self.backup = None
    def test(self):
        self.backup = {k: v.clone() for k, v in self.m.state_dict().items()}  # KEEP
        for v in self.backup.values(): note(v)
t = T(); t.test(); tick(); tick(); ask()
""",
    "attribute",
    r"t\.backup",
    r"backup = None",
)

pattern(
    "parameter attribute",
    """
params = [nn.Parameter(torch.zeros(4)) for _ in range(12)]
class H: pass
def link(p):
    h = H(); h.hp = torch.randn(64); note(h.hp)
    p._hp = h  # KEEP
for p in params:
    link(p); tick()
del p
ask()
""",
    None,
    r"params\[\d+\]\._hp\.hp",
)

pattern(
    "queue",
    """
def main():
    q = queue.Queue()
    for _ in range(12):
        x = torch.randn(64); note(x)
        q.put(x)  # KEEP
        del x; tick()
    ask()
main()
""",
    "deque",
    r"q\.queue\[\d+\]",
)

pattern(
    "records with an attribute",
    """
class Record:
    def __init__(self, out): self.out = out
records = []
for i in range(12):
    x = torch.randn(64); note(x)
    records.append(Record(x))  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"global records\[\d+\]\.out",
)

pattern(
    "default argument",
    """
def remember(x, seen=[]):
    seen.append(x)  # KEEP
for i in range(12):
    x = torch.randn(64); note(x); remember(x); del x; tick()
ask()
""",
    "list",
    r"remember\.<default of seen>\[\d+\]  \(list, the default of seen in remember\(\), 12 entries",
    r"the default of seen in remember\(\) is made once.*seen=None",
)

pattern(
    "function attribute",
    """
def remember(x):
    remember.seen.append(x)  # KEEP
remember.seen = []
for i in range(12):
    x = torch.randn(64); note(x); remember(x); del x; tick()
ask()
""",
    "list",
    r"remember\.seen\[\d+\]",
)

pattern(
    "suspended generators",
    """
def stream():
    x = torch.randn(64); note(x)
    yield 1
    yield x
gens = []
for i in range(12):
    g = stream(); next(g)
    gens.append(g)  # KEEP
    del g; tick()
ask()
""",
    "list",
    r"gens\[\d+\] > generator stream\(\) > local x",
)

pattern(
    "numpy keeps the tensor",
    """
def main():
    losses = []
    for i in range(12):
        x = torch.randn(64); note(x)
        losses.append(x.numpy())  # KEEP
        del x; tick()
    ask()
main()
""",
    "list",
    r"losses\[\d+\]",
)

pattern(
    "a dict for each thread",
    """
import threading
stop = threading.Event()
def plotter(weights): stop.wait()
for i in range(8):
    a, b = torch.randn(64), torch.randn(64); note(a); note(b)
    t = threading.Thread(target=plotter, args=({"a": a, "b": b},), daemon=True)  # KEEP
    t.start(); del a, b, t; tick()
ask()
stop.set()
""",
    "thread",
    r"one of 8 threads that run in plotter\(\): local weights\['[ab]'\]",
    r"8 threads run plotter\(\) and each keeps its weights",
)

pattern(
    "hook with a list, added again and again",
    """
m = nn.Linear(8, 8)
def evaluate():
    feats = []
    m.register_forward_hook(lambda mod, i, o: feats.append(o.detach()))  # KEEP
    for _ in range(2):
        x = torch.randn(4, 8)
        with torch.no_grad(): m(x)
    note(feats[0])
for _ in range(8):
    evaluate(); tick()
ask()
""",
    "list",
    r"m\._forward_hooks\[\d+\]\.<closure feats>\[\d+\]  \(list feats, \d+ entries",
    r"register_forward_hook is called again and again",
)

pattern(
    "trials that each have an optimizer",
    """
class Trial:
    registry = []
    def __init__(self):
        self.w = nn.Parameter(torch.randn(64)); self.opt = torch.optim.Adam([self.w])
        Trial.registry.append(self)  # KEEP
    def run(self):
        self.w.grad = torch.randn(64); self.opt.step(); note(self.opt.state[self.w]["exp_avg"])
for _ in range(12):
    Trial().run(); tick()
ask()
""",
    "list",
    r"class Trial\.registry\[\d+\]\.opt\.state",
    r"optimizers that no longer step, each with its state and the parameters it trained",
)

pattern(
    "handler that buffers records",
    """
import logging, logging.handlers
log = logging.Logger("buffer")
log.addHandler(logging.handlers.MemoryHandler(100000, flushLevel=logging.CRITICAL))
for i in range(12):
    x = torch.randn(64); note(x)
    log.debug("step %d out %s", i, x)  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"buffer\[\d+\]\.args\[1\]",
    r"or hand over numbers$",
)

pattern(
    "head for each task, all of them in use",
    """
encoder = nn.Linear(8, 8); heads = nn.ModuleList()
for task in range(8):
    heads.append(nn.Linear(8, 4))  # KEEP
    opt = torch.optim.Adam([*encoder.parameters(), *heads[-1].parameters()])
    for _ in range(3):
        opt.zero_grad(); heads[task](encoder(torch.randn(2, 8))).sum().backward(); opt.step()
        tick()
    note(heads[-1].weight); note(heads[-1].bias)
    for t in range(task + 1):
        heads[t](torch.randn(2, 8))
ask()
""",
    "ModuleList",
    r"global heads\[\d+\]\.(weight|bias)",
    r"heads gets a new module each time and loses none; clear it .* read again \(train\.py:\d+\).*no leak",
)

pattern(
    "adapters by name",
    """
class Net(nn.Module):
    def __init__(self): super().__init__(); self.adapters = nn.ModuleDict()
    def add(self, name): self.adapters[name] = nn.Linear(8, 8, bias=False)  # KEEP
    def forward(self, x, name): return self.adapters[name](x)
net = Net()
for job in range(3):
    net.add(f"job{job}"); note(net.adapters[f"job{job}"].weight); tick()
    for _ in range(2): net(torch.randn(2, 8), f"job{job}")
ask()
""",
    "ModuleDict",
    r"global net\.adapters\.job\d+\.weight",
    r"self\.adapters gets a new module each time",
)

pattern(
    "partial with an argument by place",
    """
reports = []
def show(step, pixels): pass
for i in range(12):
    x = torch.randn(64); note(x)
    reports.append(functools.partial(show, i, x))  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"global reports\[\d+\]\.args\[1\]",
    r"captures the tensor pixels",
)

pattern(
    "objects that put themselves into a list",
    """
class Probe:
    every = []
    def __init__(self, out):
        self.out = out
        Probe.every.append(self)  # KEEP
for i in range(12):
    x = torch.randn(64); note(x); Probe(x); del x; tick()
ask()
""",
    "list",
    r"class Probe\.every\[\d+\]\.out",
    r"every Probe puts itself into Probe\.every and nothing takes it out",
)
