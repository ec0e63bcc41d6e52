"""Objects that each keep the one before, and what only looks like it."""

from . import pattern

pattern(
    "states linked by a field",
    """
from dataclasses import dataclass
@dataclass
class State:
    step: int = 0
    prev: "State" = None
    hidden: torch.Tensor = None
st = State()
for i in range(12):
    h = torch.randn(64); note(h)
    st = State(i, st, h)  # KEEP
    del h; tick()
ask()
""",
    "linked objects",
    r"global st \(\.prev x\d+\)\.hidden",
    r"each State keeps the one before it \(\.prev\)",
)

pattern(
    "nodes linked by a statement",
    """
class Node:
    def __init__(self, value): self.value, self.before = value, None
class Tape:
    def __init__(self): self.last = None
    def add(self, x):
        node = Node(x)
        node.before = self.last  # KEEP
        self.last = node
tape = Tape()
for i in range(12):
    x = torch.randn(64); note(x); tape.add(x); del x; tick()
ask()
""",
    "linked objects",
    r"global tape\.last \(\.before x\d+\)\.value",
    r"each Node keeps the one before it \(\.before\)",
)

pattern(
    "dicts linked by a key",
    """
def main():
    carry = None
    for i in range(12):
        x = torch.randn(64); note(x)
        carry = {"h": x, "before": carry}  # KEEP
        del x; tick()
    ask()
main()
""",
    "linked objects",
    r"local of main\(\): carry \(\['before'\] x\d+\)\['h'\]",
    r"each dict keeps the one before it",
)

pattern(
    "method wrapped again and again",
    """
m = nn.Linear(64, 64)
def trace(module, ref):
    orig = module.forward
    def fwd(x): return orig(x) + 0 * ref
    module.forward = fwd  # KEEP
for _ in range(12):
    ref = torch.randn(64); note(ref); trace(m, ref); del ref; tick()
ask()
""",
    "linked objects",
    r"global m\.forward \(\.<closure orig> x\d+\)\.<closure ref>",
    r"module\.forward is wrapped again each time.*wrap it once",
)

pattern(
    "tuples linked by a place",
    """
hist = None
for i in range(12):
    x = torch.randn(64); note(x)
    hist = (x, hist)  # KEEP
    del x; tick()
ask()
""",
    "linked objects",
    r"global hist \(\[1\] x\d+\)\[0\]",
    r"each tuple keeps the one before it \(\[1\]\), and so all of them; .* instead of the whole$",
)

pattern(
    "partial of a partial",
    """
def weighted(inner, w): return w
crit = len
for i in range(12):
    w = torch.randn(64); note(w)
    crit = functools.partial(weighted, crit, w)  # KEEP
    del w; tick()
ask()
""",
    "linked objects",
    r"global crit \(\.args\[0\] x\d+\)\.args\[1\]",
    r"crit is wrapped again each time",
)

pattern(
    "iterator that is chained again and again",
    """
import itertools
stream = iter(())
for i in range(12):
    x = torch.randn(64); note(x)
    stream = itertools.chain(stream, [x])  # KEEP
    del x; tick()
ask()
""",
    "linked objects",
    r"global stream \(.* x\d+\)",
    r"each chain keeps the one before it",
)

pattern(
    "layers of one depth",
    """
kept = []
for i in range(12):
    x = torch.randn(64); note(x)
    kept.append(((((x,),),),))  # KEEP
    del x; tick()
ask()
""",
    "list",
    r"global kept\[\d+\]\[0\]\[0\]\[0\]\[0\]",
    r"kept grows",
)
