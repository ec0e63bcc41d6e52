"""Blocks that several things hold: which of them is the holder, and what that says of the growth."""

from . import pattern

REPLAY = """
import collections, random
memory = {memory}
def optimize():
    batch = [memory[i] for i in range(0, len(memory), 3)]
    states = tuple(state for state, _ in batch)
    ask()
for i in range(12):
    s = torch.randn(64); note(s); memory.append((s, i)); del s; tick()  # KEEP
optimize()
"""

pattern(
    "a batch drawn from a bounded buffer",
    REPLAY.format(memory="collections.deque(maxlen=500)"),
    "deque",
    r"global memory\[\d+\]",
    not_leak=r"deque of 12, at most 500",
    bounded={"length": 12, "capacity": 500},
)

pattern(
    "a batch drawn from a list",
    REPLAY.format(memory="[]"),
    "list",
    r"global memory\[\d+\]",
    r"memory grows",
)

BANK = """
class Bank:
    def __init__(self, size): self.size, self.items = size, []
    def start(self):
        {test}
            self.items.append(torch.zeros(1))
    def put(self, i):
        x = torch.randn(64); note(x)
        self.items[i] = x  # KEEP
bank = Bank(40)
for i in range(40):
    bank.start()
for i in range(12):
    bank.put(i); tick()
ask()
"""

pattern(
    "a list whose entries are replaced",
    BANK.format(test="if len(self.items) < self.size:"),
    "list",
    r"bank\.items",
    not_leak=r"its entries are replaced, and none is added: a list of 40",
    stack=True,
)

pattern(
    "a list whose entries are replaced, and that grows elsewhere",
    BANK.format(test="if self.size:"),
    "list",
    r"bank\.items",
    r"self\.items grows",
    stack=True,
)

SESSIONS = """
class Session:
    def __init__(self): self.keys = []
sessions = {{number: Session() for number in range(3)}}
def answer(session, x):
    session.keys.append(x)  # KEEP
def close(number):
    {close}
for i in range(15):
    x = torch.randn(64); note(x); answer(sessions[{which}], x); del x; tick()
    if i > 40: {often}
ask()
"""

pattern(
    "lists of sessions that are taken out",
    SESSIONS.format(close="del sessions[number]", which="i % 3", often="close(i)"),
    "list",
    r"sessions\[\d\]\.keys",
    not_leak=r"belongs to an entry of sessions, and entries are taken out of that",
)

for name, close, which, often in (
    ("stay", "pass", "i % 3", "close(i)"),
    ("nobody takes out", "sessions.pop(number)", "i % 3", "pass"),
    ("are one that stays", "sessions.pop(number)", "0", "close(i)"),
    ("are taken out by one name", "sessions.pop('first')", "i % 3", "close(i)"),
):
    pattern(
        f"lists of sessions that {name}",
        SESSIONS.format(close=close, which=which, often=often),
        "list",
        r"sessions\[\d\]\.keys",
        r"\.keys grows",
    )

CACHE = """
import random
class Net:
    def __init__(self): self.history = {{}}
    def forward(self, numbers):
        for number in numbers:
            x = torch.randn(64); note(x)
            self.history[number] = x  # KEEP
    def __call__(self, numbers): return self.forward(numbers)
net = Net()
random.seed(1)
for i in range(12):
    numbers = [{draw} for _ in range(2)]
    net(numbers); tick()
ask()
"""

for name, draw in (
    ("numbers that are drawn", "random.randrange(500)"),
    ("what is chosen", "random.choice(range(500))"),
):
    pattern(
        f"a cache by {name}",
        CACHE.format(draw=draw),
        "dict",
        r"net\.history",
        not_leak=r"its key number .* comes again",
    )

for name, draw in (
    ("numbers drawn from too many", "random.randrange(10 ** 12)"),
    ("numbers drawn from nobody knows how many", "random.randint(0, sys.maxsize)"),
    ("names that are drawn", "''.join(random.choices('abcdefgh', k=16))"),
    ("several numbers that are drawn", "tuple([random.randint(0, 255) for _ in range(8)])"),
):
    pattern(
        f"a cache by {name}",
        "import sys" + CACHE.format(draw=draw),
        "dict",
        r"net\.history",
        r"self\.history gets a new entry each time",
    )

LIMITED = """
import collections
class Cache:
    def __init__(self, limit=None): self.limit, self.kept = limit, collections.OrderedDict()
    def put(self, key, x):
        self.kept[key] = x  # KEEP
        {test}
            self.kept.popitem(last=False)
cache = Cache({limit})
for i in range(12):
    x = torch.randn(64); note(x); cache.put(i, x); del x; tick()
ask()
"""

for name, test, limit in (
    ("no limit", "while self.limit is not None and len(self.kept) > self.limit:", ""),
    ("an infinite limit", "while len(self.kept) > self.limit:", "float('inf')"),
):
    pattern(
        f"a cache with {name}",
        LIMITED.format(test=test, limit=limit),
        None,
        r"cache\.kept",
        r"self\.kept gets a new entry each time",
    )

pattern(
    "a cache with a limit",
    LIMITED.format(test="while len(self.kept) > self.limit:", limit="40"),
    None,
    r"cache\.kept",
    not_leak=r"entries are dropped when len\(self\.kept\) > self\.limit",
)

pattern(
    "a loss over a state that is carried",
    """
class Net:
    def __init__(self): self.hidden = None
    def forward(self, w):
        hidden = self.hidden if self.hidden is not None else torch.zeros(64)
        outs = []
        for t in range(4):
            hidden = torch.tanh(hidden * w); note(hidden); outs.append(hidden.sum())
        self.hidden = hidden  # KEEP
        return torch.stack(outs)
net, w = Net(), torch.ones(64, requires_grad=True)
for i in range(8):
    loss = net.forward(w).sum()
    tick()
ask()
""",
    "autograd graph",
    r"global net\.hidden > \.grad_fn",
    r"self\.hidden = \(hidden\)\.detach\(\)",
)

ROUND = """
for step in range(30):
    tick()
    if {test}:
        for batch in range(2):
            shown = torch.randn(64)  # KEEP
            if step == 7: note(shown)
    if step == 12: ask()
"""

pattern(
    "a variable that its loop binds anew now and then",
    ROUND.format(test="step % 8 == 7"),
    "global",
    r"global shown",
    not_leak=r"bound anew when its loop comes there again",
    shape="burst",
)

pattern(
    "a variable that is bound once in a loop",
    ROUND.format(test="step == 7"),
    "global",
    r"global shown",
    r"set shown = None",
    shape="burst",
)

STATES = """
w = torch.ones(64, requires_grad={graph})
hidden = [torch.zeros(64) for _ in range(4)]
for i in range(12):
    for k in range(4):
        x = {value}
        note(x)
        hidden[k] = x  # KEEP
    tick()
ask()
"""

pattern(
    "states that carry the graph of those before",
    STATES.format(graph=True, value="torch.tanh(hidden[k] * w)"),
    None,
    r"hidden\[\d\] > \.grad_fn",
    stack=True,
)

pattern(
    "entries that are made of what is there",
    """
bank = [[] for _ in range(4)]
for i in range(12):
    x = torch.randn(64); note(x)
    bank[i % 4] = bank[i % 4] + [x]  # KEEP
    tick()
ask()
""",
    None,
    r"bank\[\d\]",
    stack=True,
)
