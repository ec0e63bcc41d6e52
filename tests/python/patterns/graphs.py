"""Kept by autograd's graph, by cycles, or by nothing that Python sees."""

from . import pattern

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

SMOOTHER = """
class Smoother:
    def __init__(self): self.value = None
    def update(self, v):
        self.value = v if self.value is None else 0.9 * self.value + 0.1 * v  # KEEP
        return self.value
"""

pattern(
    "average that is kept and handed out",
    SMOOTHER
    + """
smooth = Smoother(); w = torch.randn(64, requires_grad=True)
for _ in range(12):
    x = torch.randn(64); note(x)
    acc = smooth.update((w * x).sum()); del x; tick()
ask()
""",
    "autograd graph",
    r"global smooth\.value > \.grad_fn",
    r"self\.value carries the autograd graph of every step before",
)

pattern(
    "average handed out to a function's variable",
    SMOOTHER
    + """
class Trainer:
    def __init__(self): self.meters = {"acc": Smoother()}
    def fit(self):
        w = torch.randn(64, requires_grad=True)
        for _ in range(12):
            x = torch.randn(64); note(x)
            acc = self.meters["acc"].update((w * x).sum()); del x; tick()
        ask()
trainer = Trainer()
trainer.fit()
""",
    "autograd graph",
    r"meters\['acc'\]\.value > \.grad_fn",
    r"self\.value carries the autograd graph",
)

pattern(
    "variable that feeds itself and is also an attribute",
    """
class Log: last = None
log = Log(); w = torch.randn(64, requires_grad=True)
total = torch.zeros(())
for _ in range(12):
    x = torch.randn(64); note(x)
    total = total + (w * x).sum()  # KEEP
    log.last = total; del x; tick()
ask()
""",
    "autograd graph",
    r"global total > \.grad_fn",
    r"total carries the autograd graph",
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
