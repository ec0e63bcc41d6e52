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
