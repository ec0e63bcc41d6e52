"""One tensor for each of several holders that is made anew, larger, in each step: of itself, or of a larger input."""

from . import pattern

LAYERS = """
def grown(old, new): return torch.cat((old, new))
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 8); self.mem = torch.randn(1, 8); self.both = (torch.randn(1, 8), torch.randn(1, 8))
        self.held = {{"past": torch.randn(1, 8)}}; self.count = 1; self.room = 1
    def extended(self, x): return torch.cat((self.mem, x))
    def forward(self, x):
        {store}
        return x
class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])
        self.named = nn.ModuleDict({{f"l{{n}}": layer for n, layer in enumerate(self.layers)}})
    def forward(self, x):
        {loop}
        return x
def main():
    net = Net({count})
    for i in range(12):
        with torch.no_grad(): net(torch.randn({rows}, 8))
        tick()
    for layer in net.layers: note({kept})
    ask()
main()
"""
_LOOP = "for layer in self.layers: x = x + layer(x)"


def layers(
    name, store, fix="self.mem", kept="layer.mem", loop=_LOOP, count=2, rows="4", not_leak=None, path=""
):
    lines = store.split("\n")
    if not not_leak:
        at = next(n for n, line in enumerate(lines) if "!" in line)
        lines[at] = lines[at].replace("!", "") + "  # KEEP"
    source = LAYERS.format(store="\n        ".join(lines), kept=kept, loop=loop, count=count, rows=rows)
    path = path or rf"(layer(s\[0\])?|named\.l0)\.{kept.split('.')[1].split('[')[0]}"
    fix = rf"^{fix} is copied into a larger tensor" if fix else "larger tensor"
    pattern(name, source, None, path, fix, not_leak=not_leak, kept=not not_leak, shape="regrow")


for _count in (1, 2, 6):
    layers(f"memories of {_count} layers", "self.mem = torch.cat((self.mem, self.w(x)))!", count=_count)
layers(
    "memories in a dict of modules",
    "self.mem = torch.cat((self.mem, x))!",
    loop="for k, l in self.named.items(): x = x + l(x)",
    path=r"\.mem",
)
layers(
    "memories of an enumerated list",
    "self.mem = torch.cat((self.mem, x))!",
    loop="for n, layer in enumerate(self.layers): x = x + layer(x)",
)
layers("memory by an alias", "old = self.mem\nnew = torch.cat((old, x))\nself.mem = new!")
layers("memory by a helper", "self.mem = grown(self.mem, x)!")
layers("memory by a method", "self.mem = self.extended(x)!")
layers("memory stacked", "self.mem = torch.vstack([self.mem, x])!")
layers("memory padded", "p = nn.functional.pad(self.mem, (0, 0, 0, len(x)))\np[-len(x):] = x\nself.mem = p!")
layers(
    "memory copied into a longer one",
    "longer = self.mem.new_zeros(len(self.mem) + len(x), 8)\nlonger[:len(self.mem)] = self.mem\nself.mem = longer!",
)
layers(
    "memory copied by hand",
    "longer = torch.zeros(self.count + len(x), 8)\nlonger[:self.count].copy_(self.mem)\nself.count += len(x)\nself.mem = longer!",
)
layers(
    "memory joined into another",
    "longer = torch.zeros(len(self.mem) + len(x), 8)\ntorch.cat((self.mem, x), out=longer)\nself.mem = longer!",
)
layers("memory resized", "self.mem.resize_(len(self.mem) + len(x), 8)!", kept="layer.mem")
layers("memory whose data is replaced", "self.mem.data = torch.cat((self.mem.data, x))!")
layers("memory set by name", 'setattr(self, "mem", torch.cat((getattr(self, "mem"), x)))!', fix="")
layers(
    "keys and values in a tuple",
    "self.both = (torch.cat((self.both[0], x)), torch.cat((self.both[1], x)))!",
    "self.both",
    "layer.both[0]",
)
layers(
    "keys and values unpacked",
    "k, v = self.both\nk = torch.cat((k, x)); v = torch.cat((v, x))\nself.both = (k, v)!",
    "self.both",
    "layer.both[1]",
)
layers(
    "memory in an entry",
    'self.held["past"] = torch.cat((self.held["past"], x))!',
    r"self\.held\['past'\]",
    "layer.held['past']",
)
layers(
    "memory that a size lets in",
    "if len(x) > 3:\n    old = self.mem\n    new = torch.cat((old, x))\n    self.mem = new!",
)
layers(
    "room that is doubled",
    "self.count += len(x)\nif self.count > self.room:\n    self.room = 2 * self.count\n    longer = torch.zeros(self.room, 8)\n    longer[:len(self.mem)] = self.mem\n    self.mem = longer!\nself.mem[-1:] = x[:1]",
)

