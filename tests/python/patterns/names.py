"""Names that are made up, holders that the collector does not see, and what is kept because it is in use."""

from . import pattern

pattern(
    "attributes by setattr",
    """
class Trainer:
    def step(self, i):
        x = torch.randn(64); note(x)
        setattr(self, f"batch_{i}", x)  # KEEP
t = Trainer()
for i in range(12):
    t.step(i); tick()
ask()
""",
    None,
    r"global t\.batch_\d+",
    r"t gets a new attribute each time",
)

pattern(
    "names by globals()",
    """
def main():
    for i in range(12):
        x = torch.randn(64); note(x)
        globals()["batch_%d" % i] = x  # KEEP
        del x; tick()
    ask()
main()
""",
    None,
    r"global batch_\d+",
    r"globals\(\) gets a new",
)

pattern(
    "buffers registered anew",
    """
class Net(nn.Module):
    def forward(self, x, i):
        self.register_buffer(f"seen_{i}", x)  # KEEP
net = Net()
for i in range(12):
    x = torch.randn(64); note(x); net(x, i); del x; tick()
ask()
""",
    None,
    r"global net\.seen_\d+",
    r"net gets a new attribute each time",
)

pattern(
    "parameter list",
    """
bank = nn.ParameterList()
for i in range(12):
    x = torch.randn(64); note(x)
    bank.append(nn.Parameter(x, requires_grad=False))  # KEEP
    del x; tick()
ask()
""",
    None,
    r"global bank\[\d+\]",
    r"bank (grows|gets a new)",
)

pattern(
    "array of objects",
    """
import numpy as np
arr = np.empty(20, dtype=object)
for i in range(12):
    x = torch.randn(64); note(x)
    arr[i] = x  # KEEP
    del x; tick()
ask()
""",
    "ndarray",
    r"global arr\[\d+\]",
    r"arr grows",
)

pattern(
    "array of objects in a function",
    """
import numpy as np
def main():
    arr = np.empty(20, dtype=object)
    for i in range(12):
        x = torch.randn(64); note(x)
        arr[i] = {"x": x}  # KEEP
        del x; tick()
    ask()
main()
""",
    "ndarray",
    r"local of main\(\): arr\[\d+\]\['x'\]",
    r"arr grows",
)

pattern(
    "callbacks at exit",
    """
import atexit
made = []
for i in range(12):
    x = torch.randn(64); note(x)
    atexit.register(lambda x=x: None)  # KEEP
    del x; tick()
ask()
""",
    "callback",
    r"a function given to atexit\.register\(\)",
    r"atexit\.register keeps every function",
)

pattern(
    "hook on its own tensor",
    """
w = torch.randn(64, requires_grad=True)
for i in range(12):
    y = w * 2; note(y)
    y.register_hook(lambda g, y=y: g + 0 * y.detach())  # KEEP
    y.sum().backward()
    del y; tick()
ask()
""",
    "cycle",
    r"Tensor\._backward_hooks\[\d+\]",
    r"the hook refers to the tensor that it is registered on \(y\)",
    released="gc",
)

pattern(
    "queue that fills",
    """
q = queue.Queue()
for i in range(12):
    x = torch.randn(64); note(x)
    q.put(x)  # KEEP
    del x; tick()
ask()
""",
    "deque",
    r"global q\.queue\[\d+\]",
    r"more is put into q than is taken out",
)

pattern(
    "bound that is never reached",
    """
buf = collections.deque(maxlen=1_000_000_000)
for i in range(12):
    x = torch.randn(4096); note(x)
    buf.append(x)  # KEEP
    del x; tick()
ask()
""",
    "deque",
    r"global buf\[\d+\].*; at most 1,000,000,000 \(.* when full\)",
    r"buf has a bound, 1,000,000,000 entries",
)

pattern(
    "groups added to an optimizer",
    """
base = nn.Linear(8, 8); o = torch.optim.Adam(base.parameters())
for i in range(8):
    head = nn.Linear(8, 4)
    o.add_param_group({"params": head.parameters()})  # KEEP
    o.zero_grad()
    head(base(torch.randn(2, 8))).sum().backward()
    o.step()
    note(o.state[head.weight]["exp_avg"])
    tick()
ask()
""",
    None,
    r"global o\.state\[<Parameter>\]\['exp_avg'\]",
    r"add_param_group is called again and again",
)

