"""One sentence that says how to mend a leak, in the user's own names.

Must not know: how the leak was found.
Invariant: text in, text out.
"""

import ast
import re
from typing import Any, List, Optional

from ._code import text


def _value_names(node: Any) -> List[str]:
    return [text(part) for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))]


def graph_accumulated(node: Any, name: str, scalar: bool, parts: bool = False) -> str:
    """`x += loss`, `self.center = self.center * m + …`: the tensor carries the history of all steps. `parts`: it is
    a tuple of tensors."""
    unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.List))
    if parts or unpacked:
        better = f"tuple(t.detach() for t in {name})" if parts else f"{name}.detach()"
        return f"{name} carries the autograd graph of every step before; detach it after the step: {name} = {better}"
    if isinstance(node, ast.AugAssign):
        target, value = text(node.target), text(node.value)
        operator = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/="}.get(type(node.op), "+=")
        what = value if isinstance(node.value, (ast.Name, ast.Attribute)) else f"({value})"
        better = f"{what}.item()" if scalar else f"{what}.detach()"
        return f"{value} carries its autograd graph; add a {'number' if scalar else 'detached tensor'} instead: {target} {operator} {better}"
    if isinstance(node, ast.Assign):
        target = text(node.targets[0])
        value = text(node.value)
        return f"{target} carries the autograd graph of every step before; compute it under torch.no_grad(), or detach: {target} = ({value}).detach()"
    return f"{name} carries its autograd graph; store {name}.detach(), or .item() of a scalar"


def graph_stored(node: Any, name: str, scalar: bool, nested: bool) -> str:
    """A tensor with its graph was put into a container, or (nested) a container of such tensors."""
    value = stored_value(node)
    shown = value if value and re.fullmatch(r"[\w.]+", value) else "the tensor"
    if nested:
        what = f"the tensors in {value}" if shown == value else "its tensors"
        return f"each entry of {name} keeps autograd graphs; detach {what} (t.detach()) or compute them under torch.no_grad(), and drop entries no longer needed"
    if scalar:
        return f"each entry of {name} keeps its autograd graph; store the number: {shown}.item()"
    return f"each entry of {name} keeps its autograd graph; store {shown}.detach() (or compute it under torch.no_grad()), and drop entries no longer needed"


def stored_value(node: Any) -> Optional[str]:
    """What a storing statement stores, as text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
        return text(node.value.args[-1])
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        return text(node.value)
    return None


def container(name: str, kind: str, value: Optional[str]) -> str:
    if kind == "dict":
        return f"{name} gets a new entry each time and loses none; delete entries when they have been used, bound it, or keep them on the CPU"
    instead = "a number or a CPU copy" if value else "a CPU copy"
    return f"{name} grows and is never emptied; keep only what is read (collections.deque(maxlen=…)), clear it, or store {instead}"


def told(name: str, method: str) -> str:
    """An object of a library that is given something each time and has a method that empties it."""
    return (
        f"{name} keeps what it is given and is never emptied; call {name}.{method}() when its value has been read, as "
        "at the end of an epoch"
    )


def new_keys(name: str, what: str) -> str:
    return (
        f"the keys of {name} are {what}, new ones each time, so that no entry is found again; key it by what comes again "
        "(an index, a name), or delete entries when they have been used"
    )


def endless() -> str:
    return (
        "itertools.cycle keeps every item of its first pass; begin the iterator anew instead, in a generator: "
        "while True: yield from loader"
    )


def tee() -> str:
    return (
        "itertools.tee keeps every item until each of its iterators has read it, and one of them lags behind; delete "
        "that one, or read what is wanted twice into a list first (itertools.islice)"
    )


def exit_stack(name: str) -> str:
    return (
        f"{name} keeps every context that it has entered until it is closed; open one in each step (with ExitStack() "
        "inside of the loop), or use a plain with"
    )


def log_record() -> str:
    return (
        "a log record keeps the traceback of its error, with all frames and their locals; have the handler write it at "
        "once or flush sooner, or set record.exc_info = None once it is formatted"
    )


def registered(name: str, kind: str) -> str:
    return (
        f"every {kind} puts itself into {name} and nothing takes it out; use a weakref.WeakSet, or remove it when it is "
        "done with"
    )


def cache(function: str, maxsize: Any) -> str:
    return (
        f"the cache of {function}() keeps its arguments and results, and they are new ones at every call; "
        f"remove functools.lru_cache, or give it a maxsize and keys that come again (plain values, no tensors)"
    )


def traceback(node: Any, name: str) -> str:
    return (
        f"an exception keeps the frames of its traceback with all their locals; store str(err) in {name}, "
        "or call err.with_traceback(None) (and traceback.clear_frames) first"
    )


def captured(name: str, what: str, variable: str, graph: bool = True) -> str:
    better = f"a number or {variable}.detach().cpu()" if graph else "a number or what it needs of it"
    return f"each {what} in {name} captures the tensor {variable}; pass {better} instead, or run and drop it at once"


def context(attribute: str) -> str:
    return f"an output kept on ctx makes a reference cycle; use ctx.save_for_backward({attribute}) instead of ctx.{attribute} = {attribute}"


def cycle(what: str, gc_on: bool) -> str:
    return f"break the reference cycle ({what}), with a weakref or by setting it to None; " + (
        "until then the garbage collector frees it late"
        if gc_on
        else "gc is disabled, so nothing collects it: gc.collect() would"
    )


def old_optimizer(name: str, second: bool) -> str:
    """`second`: another optimizer trains the same parameters now."""
    if second:
        return (
            f"{name} keeps optimizers that no longer step, each with a second optimizer state for its parameters; keep "
            "the numbers you need, reuse one optimizer, or delete the old ones"
        )
    return (
        f"{name} keeps optimizers that no longer step, each with its state and the parameters it trained; keep the "
        "numbers you need, or delete the old ones"
    )


def old_model(name: str) -> str:
    return f"{name} keeps models that are no longer trained; keep a state_dict on the CPU or delete them"


def hooks(name: str, call: str) -> str:
    return f"{call} is called again and again and its handle never removed; keep the handle and call handle.remove()"


def size(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def pins(view_bytes: int, base_bytes: int) -> str:
    return f"views pin their base: {size(view_bytes)} of {size(base_bytes)} each"


def view(name: str, view_bytes: int, base_bytes: int) -> str:
    return f"{name} holds views of {size(view_bytes)} that each pin a storage of {size(base_bytes)}; store copies (.clone()), and clear {name} when it has been read"


def linked(kind: str, link: str, fixed: bool) -> str:
    """`fixed`: the link cannot be changed, as a tuple's."""
    return (
        f"each {kind} keeps the one before it ({link}), and so all of them; keep what is read of the one before "
        "instead of the whole" + ("" if fixed else f", or set its {link} to None")
    )