_ANEW = r"made anew in each step, as large as its input: mem \(train\.py:\d+\)"
layers("outputs of longer inputs", "self.mem = self.w(x)", rows="4 + i", not_leak=_ANEW)
layers("outputs of longer inputs, one layer", "self.mem = self.w(x)", rows="4 + i", count=1, not_leak=_ANEW)
layers(
    "inputs padded to the longest",
    "p = nn.functional.pad(x, (0, 0, 0, 4))\nself.mem = torch.cat((p, p))",
    rows="4 + i",
    not_leak=_ANEW,
)
layers(
    "outputs moved",
    "self.mem = self.w(x)\nself.mem = self.mem.detach().contiguous()",
    rows="4 + i",
    not_leak=_ANEW,
)
layers(
    "masks for the longest",
    "if len(x) > len(self.mem): self.mem = torch.zeros(len(x), 8)",
    rows="4 + i",
    not_leak="made anew only for a larger input",
)
layers(
    "keys and values of the newest",
    "k, v = self.w(x), self.w(x)\nself.both = (k, v)",
    kept="layer.both[0]",
    rows="4 + i",
    not_leak=_ANEW.replace("mem", "both"),
)

OBJECTS = """
class Session:
    def __init__(self): self.context = torch.randn(1, 8)
    def push(self, x): {store}
class Batch:
    def __init__(self, x): self.x = x; self.mask = torch.ones(len(x))
    def to(self, device): self.x = self.x.to(device); self.mask = self.mask.to(device); return self
class Server:
    def __init__(self): self.sessions = [Session() for _ in range(3)]
    def run(self, x):
        for session in self.sessions: session.push(x)
server = Server()
for i in range(12):
    x = torch.randn(4 + i, 8)
    server.run(x); batch = Batch(x).to("cpu")
    tick()
for one in {what}: note(one)
ask()
"""


def objects(name, store, what, path, fix="", not_leak=None):
    source = OBJECTS.format(store=store, what=what)
    pattern(name, source, None, path, fix, not_leak=not_leak, kept=not not_leak, shape="regrow")


_SESSIONS = "[s.context for s in server.sessions]"
objects(
    "contexts of sessions",
    "self.context = torch.cat([self.context, x])  # KEEP",
    _SESSIONS,
    r"server\.sessions\[0\]\.context",
    r"^self\.context is copied into a larger tensor .* reset self\.context",
)
objects(
    "newest of sessions",
    "self.context = x * 2",
    _SESSIONS,
    r"\.context",
    not_leak="as large as its input: context",
)
objects("batch of an object", "pass", "[batch.x, batch.mask]", r"batch\.x", not_leak="as large as its input")

pattern(
    "one memory for each name",
    """
bank = {k: torch.zeros(0, 8) for k in "ab"}
for i in range(12):
    for name in bank:
        bank[name] = torch.cat((bank[name], torch.randn(4, 8)))  # KEEP
    tick()
for one in bank.values(): note(one)
ask()
""",
    None,
    r"global bank\['a'\]",
    r"^bank\[name\] is copied into a larger tensor .* reset bank\[name\]",
    shape="regrow",
)

FED = """
last = collections.deque([torch.randn(1, 8)], maxlen=1)
slot = {{"past": torch.randn(1, 8)}}
def remembering(x, past=[torch.randn(1, 8)]):
    past[0] = torch.cat((past[0], x))
    return past[0] * 1
class Memory:
    def __init__(self): self.mem = torch.randn(1, 8)
    def __call__(self, x):
        self.mem = torch.cat((self.mem, x))
        return self.mem * 2
class Window:
    def __init__(self): self.mem = torch.randn(1, 8)
    def __call__(self, x):
        self.mem = torch.cat((self.mem, x))[-4:]
        return x * 2
memory = Memory(); window = Window()
for i in range(12):
    x = torch.randn(4 + i, 8)
    {line}  # KEEP
    tick()
note(out)
ask()
"""
for _name, _line, _reason in (
    ("output fed back by a deque", "out = torch.cat((last[-1], x)); last.append(out)", None),
    ("output fed back by a dict", 'out = torch.cat((slot["past"], x)); slot["past"] = out', None),
    ("output of a function with a default", "out = remembering(x)", None),
    ("output of an object that remembers", "out = memory(x)", None),
    ("output of an object with a window", "out = window(x)", "as large as its input: out"),
):
    pattern(_name, FED.format(line=_line), None, "", "", not_leak=_reason, kept=False, shape="regrow")

pattern(
    "tuple with one more each time",
    """
class Tracker:
    def __init__(self): self.hist = ()
    def step(self, out):
        self.hist = (*self.hist, out)  # KEEP
tracker = Tracker()
for i in range(12):
    x = torch.randn(64); note(x); tracker.step(x); tick()
ask()
""",
    None,
    r"tracker\.hist\[0\]",
    r"^self\.hist is made anew each time as a tuple with one entry more",
)

VARIABLE = """
import contextvars
{before}
for i in range(12):
    x = torch.randn(64); note(x)
    {line}  # KEEP
    tick()
ask()
"""
for _name, _before, _line in (
    ("tuple", 'var = contextvars.ContextVar("seen", default=())', "var.set(var.get() + (x,))"),
    ("list", 'var = contextvars.ContextVar("seen"); var.set([])', "var.get().append(x)"),
):
    pattern(
        f"context variable with a {_name}",
        VARIABLE.format(before=_before, line=_line),
        "ContextVar",
        r"^the context of a thread or task: ContextVar 'seen'\[0\]$",
        r"^the context variable var gets one entry more",
    )