pattern(
    "average of weights begun late",
    """
import copy
model = nn.Linear(8, 8); ema = None
for i in range(12):
    if i == 6:
        ema = copy.deepcopy(model); note(ema.weight)
    if ema is not None:
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()): a.lerp_(b, 0.01)
    tick()
ask()
""",
    None,
    r"global ema\.weight",
    not_leak=r"made late and in use since: ema is read at train\.py:\d+",
    kept=False,
    shape="burst",
)

pattern(
    "validation set loaded late",
    """
class Loop:
    def __init__(self): self.val = None; self.model = nn.Linear(8, 8)
    def validate(self):
        if self.val is None:
            self.val = torch.randn(100, 8); note(self.val)
        with torch.no_grad():
            self.model(self.val).mean()
loop = Loop()
for epoch in range(4):
    tick()
    if epoch >= 1: loop.validate()
ask()
""",
    None,
    r"global loop\.val",
    not_leak=r"made late and in use since",
    kept=False,
    shape="burst",
)

pattern(
    "backup that is read once",
    """
import copy
model = nn.Linear(8, 8)
for i in range(12):
    if i == 6:
        backup = copy.deepcopy(model)  # KEEP
        note(backup.weight)
        model.load_state_dict(backup.state_dict())
    tick()
ask()
""",
    None,
    r"global backup\.weight",
    r"backup = None",
    shape="burst",
)

pattern(
    "first of the last checkpoints",
    """
ck = []
for i in range(30):
    if i % 20 == 9:
        x = torch.randn(64); note(x)
        ck.append({"w": x}); del x
        if len(ck) > 5: ck.pop(0)
    tick()
    if i == 28: ask()
""",
    "global",
    r"global ck\[0\]\['w'\]",
    not_leak=r"bounded by its own code",
    kept=False,
    shape="burst",
)

pattern(
    "mask for the longest input so far",
    """
cache = {}
def mask(n):
    if cache.get("n", 0) < n: cache["n"] = n; cache["m"] = torch.ones(n, n).tril()
    return cache["m"][:n, :n]
for i in range(12):
    mask(10 + i); tick()
note(cache["m"])
ask()
""",
    None,
    r"global cache\['m'\]",
    not_leak=r"made anew only for a larger input than ever",
    kept=False,
    shape="regrow",
)

pattern(
    "tables of positions",
    """
class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.longest = 0
    def _build(self, n):
        self.longest = n
        self.register_buffer("cos", torch.ones(n, 8), persistent=False)
    def forward(self, n):
        if n > self.longest:
            self._build(n)
        return self.cos[:n]
rotary = Rotary()
for i in range(12):
    rotary(10 + i); tick()
note(rotary.cos)
ask()
""",
    None,
    r"global rotary\.cos",
    not_leak=r"made anew only for a larger input than ever",
    kept=False,
    shape="regrow",
)

CURRICULUM = """
net = nn.Linear(8, 8)
def last(out): return out[:, -1:]
{before}
for i in range(12):
    {line}  # KEEP
    tick()
note({name})
ask()
"""


def newest(name, line, variable="out", before="", not_leak=None):
    source = CURRICULUM.format(line=line, name=variable, before=before)
    pattern(name, source, None, rf"global ({variable}|out)", "", not_leak=not_leak, shape="regrow")


newest(
    "output of a longer input",
    "x = torch.randn(1, 4 + i, 8); out = net(x).detach()",
    not_leak=r"made anew in each step, as large as its input: out \(train\.py:\d+\)",
)
newest(
    "output that is fed back by another name",
    "out = net(torch.cat((past, torch.randn(1, 1, 8)), 1)).detach(); past = out",
    "past",
    "past = torch.randn(1, 1, 8)",
)
newest(
    "output that is fed back by an attribute",
    "out = net(torch.cat((memory.past, torch.randn(1, 1, 8)), 1)).detach(); memory.past = out",
    "memory.past",
    "memory = types.SimpleNamespace(past=torch.randn(1, 1, 8))",
)
newest(
    "output of a function that remembers",
    "out = grown(torch.randn(8))",
    before="""past = torch.zeros(0)
def grown(x):
    global past
    past = torch.cat((past, x))
    return past + 0""",
)

pattern(
    "one entry with a name of its own",
    """
seen = {}
def look(x):
    if "out" not in seen: seen["out"] = x  # KEEP
for epoch in range(2):
    for i in range(6):
        x = torch.randn(64)
        if epoch == 1 and i == 0: note(x); look(x)
        tick()
ask()
""",
    None,
    r"global seen\['out'\]",
    shape="burst",
)
