"""Small programs with a known holder, after reports of real leaks. The kept line carries the mark KEEP.

A program calls `note(tensor)` when a block that stays is born, `tick()` when a step ends, `ask()` to have its blocks
explained. Expected: `kind` of the holder, `path` and `fix` (regular expressions), `not_leak`, `released`.
"""

PATTERNS = {}


def pattern(
    name, source, kind=None, path="", fix="", not_leak=None, released="nothing", kept=True, bounded=None
):
    PATTERNS[name] = dict(
        source=source,
        kind=kind,
        path=path,
        fix=fix,
        not_leak=not_leak,
        released=released,
        kept=kept,
        bounded=bounded,
    )


HEAD = """
import torch, functools, collections, types, weakref, gc, queue
from torch import nn
"""

pattern(
    "running loss local",
    """
def main():
    w = torch.randn(64, 64, requires_grad=True)
    total = 0.0
    for step in range(12):
        x = torch.randn(64, 64)
        note(x)
        loss = (w * x).sum()
        total += loss  # KEEP
        del x, loss
        tick()
    ask()
main()
""",
    "autograd graph",
    r"local of main\(\): total > \.grad_fn > .*Add",
    r"total \+= loss\.item\(\)",
)

pattern(
    "ema attribute",
    """
class Model:
    def __init__(self):
        self.w = torch.randn(64, requires_grad=True)
        self.ema = torch.zeros(())
    def step(self):
        x = torch.randn(64); note(x)
        loss = (self.w * x).sum()
        self.ema = 0.99 * self.ema + 0.01 * loss  # KEEP
m = Model()
for _ in range(12):
    m.step(); tick()
ask()
""",
    "autograd graph",
    r"m\.ema > \.grad_fn",
    r"self\.ema = .*detach",
)

pattern(
    "list of losses",
    """
class Stats:
    def __init__(self): self.values = []
    def add(self, v):
        self.values.append(v)  # KEEP
s = Stats(); w = torch.randn(64, requires_grad=True)
def train():
    x = torch.randn(64); note(x)
    s.add((w * x).sum())
for _ in range(12):
    train(); tick()
ask()
""",
    "list",
    r"s\.values\[\d+\] > \.grad_fn.*Stats\.values",
    r"\.item\(\)",
)

pattern(
    "list of step dicts",
    """
def fit():
    outputs = []
    for _ in range(12):
        x = torch.randn(64); note(x)
        ret = {"loss": 1.0, "x": x}
        outputs.append(ret)  # KEEP
        del x, ret
        tick()
    ask()
fit()
""",
    "list",
    r"outputs\[\d+\]\['x'\]",
)

pattern(
    "metric with list state",
    """
class Metric:
    def __init__(self): self.preds = []; self.target = []
    def update(self, p, t):
        self.preds.append(p)  # KEEP
        self.target.append(t)
    def reset(self): self.preds = []; self.target = []
metric = Metric()
for _ in range(12):
    p = torch.randn(64); note(p); metric.update(p, torch.zeros(3)); del p; tick()
ask()
""",
    "list",
    r"metric\.preds\[",
)

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
    "self reference cycle",
    """
gc.disable()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64)); note(self.weight)
        self.which = self.foo  # KEEP
    def foo(self): pass
for _ in range(12):
    Net(); tick()
ask()
""",
    "cycle",
    r"reference cycle",
    r"gc",
    released="gc",
)

pattern(
    "ctx attribute",
    """
gc.disable()
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone(); note(y)
        ctx.y = y  # KEEP
        return y
    @staticmethod
    def backward(ctx, g): return g
for _ in range(12):
    F.apply(torch.randn(8, requires_grad=True)); tick()
ask()
""",
    "cycle",
    r"reference cycle.*\.y",
    r"save_for_backward",
    released="gc",
)

pattern(
    "unbounded lru_cache",
    """
@functools.lru_cache(maxsize=None)  # KEEP
def grid(x):
    return x * 2
for _ in range(12):
    x = torch.randn(64); note(x); grid(x); del x; tick()
ask()
""",
    "lru_cache",
    r"functools\.lru_cache of grid\(\) \(hits 0, size 12, maxsize None\)",
    r"lru_cache",
)

pattern(
    "bounded lru_cache",
    """
@functools.lru_cache(maxsize=32)
def grid(x):
    return x * 2
for _ in range(12):
    x = torch.randn(64); note(x); grid(x); del x; tick()
ask()
""",
    "lru_cache",
    r"grid",
    not_leak=r"12 of at most 32",
    kept=False,
    bounded={"length": 12, "capacity": 32},
)

pattern(
    "deque with a bound",
    """
class Replay:
    def __init__(self): self.store = collections.deque(maxlen=50)
    def push(self, x): self.store.append((x, 1))
r = Replay()
for _ in range(12):
    x = torch.randn(64); note(x); r.push(x); del x; tick()
ask()
""",
    "deque",
    r"r\.store\[\d+\]\[0\]",
    not_leak=r"deque of 12, at most 50",
    kept=False,
    bounded={"length": 12, "capacity": 50},
)

