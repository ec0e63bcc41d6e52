"""Kept by objects of the standard library and of metrics' libraries, which have remedies of their own."""

from . import pattern

pattern(
    "a cycle over a loader",
    """
import itertools
def batches():
    while True: x = torch.randn(64); note(x); yield x
endless = itertools.cycle(batches())  # KEEP
for _ in range(12):
    x = next(endless); del x; tick()
ask()
""",
    None,
    r"endless\.<list>",
    r"itertools\.cycle keeps every item of its first pass.*begin the iterator anew",
)

pattern(
    "a tee of which one side is not read",
    """
import itertools
def batches():
    while True: x = torch.randn(64); note(x); yield x
seen, first = itertools.tee(batches())  # KEEP
for _ in range(12):
    x = next(seen); del x; tick()
ask()
""",
    None,
    r"(seen|first)\.<_tee_dataobject>",
    r"itertools\.tee keeps every item until each of its iterators has read it",
)

pattern(
    "a stack of contexts around the whole loop",
    """
import contextlib
@contextlib.contextmanager
def held(x): yield x
def main():
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            x = torch.randn(64); note(x)
            stack.enter_context(held(x))  # KEEP
            del x; tick()
        ask()
main()
""",
    None,
    r"stack\._exit_callbacks",
    r"stack keeps every context that it has entered until it is closed; open one in each step",
)

LOGGED = """
import logging, logging.handlers
log = logging.getLogger("train"); log.propagate = False
handler = logging.handlers.MemoryHandler(1000, flushLevel=100); log.addHandler(handler)
def step(x):
    y = x * 2; note(y)
    raise ValueError("bad")
for i in range(12):
    try: step(torch.randn(64))
    except ValueError: {call}  # KEEP
    tick()
ask()
"""
for name, call in (
    ("with its error", 'log.exception("skipped")'),
    ("with exc_info", 'log.error("%d", i, exc_info=True)'),
):
    pattern(
        f"a record logged {name}",
        LOGGED.format(call=call),
        "exception",
        r"handler\.buffer\[\d+\]\.exc_info",
        r"a log record keeps the traceback of its error.*record\.exc_info = None",
    )

pattern(
    "an attribute of a thread's own names",
    """
import threading
own = threading.local()
own.done = []
def augment():
    x = torch.randn(64); note(x)
    own.done.append(x)  # KEEP
for _ in range(12):
    augment(); tick()
ask()
""",
    "list",
    r"own\.",
    r"own\.done grows",
)

KEYED = """
cache = {{}}
def lookup(x):
    {key}
    if key not in cache:
        y = x * 2; note(y)
        cache[key] = {value}  # KEEP
    return cache[key]
for _ in range(12):
    lookup(torch.randn(64)); tick()
ask()
"""
for name, key, value in (
    ("tensors", "key = x", "y"),
    ("ids", "key = id(x)", "(x, y)"),
    ("pairs with a tensor", "key = (x, 2)", "y"),
):
    pattern(
        f"a cache whose keys are {name}",
        KEYED.format(key=key, value=value),
        "dict",
        r"cache\[",
        r"the keys of cache are (tensors|ids of objects), new ones each time, so that no entry is found again",
    )

pattern(
    "a cache whose keys are numbers",
    KEYED.format(key="key = len(cache)", value="y"),
    "dict",
    r"cache\[",
    r"cache gets a new entry each time and loses none",
)
