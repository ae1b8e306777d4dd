"""Compiled tests of a program in which a value's own methods do not decide whether it equals the expected value.

The tests share a process with the program, which may return an object that equals all others. So comparisons in the
tests go through `compared`. It compares numbers, texts and containers of Python's own types by these types alone: no
value of theirs equals, or is less than, an object of another type. The source of this file runs in that process, before
the program, and needs the standard library alone.
"""

import ast
import operator
import types
import warnings
from typing import Any


MARK = "\0compared"  # stands for `compared` in the compiled tests, where the program does not find it by a name
NUMBERS, SEQUENCES = (bool, int, float, complex), (list, tuple)
SETS, VIEWS = (set, frozenset), (type({}.keys()), type({}.values()), type({}.items()))
PLAIN = (*NUMBERS, str, bytes, type(None), *SEQUENCES, *SETS, dict)
# Type -> a function that converts an object of a subclass to the type itself, whatever methods the subclass has.
BASES = {
    int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__, list: list.copy,
    bytes: lambda value: bytes.__add__(value, b""), tuple: lambda value: tuple.__getitem__(value, slice(None)),
    dict: dict.copy,
}  # fmt: skip
OPERATORS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not, "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}  # fmt: skip


def fair(tests: str) -> types.CodeType:
    """Compiles tests, with `compared` in the place of each comparison."""
    tree = ast.fix_missing_locations(_Calls().visit(ast.parse(tests, "tests")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # MARK is a string that is called
        return _filled(compile(tree, "tests", "exec"))


def compared(names: tuple[str, ...], left: Any, *others: Any) -> Any:
    """Evaluates a comparison, or a chain of comparisons. `names` are those of its operators in `ast`."""
    result = True
    for name, right in zip(names, others, strict=True):
        result = _compare(name, _own(left), _own(right))
        if not result:
            return result
        left = right
    return result


def _compare(name: str, a: Any, b: Any) -> Any:
    if name in ("In", "NotIn") and type(b) in (*SEQUENCES, *SETS, dict, *VIEWS):
        return any(_same(a, _own(each)) for each in b) is (name == "In")
    if name in ("Is", "IsNot", "In", "NotIn") or not (_is_plain(a) or _is_plain(b)):
        return OPERATORS[name](a, b)
    if name in ("Eq", "NotEq"):
        return _same(a, b) is (name == "Eq")
    if not (_is_pure(a) and _is_pure(b)):
        raise TypeError(f"{type(a)} and {type(b)} have no order here")
    return OPERATORS[name](a, b)


def _same(a: Any, b: Any) -> bool:
    if not (_is_plain(a) or _is_plain(b)):
        return bool(a == b)
    if type(a) in SEQUENCES and type(a) is type(b):
        return len(a) == len(b) and all(_same(_own(x), _own(y)) for x, y in zip(a, b, strict=True))
    if type(a) is dict and type(b) is dict and all(map(_is_pure, (*a, *b))):
        return a.keys() == b.keys() and all(_same(_own(a[key]), _own(b[key])) for key in a)
    return _is_pure(a) and _is_pure(b) and a == b


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN


def _is_pure(value: Any) -> bool:
    """Whether the value and all values within it are of Python's own types."""
    within = [*value, *value.values()] if type(value) is dict else value if type(value) in (*SEQUENCES, *SETS) else ()
    return _is_plain(value) and all(map(_is_pure, within))


def _own(value: Any) -> Any:
    """Converts a value of a subclass of one of `BASES` to that type, and returns any other value as it is."""
    kind = type(value)
    for base in () if kind in PLAIN else BASES:
        if issubclass(kind, base):
            return BASES[base](value)
    return value


class _Calls(ast.NodeTransformer):
    """A transformer that replaces each comparison by a call of MARK."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        names = ast.Tuple([ast.Constant(type(each).__name__) for each in node.ops], ast.Load())
        return ast.copy_location(ast.Call(ast.Constant(MARK), [names, node.left, *node.comparators], []), node)


def _filled(code: types.CodeType) -> types.CodeType:
    """Returns the code with `compared` in the place of MARK."""
    put = lambda c: _filled(c) if isinstance(c, types.CodeType) else compared if type(c) is str and c == MARK else c
    return code.replace(co_consts=tuple(map(put, code.co_consts)))
