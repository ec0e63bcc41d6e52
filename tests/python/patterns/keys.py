"""Caches that have an entry for each sample of the data, and those whose keys are always new."""

from . import pattern

SAMPLE = r"filled once for each sample: its key {} \(train\.py:\d+\) comes again"


def cache(name, source, path=r"cache\[", not_leak=None, **more):
    pattern(name, source, "dict" if not_leak is None else None, path, "", not_leak=not_leak, **more)


LOOP = """
cache = {{}}
data = [torch.randn(64) for _ in range(12)]
{before}
for epoch in range(1):
    {loop}
        {fill}
        tick()
ask()
"""


def loop(name, loop, fill, not_leak=None, before=""):
    cache(name, LOOP.format(before=before, loop=loop, fill=fill), not_leak=not_leak)


FILL = "if {0} not in cache: y = x * 2; note(y); cache[{0}] = y  # KEEP"
loop("by the index of a sample", "for i, x in enumerate(data):", FILL.format("i"), SAMPLE.format("i"))
loop(
    "by an index of a range",
    "for i in range(len(data)):",
    "x = data[i]\n        " + FILL.format("i"),
    SAMPLE.format("i"),
)
loop(
    "by a name of a list",
    "for path, x in zip(paths, data):",
    FILL.format("path"),
    SAMPLE.format("path"),
    "paths = [f'{n}.png' for n in range(12)]",
)
loop(
    "by an index in an order of its own",
    "for i in random.sample(range(12), 12):",
    "x = data[i]; cache[i] = y = x * 2; note(y)  # KEEP",
    SAMPLE.format("i"),
    "import random",
)
loop(
    "by an index of a permutation",
    "for i in torch.randperm(12).tolist():",
    "x = data[i]\n        " + FILL.format("i"),
    SAMPLE.format("i"),
)
loop("by epoch and index", "for i, x in enumerate(data):", FILL.format("(epoch, i)"))
loop("by epoch and index as text", "for i, x in enumerate(data):", FILL.format("f'{epoch}:{i}'"))
loop(
    "by the id of a sample",
    "for x in data:",
    "x = x + 0\n        kept.append(x)\n        " + FILL.format("id(x)"),
    None,
    "kept = []",
)
loop("by a length that grows", "for x in data:", FILL.format("len(cache)"))
loop("by a number that counts on", "for x in data:", "n += 1\n        " + FILL.format("n"), None, "n = 0")
loop(
    "by a random crop",
    "for i, x in enumerate(data):",
    "top = random.randrange(1 << 40)\n        " + FILL.format("(i, top)"),
    None,
    "import random",
)

cache(
    "by the number of a step",
    """
cache = {}
for step, x in enumerate(torch.randn(12, 64)):
    y = x * 2; note(y); cache[step] = y  # KEEP
    tick()
ask()
""",
)

cache(
    "by an index that is handed over",
    """
class Features:
    cache = {}
    @classmethod
    def get(cls, i, x):
        k = f"sample-{i}"
        if k not in cls.cache:
            y = x * 2; note(y); cls.cache[k] = y  # KEEP
        return cls.cache[k]
data = [torch.randn(64) for _ in range(12)]
settings = {}
for epoch in range(1):
    settings.get("lr")
    for i, x in enumerate(data):
        Features.get(i, x); tick()
ask()
""",
    not_leak=SAMPLE.format("k"),
)

cache(
    "by an index and an epoch that are handed over",
    """
class Features:
    cache = {}
    @classmethod
    def get(cls, i, x, epoch):
        k = f"{epoch}:{i}"
        if k not in cls.cache:
            y = x * 2; note(y); cls.cache[k] = y  # KEEP
        return cls.cache[k]
data = [torch.randn(64) for _ in range(12)]
for epoch in range(1):
    for i, x in enumerate(data):
        Features.get(i, x, epoch); tick()
ask()
""",
)