def wrapped(name: str, variable: str) -> str:
    return (
        f"{name} is wrapped again each time, and every wrapper keeps the one before ({variable}) and what it captured; "
        "wrap it once, or put the original back first"
    )


def default_argument(name: str, function: str) -> str:
    return (
        f"the default of {name} in {function}() is made once and is the same object in every call, so that it grows; "
        f"write {name}=None and make a new one in the function"
    )


def grows_in_use(name: str, kind: str, where: str) -> str:
    what = (
        "gets a new entry each time and loses none"
        if kind == "dict"
        else "gets a new module each time and loses none"
        if kind == "modules"
        else "grows and is never emptied"
    )
    return (
        f"{name} {what}; clear it when it has been read, or bound it; it is read again ({where}), so that it is no leak "
        "where it is meant to grow (a data set or a model that is added to)"
    )


def retained(name: str) -> str:
    return (
        f"{name} keeps it after its last use; set {name} = None (or del it) once done, or keep it on the CPU"
    )


def regrown(name: str, itself: bool) -> str:
    """`itself`: the source shows that it is made of what was there."""
    how = "copied into" if itself else "bound to"
    return (
        f"{name} is {how} a larger tensor each time; keep only the newest part of it, move the parts to the CPU as they "
        f"come, or reset {name}"
    )


def tuple_grown(name: str) -> str:
    return (
        f"{name} is made anew each time as a tuple with one entry more, and loses none; keep only the newest entries "
        f"({name} = {name}[-n:]), or reset it"
    )


def context_variable(name: str, many: bool) -> str:
    """`many`: its value is a tuple or a container."""
    what = "one entry more each time and loses none" if many else "what is set and keeps it"
    return (
        f"the context variable {name} gets {what}; keep only what is read of it, or undo each set "
        f"(token = {name}.set(…), then {name}.reset(token))"
    )


def call_of_library(call: str, inner: str, graph: bool, emptied: str) -> str:
    """`emptied`: the call that empties what keeps it, if there is one."""
    better = "detached CPU tensors" if graph else "numbers or CPU copies"
    how = f"call {emptied} when it has been read" if emptied else "reset or clear it regularly"
    return f"{inner} keeps what {call} hands over; {how}, or hand over {better}"


def adds_by_library(call: str) -> str:
    return f"{call.strip()} adds something each time and takes nothing out; take out what is no longer used (delete, remove, reset)"


