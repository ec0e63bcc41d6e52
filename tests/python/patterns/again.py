"""What came once so far: it will come again, or not."""

import textwrap

from . import pattern

_TOP = """
import copy
model = nn.Linear(8, 8)
class Top:
    def __init__(self): self.saved = []
    def offer(self, score):
        w = model.weight.detach().clone(); {note}
        self.saved.append((score, {{"w": w}}))  # KEEP
        {after}
top = Top()
done = False
def fit():
    global done
    for epoch in range(4):
        {when}
        for i in range(5): tick()
        if epoch == 1: ask()
fit()
"""


def _top(name, when="top.offer(epoch)", after="", note="epoch == 0 and note(w)", **expected):
    source = _TOP.format(when=when, after=after, note=note.replace("epoch", "score"))
    pattern(name, source, None, r"global top\.saved\[0\]", shape="burst", **expected)


_MORE = r"it came once so far, and its line runs again and again \(train\.py:\d+\)"
_top("first of a few checkpoints", kept=False, not_leak=_MORE)
_top(
    "first under a condition that comes again",
    when="if epoch % 2 == 0: top.offer(epoch)",
    kept=False,
    not_leak=_MORE,
)
_top("the same and asked about again", asked=1, fix="saved")
_top("the only one, in one epoch", when="if epoch == 0: top.offer(epoch)", fix="saved")
_top("the only one, as long as there is none", when="if not done: done = True; top.offer(epoch)", fix="saved")

pattern(
    "outlier under a key of its own",
    """
archive = {}
for i in range(30):
    x = torch.randn(64)
    if i == 9: note(x); x = x.add_(100)
    if x.mean() > 50: archive[f"step{i}"] = {"batch": x}  # KEEP
    del x; tick()
    if i == 28: ask()
""",
    None,
    r"global archive\['step9'\]",
    not_leak=_MORE,
    kept=False,
    shape="burst",
)

pattern(
    "one slot that is stored into when something fails",
    """
class Trainer:
    def __init__(self): self.bad = None
    def step(self, x):
        try:
            if x.mean() > 50: raise ValueError
        except ValueError:
            self.bad = x  # KEEP
trainer = Trainer()
for i in range(30):
    x = torch.randn(64)
    if i == 9: note(x); x.add_(100)
    trainer.step(x)
    del x; tick()
    if i == 28: ask()
""",
    None,
    r"global trainer\.bad",
    "bad",
    shape="burst",
)

_PAIRS = """for task in range(3):
    for i in range(6):
        loss = model(torch.randn(2, 8)).mean()
        for fisher, old in kept: loss = loss + sum((f * (p - o) ** 2).sum() for f, p, o in zip(fisher, model.parameters(), old))
        loss.backward(); tick()
        if task == 1 and i == 5: ask()
    fisher_now = [p.grad.detach() ** 2 for p in model.parameters()]
    if task == 0: note(fisher_now[0]); note(fisher_now[1])
    kept.append((fisher_now, [p.detach().clone() for p in model.parameters()])); del fisher_now
"""


def _pairs(name, source):
    pattern(
        name,
        "\nkept, model = [], nn.Linear(8, 8)\n" + source,
        None,
        r"global kept\[0\]\[0\]\[[01]\]",
        not_leak=r"made late and in use since: kept is read at train\.py:\d+",
        kept=False,
        shape="burst",
    )


_pairs("pairs that a loop reads in each step", _PAIRS)
_pairs(
    "pairs that a loop reads, in a function", "def main():\n" + textwrap.indent(_PAIRS, "    ") + "main()\n"
)

pattern(
    "a loop's variable of what nothing else holds",
    """
def made():
    for _ in range(2):
        pair = [torch.randn(64)]; note(pair[0])
        yield pair
for pair in made():
    for i in range(6): tick()
ask()
""",
    None,
    r"global pair\[0\]",
    kept=False,
)

_EPOCH = """
model = nn.Linear(8, 8)
def epoch():
    outs = []
    for i in range(20):
        o = model(torch.randn(4, 8)).detach(); note(o)
        outs.append(o){keep}
        del o; tick()
        if i == 18: ask()
    return {result}
{call}
"""


def _epoch(
    name, call="for e in range(2): result = epoch()", result="torch.cat(outs).mean().item()", **expected
):
    keep = "" if "KEEP" in call else "  # KEEP"
    source = _EPOCH.format(call=call, result=result, keep=keep)
    pattern(
        name,
        source,
        "list",
        r"(local of epoch\(\): outs|global result)\[\d+\]",
        kept=True,
        released="nothing",
        **expected,
    )


# One long epoch may be all there is: that the list goes at its end helps nobody before.
_epoch("list of a function that a loop calls", fix="outs")
_epoch("list of a function that is called once", call="epoch()", fix="outs")
_epoch(
    "list that the function hands over",
    "for e in range(2): result = epoch()  # KEEP",
    result="outs",
    fix="result",
)