DATA = """
from torch.utils.data import Dataset, DataLoader
class Cached(Dataset):
    def __init__(self, n): self.n, self.c = n, {{}}
    def __len__(self): return self.n
    def __getitem__(self, i):
        {fill}
        return self.c[{key}]
def epoch(loader):
    for x in loader: tick()
loader = DataLoader(Cached(40), 2, shuffle=True)
iterator = iter(loader)
for _ in range(12): next(iterator); tick()
ask()
"""
GET = "if {0} not in self.c: x = torch.randn(64); note(x); self.c[{0}] = x  # KEEP"
cache(
    "of a data set, by index",
    DATA.format(fill=GET.format("i"), key="i"),
    r"(loader\.dataset|iterator\._dataset)\.c\[\d+\]",
    SAMPLE.format("i"),
    bounded={"length": 24, "capacity": 40},
)
cache(
    "of a data set, by index and crop",
    DATA.format(
        fill="import random; top = random.randrange(1 << 40)\n        " + GET.format("(i, top)"),
        key="(i, top)",
    ),
    r"(loader\.dataset|iterator\._dataset)\.c\[",
)

cache(
    "by the ids that a loader gives",
    """
from torch.utils.data import DataLoader, TensorDataset
cache = {}
loader = DataLoader(TensorDataset(torch.arange(24), torch.randn(24, 64)), 2)
for epoch in range(1):
    for idx, x in loader:
        for i, row in zip(idx.tolist(), x):
            if i not in cache:
                y = row * 2; note(y); cache[i] = y  # KEEP
        tick()
ask()
""",
    not_leak=SAMPLE.format("i"),
)

CALLS = """
@functools.lru_cache(maxsize=None)  # KEEP
def load(i, scale):
    x = torch.randn(64) * scale; note(x); return x
for epoch in range(1):
    for i in range(12):
        load({arguments}); tick()
ask()
"""
pattern(
    "lru_cache by index",
    CALLS.format(arguments="i, 2.0"),
    "lru_cache",
    r"lru_cache of load\(\)",
    not_leak=r"filled once for each sample: load\(\) is called with i, scale that come again",
)
pattern(
    "lru_cache by index beside another module's function of that name",
    CALLS.format(arguments="i, 2.0") + "import io, json\njson.load(io.StringIO('1'))\n",
    "lru_cache",
    r"lru_cache of load\(\)",
    not_leak=r"filled once for each sample: load\(\) is called with i, scale that come again",
)
pattern(
    "lru_cache by a number that anneals",
    CALLS.format(arguments="0, 1.0 / (1 + i + 12 * epoch)"),
    "lru_cache",
    r"lru_cache of load\(\)",
    r"the cache of load\(\) keeps its arguments",
)

WALK = """
cache = {}
names = [str(n) for n in range(12)]
def walk(tokens):
    for token in tokens:
        if token not in cache: y = torch.ones(64); note(y); cache[token] = y  # KEEP
        tick()
for epoch in range(1):
    WALKED
ask()
"""
cache(
    "by what every caller hands over again",
    WALK.replace("WALKED", "walk(names)"),
    not_leak=SAMPLE.format("token"),
)
cache("by what a caller makes anew", WALK.replace("WALKED", "walk([str(epoch), *names])"))
cache("by what is bound anew before the call", WALK.replace("WALKED", "fresh = list(names); walk(fresh)"))

LOADED = """
from torch.utils.data import DataLoader, TensorDataset
cache = {{}}
data = TensorDataset(torch.arange(24), torch.randn(24, 64))
for epoch in range(1):
    for idx, x in {loader}:
        {keys}:
            y = x[0] * 2; note(y); cache[i] = y  # KEEP
        tick()
ask()
"""
NEW = "[n for n in idx.tolist() if n not in cache]"
MISSING = f"for i in {NEW}"
FRESH = "TensorDataset(torch.randint(1 << 40, (24,)), torch.randn(24, 64))"
for name, loader, keys, again in (
    ("that miss, of a loader made anew", "DataLoader(data, 2, shuffle=True)", MISSING, True),
    ("that miss, gathered first", "DataLoader(data, 2)", f"miss = {NEW}\n        for i in miss", True),
    ("that are counted", "DataLoader(data, 2)", "for j, i in enumerate(idx.tolist())", True),
    ("that miss, of data made anew", f"DataLoader({FRESH}, 2)", MISSING, False),
    ("and of the epoch", "DataLoader(data, 2)", "for i in [(epoch, n) for n in idx.tolist()]", False),
):
    cache(
        f"by ids {name}",
        LOADED.format(loader=loader, keys=keys),
        not_leak=SAMPLE.format("i") if again else None,
    )

# A stream's numbers, or a batch that is drawn anew, never come again: believed once.
cache(
    "by ids that a loader gives, asked before",
    LOADED.format(loader="DataLoader(data, 2, shuffle=True)", keys=MISSING),
    asked=1,
)
