"""Bounds that the statement that adds has itself, or that the entries have, and what is no such bound."""

from . import pattern

pattern(
    "added only below a capacity",
    """
class Reservoir:
    def __init__(self, cap): self.cap, self.items = cap, []
    def add(self, x):
        if len(self.items) < self.cap:
            self.items.append(x)  # KEEP
        else:
            self.items[0] = x
memory = Reservoir(40)
for i in range(12):
    x = torch.randn(64); note(x); memory.add(x); del x; tick()
ask()
""",
    None,
    r"memory\.items",
    "",
    not_leak=r"added only when len\(self\.items\) < self\.cap",
    bounded={"length": 12, "capacity": 40},
)

POOL = """
class ImagePool:
    def __init__(self, size): self.size, self.num, self.images = size, 0, []
    def query(self, image, max_steps=40):
        {test}:
            {inside}
            self.images.append(image)  # KEEP
            {after}
        {outside}
pool = ImagePool(40)
for i in range(12):
    x = torch.randn(64); note(x); pool.query(x); del x; tick()
ask()
"""


def pool(test, inside="pass", after="pass", outside="pass"):
    return POOL.format(test=test, inside=inside, after=after, outside=outside)


pattern(
    "added while a counter is below a size",
    pool("if self.num < self.size", inside="self.num += 1", after="return"),
    None,
    r"pool\.images",
    not_leak=r"added only when self\.num < self\.size",
    bounded={"length": 12, "capacity": 40},
)

pattern(
    "added in a loop that counts its steps",
    pool("while self.num < self.size", inside="self.num += 1", after="break"),
    "list",
    r"pool\.images",
    r"self\.images grows",
)

RAISED = "self.num = self.num + 1"
for name, where in (("where it adds", "inside"), ("at each call", "outside")):
    pattern(
        f"a pool whose counter is raised {name}",
        pool("if self.num < self.size", **{where: RAISED}),
        "list",
        r"pool\.images",
        not_leak=r"added only when self\.num < self\.size",
    )

for name, test in (("to the end of the program", "< max_steps"), ("from the first", "!= self.size")):
    pattern(
        f"a list that grows while steps are counted {name}",
        pool(f"if self.num {test}", outside=RAISED),
        "list",
        r"pool\.images",
        r"self\.images grows",
    )

pattern(
    "added in the first steps only",
    """
def main():
    calibration = []
    for step in range(24):
        x = torch.randn(64)
        if step < 20:
            note(x)
            calibration.append(x)  # KEEP
        del x; tick()
    ask()
main()
""",
    None,
    r"calibration",
    "",
    not_leak=r"added only when step < 20",
    bounded={"length": 20, "capacity": 20},
)

pattern(
    "added where a condition of something else holds",
    """
def main():
    kept = []
    for step in range(24):
        x = torch.randn(64)
        if x.mean() < 20:
            note(x)
            kept.append(x)  # KEEP
        del x; tick()
    ask()
main()
""",
    "list",
    r"kept",
    r"kept",
)

pattern(
    "a heap that loses its smallest",
    """
import heapq
top = []
for i in range(12):
    x = torch.randn(64); note(x)
    heapq.heappush(top, (i, x))  # KEEP
    if len(top) > 30: heapq.heappop(top)
    del x; tick()
ask()
""",
    None,
    r"top",
    "",
    not_leak=r"dropped when len\(top\) > 30",
    bounded={"length": 12, "capacity": 30},
)

pattern(
    "bounded queues by label",
    """
from collections import deque
memory = {label: deque(maxlen=20) for label in range(3)}
for i in range(12):
    x = torch.randn(64); note(x)
    memory[i % 3].append(x)  # KEEP
    del x; tick()
ask()
""",
    None,
    r"memory",
    "",
    not_leak=r"bounded container: deque",
)

pattern(
    "state of an LSTM that carries its graph",
    """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.state = None
    def forward(self, x):
        self.state = self.cell(x, self.state)  # KEEP
        note(self.state[1])
        return self.state[0]
model = Model()
for i in range(12):
    model(torch.randn(4, 8)); tick()
ask()
""",
    None,
    r"model\.state",
    r"self\.state = tuple\(t\.detach\(\) for t in self\.state\)",
)

pattern(
    "functions that capture a tensor without a graph",
    """
handlers = []
def step(i):
    y = torch.randn(64); note(y)
    handlers.append(lambda: y.mean())  # KEEP
for i in range(12):
    step(i); tick()
ask()
""",
    None,
    r"handlers",
    r"pass a number or what it needs of it instead",
)

pattern(
    "bounded queues under new names",
    """
from collections import defaultdict, deque
memory = defaultdict(lambda: deque(maxlen=20))
for i in range(12):
    x = torch.randn(64); note(x)
    memory[f"step {i}"].append(x)  # KEEP
    del x; tick()
ask()
""",
    None,
    r"memory",
    r"memory",
)

pattern(
    "one bounded queue for each step",
    """
from collections import deque
memory = {}
for i in range(12):
    x = torch.randn(64); note(x)
    memory.setdefault(i, deque(maxlen=20)).append(x)  # KEEP
    del x; tick()
ask()
""",
    None,
    r"memory",
    r"memory",
)
