"""Source files as flat lists of statements that know where they stand.

Must not know: what is looked for.
Invariant: a file that cannot be read or parsed is an empty list; a file is parsed once a search.
"""

import ast
import linecache
import warnings
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Tuple

_COMPOUND = tuple(
    getattr(ast, name)
    for name in ("For", "AsyncFor", "While", "If", "With", "AsyncWith", "Try", "TryStar", "Match")
    if hasattr(ast, name)
)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


class Statement(NamedTuple):
    """A statement with what encloses it, the outermost first."""

    node: Any
    function: Any  # the innermost enclosing def or lambda-free scope, None at module level
    cls: Optional[str]  # the class whose method encloses it
    loops: Tuple[Any, ...]  # enclosing loops within the function
    tests: Tuple[Any, ...]  # enclosing if/while statements within the function
    handlers: Tuple[Any, ...]  # enclosing except clauses within the function

    @property
    def line(self) -> int:
        return int(self.node.lineno)


def _parsed(source: str, name: str) -> Any:
    """The tree of a file, silently: of invalid escapes the user was warned, or did not want to be, when Python
    compiled it. The filter goes in and out by hand: `catch_warnings` would make Python forget which warnings
    of the job it has shown."""
    silence = ("ignore", None, Warning, None, 0)
    warnings.filters.insert(0, silence)  # type: ignore[attr-defined]
    try:
        return ast.parse(source, name)
    finally:
        warnings.filters.remove(silence)  # type: ignore[attr-defined]


class File:
    """One parsed source file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = linecache.getlines(name)
        self.statements: List[Statement] = []
        self.functions: List[Tuple[Any, Optional[str]]] = []  # def, class
        self.classes: Dict[str, Any] = {}
        self.bound: Optional[Dict[str, List[Any]]] = None  # what names are bound to, once somebody asked
        try:
            tree = _parsed("".join(self.lines), name)
        except (SyntaxError, ValueError, RecursionError):
            return
        try:
            self._take(tree.body, None, None, (), (), ())
        except RecursionError:
            pass

    def code(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def function_at(self, name: str, first_line: int) -> Any:
        """The def that a code object came from: its first line is that of its first decorator."""
        for node, _ in self.functions:
            first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
            if node.name == name and (first <= first_line <= node.lineno or not first_line):
                return node
        return None

    def _take(
        self, body: List[Any], function: Any, cls: Optional[str], loops: Any, tests: Any, handlers: Any
    ) -> None:
        for node in body:
            if isinstance(node, Functions):
                self.functions.append((node, cls))
                self.statements.append(Statement(node, function, cls, loops, tests, handlers))
                self._take(node.body, node, cls, (), (), ())
                continue
            if isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
                self._take(node.body, function, node.name, (), (), ())
                continue
            if isinstance(node, ast.ExceptHandler):
                self._take(node.body, function, cls, loops, tests, (*handlers, node))
                continue
            self.statements.append(Statement(node, function, cls, loops, tests, handlers))
            inner_loops = (*loops, node) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else loops
            inner_tests = (*tests, node) if isinstance(node, (ast.If, ast.While)) else tests
            for part in _BODIES:
                inner = getattr(node, part, None)
                if isinstance(inner, list) and inner and isinstance(inner[0], (ast.stmt, ast.ExceptHandler)):
                    # The else branch of a loop runs once, after it.
                    after = part == "orelse" and inner_loops is not loops
                    self._take(
                        inner,
                        function,
                        cls,
                        loops if after else inner_loops,
                        tests if after else inner_tests,
                        handlers,
                    )
                elif part == "cases" and isinstance(inner, list):
                    for case in inner:
                        self._take(case.body, function, cls, inner_loops, inner_tests, handlers)


def expressions(node: Any) -> Tuple[Any, ...]:
    """The expressions of a statement itself, not those of the statements inside it; kept with the statement."""
    parts = getattr(node, "_parts", None)
    if parts is None:
        parts = node._parts = tuple(_expressions(node))
    return parts


def words(node: Any) -> FrozenSet[str]:
    """The names and attributes in the expressions of a statement itself; kept with the statement."""
    found = getattr(node, "_words", None)
    if found is None:
        found = node._words = frozenset(
            [
                part.id if type(part) is ast.Name else part.attr
                for part in expressions(node)
                if type(part) is ast.Name or type(part) is ast.Attribute
            ]
        )
    return found


def _expressions(node: Any) -> Iterator[Any]:
    if isinstance(node, Functions):
        for decorator in node.decorator_list:
            yield from _walk(decorator)
        return
    for field, value in ast.iter_fields(node):
        if field in _BODIES and isinstance(node, _COMPOUND):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _walk(item)


def _walk(node: Any) -> List[Any]:
    """What ast.walk gives, in its order, but for the contexts (load, store), and faster."""
    found = [node]
    for each in found:
        for field in each._fields:
            value = getattr(each, field, None)
            if isinstance(value, list):
                found.extend([item for item in value if isinstance(item, ast.AST)])
            elif isinstance(value, ast.AST) and field != "ctx":
                found.append(value)
    return found


class Files:
    """The files of one search. `users`: the user's source files, the main script first."""

    def __init__(self, users: List[str]) -> None:
        self.users = users
        self._files: Dict[str, File] = {}

    def get(self, name: str) -> File:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = File(name)
        return found


def last_name(node: Any) -> str:
    """The name that a thing goes by, without what it is an attribute of; "" if it has none."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def text(node: Any) -> str:
    """A node as source text."""
    try:
        return ast.unparse(node)
    except Exception:
        return ""
