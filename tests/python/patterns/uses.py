"""What is said of the use of what is kept: whether it was read, and when."""

from . import pattern

LOOP = """
{before}
feats = []
for i in range(12):
    x = torch.randn(64); note(x); feats.append(x)  # KEEP
    {inside}
    del x; tick()
ask()
{after}
"""


def loop(name, used, before="", inside="pass", after=""):
    source = LOOP.format(before=before, inside=inside, after=after)
    pattern(name, source, "list", r"feats\[", used=used)


loop("never read", "never", inside="print(len(feats))")
loop("gathered, then read", "gathered", after="X = torch.cat(feats)")
loop("a glance at the newest", "read", inside="if i % 10 == 0: feats[-1].mean()")
loop(
    "gathered, then read in a function",
    "gathered",
    before="def joined():\n    return torch.cat(feats)",
    after="X = joined()",
)
loop("a function that reads and is never called", "read", before="def joined():\n    return torch.cat(feats)")

pattern(
    "gathered with its graph, then read",
    """
w = torch.randn(64, requires_grad=True)
losses = []
for i in range(12):
    x = torch.randn(64); note(x); losses.append((x * w).sum())  # KEEP
    del x; tick()
ask()
print(sum(float(loss) for loss in losses))
""",
    path=r"losses\[",
    used="read",
)

METER = """
class Meter:
    def __init__(self): self.values = []
    def add(self, x): self.values.append(x)  # KEEP
    def step(self): return torch.stack(self.values).mean()
w = torch.zeros(64, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
meter = Meter()
{before}
for i in range(12):
    x = torch.randn(64); note(x); meter.add(x); del x; tick()
    {inside}
ask()
"""


def meter(name, used, inside, before=""):
    pattern(name, METER.format(before=before, inside=inside), "list", r"meter\.values\[", used=used)


meter("another object's method of that name", "read", "optimizer.step()")
meter(
    "a dict asked for its values, the name of the attribute",
    "read",
    "sum(counts.values())",
    "counts = {'a': 1}",
)
meter(
    "another object's attribute of that name",
    "read",
    "print(table.values)",
    "import ast as table; table.values = 1",
)
meter("its own attribute read in the loop", "again", "print(len(meter.values), meter.values[-1])")
meter("its own method in the loop", "again", "meter.step()")
meter(
    "its own method by a name that nothing tells of", "again", "for m in meters: m.step()", "meters = [meter]"
)
meter(
    "its own method in an object of a class derived from it",
    "again",
    "if i > 99: other.step()",
    "class Other(Meter): pass\nother = Other()",
)

pattern(
    "data set that is added to",
    """
data = [torch.randn(64) for _ in range(4)]
for i in range(12):
    for epoch in range(2):
        for x in data: x.mean()
    x = torch.randn(64); note(x)
    data.append(x)  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"global data\[\d+\]",
    r"data grows and is never emptied; clear it .* read again \(train\.py:\d+\).* meant to grow",
    used="again",
)

pattern(
    "a glance at the newest of a list that grows",
    """
outs = []
def show():
    for _ in range(2): print(outs[-1].mean())
for i in range(12):
    x = torch.randn(64); note(x)
    outs.append(x)  # KEEP
    del x; show(); tick()
ask()
""",
    "list",
    r"global outs\[\d+\]",
    r"outs grows and is never emptied; keep only what is read",
    used="again",
)

pattern(
    "a dict that is asked for one entry",
    """
seen = {}
def look(k):
    for _ in range(2): print(seen[k].mean(), seen.get(k))
for i in range(12):
    x = torch.randn(64); note(x)
    seen[f"s{id(x)}"] = x  # KEEP
    look(f"s{id(x)}"); del x; tick()
ask()
""",
    "dict",
    r"global seen\[",
    r"seen gets a new entry each time and loses none; delete entries",
    used="again",
)