pattern(
    "deque keeps graphs",
    """
class Replay:
    def __init__(self): self.store = collections.deque(maxlen=100000)
    def push(self, x):
        self.store.append(x)  # KEEP
r = Replay(); w = torch.randn(64, requires_grad=True)
def go():
    x = torch.randn(64); note(x); r.push((w * x).exp())
for _ in range(12):
    go(); tick()
ask()
""",
    "deque",
    r"r\.store",
    r"detach",
    bounded={"length": 12, "capacity": 100000},
)

pattern(
    "list evicted over a budget",
    """
class Memory:
    def __init__(self): self.clips = []; self.budget = 100
    def add(self, x):
        self.clips.append(x)
        while len(self.clips) > self.budget:
            self.clips.pop(0)
m = Memory()
for _ in range(12):
    x = torch.randn(64); note(x); m.add(x); del x; tick()
ask()
""",
    "list",
    r"m\.clips",
    not_leak=r"len\(self\.clips\) > self\.budget",
    kept=False,
)

pattern(
    "dict evicted too late",
    """
class Cache:
    def __init__(self): self.d = {}; self.limit = 2
    def add(self, k, x):
        self.d[k] = x  # KEEP
        if len(self.d) > self.limit and k < 0:
            self.d.clear()
c = Cache()
for i in range(60):
    x = torch.randn(64); note(x); c.add(i, x); del x; tick()
ask()
""",
    "dict",
    r"c\.d\[\d+\]",
)

pattern(
    "losses emptied each epoch",
    """
def main():
    for epoch in range(1):
        outs = []
        for i in range(12):
            x = torch.randn(64); note(x); outs.append(x); del x; tick()
        ask()
main()
""",
    "list",
    r"outs\[",
    not_leak=r"emptied at each turn",
    kept=False,
)

pattern(
    "predictions regrow",
    """
def predict():
    preds = torch.zeros(0)
    for i in range(12):
        new = torch.randn(64)
        preds = torch.cat((preds, new))  # KEEP
        del new
        tick()
    note(preds)
    ask()
predict()
""",
    "local",
    r"preds",
    r"preds",
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
    "views pin their base",
    """
feats = []
for _ in range(12):
    out = torch.randn(4, 197, 64); note(out)
    feats.append(out[:, 0])  # KEEP
    del out; tick()
ask()
""",
    "list",
    r"global feats\[\d+\]",
    r"clone\(\)",
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
    "loop carried state",
    """
class RNN(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(8, 8)
    def forward(self, x, s): return torch.tanh(self.l(x) + s)
def main():
    m = RNN(); state = torch.zeros(8)
    for _ in range(12):
        x = torch.randn(4, 8); note(x)
        state = m(x, state)  # KEEP
        del x; tick()
    ask()
main()
""",
    "autograd graph",
    r"local of main\(\): state > \.grad_fn",
    r"detach",
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
    "list passed to a function",
    """
def collect(bag, x):
    bag.append(x)  # KEEP
def main():
    history = []
    for _ in range(12):
        x = torch.randn(64); note(x); collect(history, x); del x; tick()
    ask()
main()
""",
    "list",
    r"history\[\d+\]",
)

pattern(
    "nested dict key",
    """
class Log:
    def __init__(self): self.h = {"loss": [], "acc": []}
    def add(self, a, b):
        self.h["acc"].append(a)
        self.h["loss"].append(b)  # KEEP
log = Log()
for _ in range(12):
    x = torch.randn(64); note(x); log.add(0, x); del x; tick()
ask()
""",
    "list",
    r"log\.h\['loss'\]\[\d+\]",
)

pattern(
    "setdefault",
    """
class Tree:
    def __init__(self): self.nodes = {}
    def add(self, k, x):
        bucket = self.nodes.setdefault(k, [])
        bucket.append(x)  # KEEP
tree = Tree()
for i in range(12):
    x = torch.randn(64); note(x); tree.add(i % 2, x); del x; tick()
ask()
""",
    "list",
    r"tree\.nodes\[",
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
    r"remember",
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
    "saved by checkpoint hooks",
    """
from torch.utils.checkpoint import checkpoint
calls = []
def block(x):
    calls.append(1)
    return torch.tanh(x * 2)
def main():
    outs = []
    w = torch.randn(64, requires_grad=True)
    for i in range(12):
        h = w * 2; note(h)
        outs.append(checkpoint(block, h, use_reentrant=False))  # KEEP
        del h; tick()
    ask()
    assert len(calls) == 12, "the search ran the forward again"
main()
""",
    "list",
    r"outs\[\d+\]",
)

pattern(
    "parameter in training",
    """
m = nn.Linear(8, 8); opt = torch.optim.Adam(m.parameters())
for _ in range(3):
    m(torch.randn(2, 8)).sum().backward(); opt.step(); tick()
note(opt.state[m.weight]["exp_avg"]); note(m.weight.grad); note(m.weight)
ask()
""",
    "training",
    r"weight",
    not_leak=r"weight",
    kept=False,
)

pattern(
    "held by C++",
    """
w = torch.randn(4, requires_grad=True)
x = torch.randn(64); note(x); keep = torch._C._to_dlpack(x) if hasattr(torch._C, "_to_dlpack") else None
del x
tick(); ask()
""",
    None,
    r"",
    released="unknown",
    kept=False,
)
