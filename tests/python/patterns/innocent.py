"""What grows and has a reason: bounds, eviction, training itself."""

from . import pattern

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

METRIC = """
class Metric:
    def __init__(self): self.preds = []
    def update(self, p):
        self.preds.append(p)  # KEEP
    def reset(self): self.preds = []
metric = Metric()
def train_epoch(count):
    for _ in range(count):
        x = torch.randn(64); note(x); metric.update(x); del x; tick()
def main(epochs):
    for epoch in range(epochs):
        train_epoch(12)
        ask()
        {end}
main(1)
"""

pattern(
    "metric reset at each turn, adding in a function",
    METRIC.format(end="metric.reset()").replace("  # KEEP", ""),
    "list",
    r"metric\.preds\[",
    not_leak=r"emptied at each turn of the outer loop",
    kept=False,
)

pattern(
    "metric reset under a condition",
    METRIC.format(end="if epoch > 100: metric.reset()"),
    "list",
    r"metric\.preds\[",
    r"never emptied",
)

pattern(
    "another metric is reset",
    METRIC.format(end="other.reset()").replace("metric = Metric()", "metric = Metric(); other = Metric()"),
    "list",
    r"metric\.preds\[",
    r"never emptied",
)

for about, condition in {
    "the loss": "x.sum().item() > max_grad * 1e9",
    "another container": "len(seen) > max_grad",
    "an index of no concern": "i > 10_000_000_000 and max(1, 2) > 1",
}.items():
    pattern(
        f"taken out under a condition about {about}",
        f"""
def main():
    max_grad = 1.0; keep = []; seen = []
    for i in range(12):
        x = torch.randn(64); note(x); keep.append(x)  # KEEP
        if {condition}: keep.pop()
        del x; tick()
    ask()
main()
""",
        "list",
        r"keep\[",
    )

WINDOW = """
def main(cfg):
    {before}
    keep = []
    for i in range(12):
        x = torch.randn(64); note(x); keep.append(x)  # KEEP
        if {condition}: keep.pop(0)
        del x; tick()
    ask()
main({{"n": 40}})
"""

pattern(
    "an index and a window",
    WINDOW.format(before="window = 40", condition="i >= window"),
    "list",
    r"keep\[",
    not_leak=r"when i >= window",
    kept=False,
    bounded={"length": 12, "capacity": 40},
)

pattern(
    "a length in a name",
    WINDOW.format(before="pass", condition='(n := len(keep)) > cfg["n"]'),
    "list",
    r"keep\[",
    not_leak=r"dropped when",
    kept=False,
    asked=5,
)

for asked, believed in ((2, True), (3, False)):
    pattern(
        f"an index and a limit that nobody knows, asked {asked} times before",
        WINDOW.format(before='limit = cfg["n"]', condition="i >= limit"),
        "list",
        r"keep\[",
        not_leak=r"when i >= limit" if believed else None,
        kept=not believed,
        asked=asked,
    )

pattern(
    "a length and a limit that nobody knows, asked too often",
    WINDOW.format(before='limit = cfg["n"]', condition="len(keep) > limit"),
    "list",
    r"keep\[",
    asked=6,
)

MEMORY = """
class Memory:
    def __init__(self, budget): self.budget, self.frames, self.clips = budget, 0, collections.deque()
    def add(self, x):
        self.clips.append(x)  # KEEP
        self.frames += len(x)
        while self.frames > self.budget:
            self.frames -= len(self.clips.popleft())
memory = Memory({budget})
for _ in range(12):
    x = torch.randn(64); note(x); memory.add(x); del x; tick()
ask()
"""

pattern(
    "a count and a budget",
    MEMORY.format(budget=64 * 40),
    "deque",
    r"memory\.clips",
    not_leak=r"self\.frames > self\.budget",
    kept=False,
    asked=9,
)

pattern("a count and a budget beyond all memory", MEMORY.format(budget=1 << 50), "deque", r"memory\.clips")
