"""Containers that the program empties by another function, at intervals, or by handing them on, and such that it does
not empty after all."""

from . import pattern

LOGGER = """
class Logger:
    def __init__(self, every): self.buf, self.every, self.total = [], every, 0.0
    def log(self, record):
        self.buf.append(record)  # KEEP
        {when}
    def flush(self):
        for record in self.buf[-self.every:]:
            self.total += float(record.sum())
        {then}
logger = Logger(40)
def main():
    for step in range(12):
        x = torch.randn(64); note(x); logger.log(x); del x; tick()
        {each}
    ask()
main()
"""


def logger(when="pass", then="pass", each="pass"):
    return LOGGER.format(when=when, then=then, each=each)


for name, then in (
    ("clears", "self.buf.clear()"),
    ("begins anew", "self.buf = []"),
    ("cuts", "del self.buf[:]"),
):
    pattern(
        f"a full buffer is flushed by a method that {name}",
        logger("if len(self.buf) >= self.every: self.flush()", then),
        "list",
        r"logger\.buf",
        not_leak=r"entries are dropped when len\(self\.buf\) >= self\.every",
        bounded={"length": 12, "capacity": 40},
    )

pattern(
    "a full buffer is flushed by a method that clears nothing",
    logger("if len(self.buf) >= self.every: self.flush()"),
    "list",
    r"logger\.buf",
    r"self\.buf grows",
)

pattern(
    "a buffer that is flushed every so many steps",
    logger(then="self.buf.clear()", each="if (step + 1) % 50 == 0: logger.flush()"),
    "list",
    r"logger\.buf",
    not_leak=r"emptied every time \(step \+ 1\) % 50 == 0",
)

pattern(
    "a buffer that is flushed every so many steps and not cleared",
    logger(each="if (step + 1) % 50 == 0: logger.flush()"),
    "list",
    r"logger\.buf",
    r"self\.buf grows",
)

LOCAL = """
def main():
    outs, other = [], []
    for step in range(12):
        x = torch.randn(64); note(x)
        outs.append(x)  # KEEP
        del x; tick()
        {each}
    ask()
main()
"""
for name, each in (
    ("cleared", "if step % 50 == 49: outs.clear()"),
    ("begun anew", "if not (step + 1) % 50: outs = []"),
):
    pattern(
        f"a local list that is {name} every so many steps",
        LOCAL.format(each=each),
        "list",
        "outs",
        not_leak=r"emptied every time ",
    )

for name, each in (
    ("another one is cleared", "if step % 50 == 49: other.clear()"),
    ("it is cleared on one step", "if step == 49: outs.clear()"),
    ("it was read so often already", "if step % 50 == 49: float(outs[-1].sum())"),
):
    pattern(f"a local list where {name}", LOCAL.format(each=each), "list", "outs", r"outs grows")

HANDED = """
class Trainer:
    def __init__(self): self.now, self.before = [], []
    def run(self):
        for epoch in range(4):
            {turn}
            for i in range(8):
                x = torch.randn(64); note(x); self.now.append(x); del x; tick()
                if epoch == 1 and i == 5: ask()
trainer = Trainer()
trainer.run()
"""
pattern(
    "the list of an epoch becomes that of the epoch before",
    HANDED.format(turn="self.before, self.now = self.now, []"),
    "list",
    r"trainer\.(before|now)",
    not_leak=r"emptied at each turn of the outer loop",
    kept=False,
)

pattern(
    "the list of an epoch is added to that of all before",
    HANDED.format(turn="self.before += self.now; self.now = []"),
    "list",
    r"trainer\.before",
    r"before",
    kept=False,
)


FITTED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.outs = []
    def training_step(self, x):
        self.outs.append(x)  # KEEP
    def on_epoch_end(self): self.outs.clear()
    def on_train_end(self): self.outs.clear()
class Trainer:
    def __init__(self, callbacks): self.callbacks, self.logger = callbacks, None
    def fit(self, model):
        for epoch in range(1):
            for i in range(12):
                x = torch.randn(64); note(x); model.training_step(x); del x; tick()
            ask()
            {end}
