"""Kept by plain containers and names."""

from . import pattern

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
    "tensor that regrows and is handed out",
    """
class Gather:
    def __init__(self): self.all = torch.zeros(0)
    def add(self, x):
        self.all = torch.cat((self.all, x))  # KEEP
        return self.all
gather = Gather()
for _ in range(12):
    seen = gather.add(torch.randn(64)); tick()
note(gather.all)
ask()
""",
    "attribute",
    r"global gather\.all",
    r"self\.all is copied into a larger tensor",
    shape="regrow",
)