def future(name: str) -> str:
    return f"each future in {name} keeps its result (or its exception's frames); take the result and drop the future"


def generator(name: str) -> str:
    return f"a suspended generator keeps its locals alive; exhaust it, close() it or drop {name}"


def create_graph() -> str:
    return (
        "backward(create_graph=True) makes each parameter's .grad carry a graph that leads back to the parameter, a "
        "cycle through C++ that gc cannot see; use torch.autograd.grad(…, create_graph=True), or set the gradients to "
        "None when done (zero_grad(set_to_none=True))"
    )


def finalizer() -> str:
    return (
        "weakref.finalize holds the arguments it is given until its object dies; hand over an id or a weak reference "
        "instead of the tensor"
    )


def last_error(name: str) -> str:
    return (
        f"sys.{name} keeps the frames of the last uncaught error with all their locals (interactive sessions set it); "
        f"del sys.{name} (and sys.last_value), or run traceback.clear_frames(sys.last_traceback)"
    )


def notebook(name: str) -> str:
    return (
        f"a notebook's history ({name}) keeps every displayed result; end the cell's last line with a semicolon, "
        "print a number instead, or run %reset -f out"
    )


def threads(function: str, name: str, count: int) -> str:
    many = (
        f"{count} threads run {function}() and each keeps" if count > 1 else f"a thread in {function}() keeps"
    )
    return f"{many} its {name}; let them end (join them, use a pool of a fixed size), or del {name} before they wait"


def generators(name: str) -> str:
    return (
        f"each suspended generator in {name} keeps its locals alive; exhaust or close() them, and drop them"
    )


def dataset(name: str) -> str:
    return (
        f"the dataset keeps what it has loaded in {name}, which gets a new entry each time; bound it, or cache outside "
        "the dataset (with num_workers > 0 every worker keeps a copy of its own)"
    )


def weak(name: str) -> str:
    return (
        f"a weak dictionary drops an entry only when its key dies, and the keys of {name} live on; a value that "
        "refers to its own key keeps it alive: store what the value needs, not the key"
    )


def graph_bounded(name: str, capacity: int) -> str:
    return (
        f"each entry of {name} keeps its autograd graph, and there is room for {capacity:,}; store detached tensors "
        "(t.detach().cpu()), which is what a buffer of past results needs"
    )


def far_bound(name: str, capacity: int, full: str) -> str:
    return (
        f"{name} has a bound, {capacity:,} entries{full}, that it will not reach in any sensible time or that does not "
        "fit the memory: give it one that does, or clear it"
    )


def attributes(name: str) -> str:
    return (
        f"{name} gets a new attribute each time and loses none; keep one name and overwrite it, or delete the old "
        "ones (delattr) when they have been used"
    )


def queue(name: str) -> str:
    return (
        f"more is put into {name} than is taken out; give it a bound (queue.Queue(maxsize=…)), so that the producer "
        "waits, or take faster"
    )


def own_hook(name: str) -> str:
    return (
        f"the hook refers to the tensor that it is registered on ({name}), a reference cycle: use the gradient that "
        "the hook is given, or capture a weakref or a detached tensor instead"
    )


def callback(call: str) -> str:
    return (
        f"{call} keeps every function that it is given, and what that captures, until the end; register it once, or "
        "capture a number, an id or a weak reference instead of the tensor"
    )


def added_groups() -> str:
    return (
        "add_param_group is called again and again, and the optimizer keeps the parameters of every group and their "
        "state; remove the old groups (optimizer.param_groups, optimizer.state), or make a new optimizer"
    )


_ON_HOST = (
    (", bound it, or keep them on the CPU", ", or bound it"),
    (", or keep it on the CPU", ""),
    (", or keep them on the CPU", ""),
    (", or store a number or a CPU copy", ", or store a number"),
    (", or store a CPU copy", ""),
    (".detach().cpu()", ".detach()"),
    (
        "move the parts to the CPU as they come, or reset",
        "collect the parts in a list that is emptied, or reset",
    ),
    ("detached CPU tensors", "detached tensors"),
    ("or hand over numbers or CPU copies", "or hand over numbers"),
    ("keep a state_dict on the CPU or delete them", "delete them when done"),
)


def on_host(fix: str) -> str:
    """The fix for memory of the host, which is no smaller for a copy on the CPU."""
    for words, instead in _ON_HOST:
        fix = fix.replace(words, instead)
    return fix


def unfinished() -> str:
    return "the search for what holds it ran out of time; look where the line that allocates it hands it on"


def outside() -> str:
    return (
        "no Python object holds it: look for C++ extensions, gradients made with create_graph=True, "
        "tensors shared with other processes, or an active profiler"
    )