Trainer([]).fit(Model())
"""
for name, end in (
    ("if it has the method", 'if hasattr(model, "on_epoch_end"): model.on_epoch_end()'),
    ("if there is a model", "if model is not None: model.on_epoch_end()"),
    ("as one of several", "for each in [model, *self.callbacks]: each.on_epoch_end()"),
):
    pattern(
        f"outputs that are cleared at the end of an epoch {name}",
        FITTED.format(end=end),
        "list",
        r"\.outs\[",
        not_leak=r"emptied at each turn of the outer loop",
    )

for name, end in (
    ("if a number says so", "if epoch > 100: model.on_epoch_end()"),
    (
        "if it has no such method",
        "if callable(model.on_epoch_end): pass\n            else: model.on_epoch_end()",
    ),
    ("under another name", 'if hasattr(model, "on_epochs_end"): model.on_epochs_end()'),
    ("if something else is there", "if self.logger is not None: model.on_epoch_end()"),
    ("of callbacks alone", "for each in self.callbacks: each.on_epoch_begin()"),
):
    pattern(
        f"outputs of an epoch that are not cleared {name}",
        FITTED.format(end=end),
        "list",
        r"\.outs\[",
        r"self\.outs grows",
    )

for name, then, not_leak in (
    ("handed on", "before, outs = outs, []", r"entries are dropped when len\(outs\) == 40"),
    ("joined to all before", "before = before + outs", None),
):
    pattern(
        f"a full list that is {name}",
        LOCAL.format(each="if len(outs) == 40: " + then).replace("outs, other", "outs, before"),
        "list",
        "outs",
        "" if not_leak else r"outs grows",
        not_leak=not_leak,
    )

OWN = """
class Registry({base}):
    def track(self, name, x):
        {adds}  # KEEP
        {then}
registry = Registry()
for _ in range(12):
    x = torch.randn(64); note(x); registry.track("loss", x); del x; tick()
ask()
"""
pattern(
    "a dict of the user's own class that adds to itself",
    OWN.format(base="dict", adds="self.setdefault(name, []).append(x)", then="pass"),
    "list",
    r"registry\['loss'\]",
    r"registry grows",
)
pattern(
    "a list of the user's own class that adds to itself",
    OWN.format(base="list", adds="self.append(x)", then="pass"),
    None,
    r"registry\[",
    r"registry grows",
)
pattern(
    "a list of the user's own class that bounds itself",
    OWN.format(base="list", adds="self.append(x)", then="while len(self) > 40: self.pop(0)"),
    None,
    r"registry\[",
    not_leak=r"entries are dropped when len\(self\) > 40",
)

# What the source only suggests is believed once, and not again of a list that has grown manifold since.
pattern(
    "a buffer whose flush when full returns early, asked before",
    logger(
        "if len(self.buf) >= self.every: self.flush()", "if self.total >= 0: return\n        self.buf.clear()"
    ),
    "list",
    r"logger\.buf",
    r"self\.buf grows",
    asked=1,
)
pattern(
    "a buffer that is said to be flushed every so many steps, asked before",
    logger(then="self.buf.clear()", each="if (step + 1) % 50 == 0: logger.flush()"),
    "list",
    r"logger\.buf",
    r"self\.buf grows",
    asked=1,
)
for name, end in (
    ("if it has the method", 'if hasattr(model, "on_epoch_end"): model.on_epoch_end()'),
    ("as one of several", "for each in self.callbacks: each.on_epoch_end()"),
):
    pattern(
        f"outputs that are said to be cleared {name}, asked before",
        FITTED.format(end=end),
        "list",
        r"\.outs\[",
        r"self\.outs grows",
        asked=1,
    )
pattern(
    "outputs that are cleared without condition, asked before",
    FITTED.format(end="model.on_epoch_end()"),
    "list",
    r"\.outs\[",
    not_leak=r"emptied at each turn of the outer loop",
    asked=1,
)
for name, end in (
    ("if the model has another method", 'if hasattr(model, "on_fit_end"): model.on_epoch_end()'),
    ("if it is not another one", "if model is not self.logger: model.on_epoch_end()"),
):
    pattern(
        f"outputs of an epoch that are cleared {name}",
        FITTED.format(end=end),
        "list",
        r"\.outs\[",
        r"self\.outs grows",
    )

for name, each in (
    ("cleared by what nobody calls", "def tidy(count=0):\n            if count % 50 == 0: outs.clear()"),
    (
        "cleared after the loop",
        "if step >= 11: continue\n    else:\n        if step % 50 == 49: outs.clear()",
    ),
):
    pattern(f"a local list that is {name}", LOCAL.format(each=each), "list", "outs", r"outs grows")
pattern(
    "a local list that another loop clears at intervals",
    LOCAL.format(each="pass").replace(
        "    for step in range(12):",
        "    for step in range(3):\n        if step % 50 == 49: outs.clear()\n    for step in range(12):",
    ),
    "list",
    "outs",
    r"outs grows",
)

FAST = """
class Fast:
    def __init__(self, callbacks): pass
    def fit(self, model):
        for i in range(12):
            x = torch.randn(64); note(x); model.training_step(x); del x; tick()
        ask()
Fast([]).fit(Model())
"""
for name, source, not_leak in (
    ("this trainer", FITTED.format(end="model.on_epoch_end()"), r"emptied at each turn"),
    (
        "another trainer",
        FITTED.format(end="model.on_epoch_end()").replace("Trainer([]).fit(Model())", FAST),
        None,
    ),
):
    pattern(
        f"outputs that {name} clears, asked before",
        source,
        "list",
        r"\.outs\[",
        "" if not_leak else r"self\.outs grows",
        not_leak=not_leak,
        asked=1,
        stack=True,
    )
