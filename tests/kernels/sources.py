"""Finds the code that a test can reach, as definitions at the top of modules: functions, classes, constants.

A definition reaches those that it names, through whatever modules import and re-export them. So `import kernels` alone
reaches nothing, and `kernels.attention` reaches the code that attention uses. Four things are found without a name, by
rules that would rather find too much:

- A module imported under a computed name (`f"kernels.{name}"`) is reached if it defines a function that reached code
  names in a string. So `dispatch.run("attention", ...)` reaches the functions `attention` in the files of its folder.
  The importer may read such files as text: then names in its strings ("RANK") count in all of the files, without
  anything that these reach. Among the families of models, those are reached whose models a test names.
- `"-m", "train.plan"` in a list runs a module, so all of it is reached.
- A test that names its own `__file__` may look up anything in its module except other tests.
- A data file is reached by a string that its path ends with, such as "recorded_tpu.json". In an f-string, the parts
  that are filled in must be strings or modules that are reached.
"""

import ast
import collections
import functools
import hashlib
import itertools
import json
import re
import symtable
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import NamedTuple


DATA = (".json", ".jsonl", ".safetensors", ".html")
TOP = ""  # stands for the statements at the top of a module that define nothing
MAIN = "__main__"  # stands for those of `if __name__ == "__main__"`


class Symbol(NamedTuple):
    """A definition: a name at the top of a module."""

    module: str
    name: str


Chain = tuple[str, ...]  # a name with attributes: ("jnp", "int32")
Pattern = tuple[str, ...]  # the constant parts of an f-string, with any text between them
Target = Symbol | str | None  # the meaning of a name: a definition, a module, or nothing of ours
Imports = dict[str, tuple[str, str | None]]  # a name here -> a module and a name there; None: the module itself


class Definition(NamedTuple):
    """The statements that define a name, and the names and strings in them."""

    code: str  # independent of formatting and comments
    chains: frozenset[Chain]
    imports: Imports
    strings: frozenset[str]
    patterns: frozenset[Pattern]
    computed: frozenset[Pattern]  # names of modules to import
    runs: frozenset[str]  # modules after "-m"


class Module:
    """The definitions and the imports of a file, without docstrings and the annotations of functions."""

    def __init__(self, name: str, path: Path):
        self.name, self.package = name, name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.imports: Imports = {}
        self.stars: list[str] = []  # modules of which all names are imported
        self.statements: dict[str, list[ast.stmt]] = collections.defaultdict(list)
        self._definitions: dict[str, Definition] = {}
        tree = _Plain().visit(ast.parse(path.read_text()))
        self.attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self.strings = {string for node in ast.walk(tree) if (string := _constant(node))}
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = _imported(statement, self.package)
                self.stars += [names.pop("*")[0]] if "*" in names else []
                self.imports |= names
            else:
                for name in self._names(statement):
                    self.statements[name].append(statement)

    def _names(self, statement: ast.stmt) -> set[str]:
        """Returns the names that a statement defines or adds to: f in `f.defvjp(forward, backward)` and `f |= more`."""
        if isinstance(statement, ast.If) and MAIN in ast.unparse(statement.test):
            return {MAIN}
        root = (
            statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
        )
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in self.statements:
            return {root.id}
        acts = isinstance(statement, ast.For | ast.While | ast.With | ast.Try | ast.If)
        return _bound(statement) | {TOP} if acts else _bound(statement) or {TOP}

    def names(self) -> set[str]:
        return self.statements.keys() - {MAIN}

    def functions(self) -> set[str]:
        """Returns the callable names: defined or assigned (`f = functools.partial(...)`), in lower case."""
        kinds = ast.FunctionDef | ast.Assign
        return {name for name, found in self.statements.items() if isinstance(found[0], kinds) and name.islower()}

    def decorators(self, name: str) -> set[str]:
        """Returns the names in the decorators of a definition."""
        trees = [d for s in self.statements[name] if isinstance(s, ast.FunctionDef) for d in s.decorator_list]
        return {getattr(node, "id", getattr(node, "attr", "")) for tree in trees for node in ast.walk(tree)}

    def definition(self, name: str) -> Definition:
        if name not in self._definitions:
            self._definitions[name] = _definition(self.statements.get(name, []), self.package)
        return self._definitions[name]


class Sources:
    """The modules and data files under a folder.

    Args:
        families: maps strings to the modules of the families of the models that they name.
    """

    def __init__(self, root: Path, families: Callable[[Iterable[str]], set[str]] = lambda _: set()):
        self.root, self.families = root, families
        self.paths: dict[str, Path] = {}
        self.data: dict[str, Path] = {}
        for folder in sorted(child for child in root.iterdir() if child.is_dir() and child.name[0] not in "._"):
            for path in sorted(folder.rglob("*")):
                *parts, last = path.relative_to(root).with_suffix("").parts
                if path.suffix == ".py":
                    self.paths[".".join(parts if last == "__init__" else [*parts, last])] = path
                elif path.suffix in DATA:
                    self.data[path.relative_to(root).as_posix()] = path
        self.folders = {name.rpartition(".")[0] for name in self.paths}  # modules even without an __init__.py

    @functools.cache  # noqa: B019 (there is one for a program, or for a test)
    def module(self, name: str) -> Module:
        return Module(name, self.paths[name])

    def lookup(self, module: str, name: str, seen: frozenset[Symbol] = frozenset()) -> Target:
        """Returns the target of a name in a module."""
        here, symbol = self.module(module), Symbol(module, name)
        if symbol in seen:
            return None
        if name in here.statements:
            return symbol
        if name in here.imports:
            return self.imported(*here.imports[name], seen | {symbol})
        found = (self.lookup(star, name, seen | {symbol}) for star in here.stars if star in self.paths)
        submodule = f"{module}.{name}"
        return next((target for target in found if target), submodule if submodule in self.paths else None)

    def imported(self, module: str, name: str | None, seen: frozenset[Symbol] = frozenset()) -> Target:
        """Returns the target of an import."""
        if name is None:
            return module if module in self.paths or module in self.folders else None
        found = self.lookup(module, name, seen) if module in self.paths else None
        return found or (f"{module}.{name}" if f"{module}.{name}" in self.paths else None)

    def reached(self, test: str, without: Iterable[str] = ()) -> "Reached":
        """Returns the code that a test ("tests/test_x.py::test_y") reaches, except modules with one of these words."""
        path, _, name = test.partition("::")
        module = ".".join(PurePath(path).with_suffix("").parts)
        found = Reached(self, without)
        found.add(Symbol(module, name))
        if ("__file__",) in self.module(module).definition(name).chains:
            for other in self.module(module).names():
                if not other.startswith("test_"):
                    found.add(Symbol(module, other))
        for folder in PurePath(path).parents:
            if (conftest := ".".join((*folder.parts, "conftest"))) in self.paths:
                found.add(Symbol(conftest, TOP))
        found.complete()
        return found


class Reached:
    """The definitions and data files that have been reached."""

    def __init__(self, sources: Sources, without: Iterable[str] = ()):
        self.sources, self.without = sources, set(without)
        self.definitions: dict[Symbol, Definition] = {}
        self.targets: dict[Symbol, set[str]] = {}
        self.read: set[Symbol] = set()  # as text
        self.data: set[str] = set()

    def add(self, first: Symbol) -> None:
        """Adds a definition, and all that it reaches by names."""
        waiting = [first]
        while waiting:
            symbol = waiting.pop()
            if symbol in self.definitions:
                continue
            made = self.definitions[symbol] = self.sources.module(symbol.module).definition(symbol.name)
            targets = {target for chain in made.chains if (target := self._target(symbol.module, chain, made.imports))}
            self.targets[symbol] = {".".join(each) if isinstance(each, Symbol) else each for each in targets}
            waiting.append(Symbol(symbol.module, TOP))
            for target in targets:
                waiting += [target] if isinstance(target, Symbol) else self._all_of(target)
            for name in made.runs:
                main = next((m for m in (f"{name}.{MAIN}", name) if m in self.sources.paths), None)
                waiting += [*self._all_of(main), Symbol(main, MAIN)] if main else []

    def _all_of(self, module: str) -> list[Symbol]:
        """Returns all definitions of a module; none for a folder without an __init__.py."""
        return [Symbol(module, n) for n in self.sources.module(module).names()] if module in self.sources.paths else []

    def _target(self, module: str, chain: Chain, imports: Imports) -> Target:
        root, *attributes = chain
        sources = self.sources
        target = sources.imported(*imports[root]) if root in imports else sources.lookup(module, root)
        for attribute in attributes:
            if not isinstance(target, str):
                break
            inner = (
                sources.lookup(target, attribute) if target in sources.paths else sources.imported(target, attribute)
            )
            target = inner or (Symbol(target, TOP) if target in sources.paths else None)  # such as `module.__file__`
        return target

    def complete(self) -> None:
        """Adds the code and data that are found without a name."""
        count = 0
        while count < len(self.definitions):
            count = len(self.definitions)
            computed = {
                (symbol.module, pattern) for symbol, made in self.definitions.items() for pattern in made.computed
            }
            for importer, pattern in sorted(computed):
                if not importer.startswith("tests."):  # those import the test itself
                    self._add_computed(importer, pattern)
        self._add_data()

    def _strings(self, of: Callable[[str], bool]) -> set[str]:
        return {s for symbol, made in self.definitions.items() if of(symbol.module) for s in made.strings}

    def _add_computed(self, importer: str, pattern: Pattern) -> None:
        sources, regex = self.sources, re.compile(r"[\w.]+".join(map(re.escape, pattern)))
        top = f"{importer.split('.')[0]}."
        modules = {m for m in sources.paths if regex.fullmatch(m) and m.startswith(top)} - {importer}
        # A test module names functions of its own; a kernel module passes calls on to other operations.
        own = {importer} | {m for m in modules if m.startswith("tests.")}
        named = self._strings(lambda module: module not in own)
        chosen = {
            m: set() for m in modules & sources.families(self._strings(lambda module: module.startswith("tests.")))
        }
        if not chosen:
            chosen = {m: found for m in modules if (found := sources.module(m).functions() & named)}
            if pattern.count(".") == 1:  # a folder, then a file: of an operation, only functions named like the folder
                chosen = {m: of for m, found in chosen.items() if (of := found & set(m.split(".")))}
            for module, found in chosen.items():  # for all platforms, since the text may select this one
                read = sources.module(importer).strings & sources.module(module).names() - found
                self.read |= {Symbol(module, name) for name in read}
            chosen = {m: found for m, found in chosen.items() if not self.without & set(re.split(r"[._]", m))}
        if not chosen:
            chosen = {m: sources.module(m).names() for m in modules}
        for module, found in chosen.items():
            for name in found | (sources.module(importer).attributes & sources.module(module).names()):
                self.add(Symbol(module, name))

    def _add_data(self) -> None:
        importers = {symbol.module for symbol, each in self.definitions.items() if each.computed}  # these have tables
        known = self._strings(lambda module: module not in importers)
        known |= {part for module in {module for module, _ in self.definitions} for part in module.split(".")}
        asked = {
            (symbol.module.split(".")[0], pattern)
            for symbol, made in self.definitions.items()
            for pattern in made.patterns | {(string,) for string in made.strings}
            if pattern[-1].endswith(DATA)
        }
        for top, pattern in asked:
            regex = re.compile(f"{top}/(?:.+/)?" + "(.+)".join(map(re.escape, pattern)))
            for name in self.sources.data:
                found = regex.fullmatch(name)
                if found and all(PurePath(part).name in known for part in found.groups()):
                    self.data.add(name)

    def files(self) -> list[str]:
        paths = {self.sources.paths[module] for module, _ in self.definitions}
        return sorted({path.relative_to(self.sources.root).as_posix() for path in paths} | self.data)

    def hash(self) -> str:
        """Hashes the code of all definitions with the targets of their names, the text that is read, and the data."""
        lines = [
            f"{'.'.join(symbol)} {made.code} {sorted(self.targets[symbol])}"
            for symbol, made in self.definitions.items()
            if made.code != "[]"
        ]
        lines += [
            f"{'.'.join(symbol)} {self.sources.module(symbol.module).definition(symbol.name).code}"
            for symbol in self.read
        ]
        for name in self.data:
            content = self.sources.data[name].read_bytes()
            if name.endswith(".json"):
                content = json.dumps(json.loads(content), sort_keys=True).encode()
            lines.append(f"{name} {hashlib.sha256(content).hexdigest()}")
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


class _Plain(ast.NodeTransformer):
    """Removes code that changes no compiled program: docstrings, and annotations except those of class fields."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        plain = ast.Assign([node.target], node.value, lineno=0) if node.value else ast.Pass()
        return self.generic_visit(plain)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [each if isinstance(each, ast.AnnAssign) else self.visit(each) for each in node.body]
        return node


def _imported(statement: ast.Import | ast.ImportFrom, package: str) -> Imports:
    """Returns the names that an import binds."""
    if isinstance(statement, ast.Import):
        return {
            a.asname or a.name.split(".")[0]: (a.name if a.asname else a.name.split(".")[0], None)
            for a in statement.names
        }
    module = statement.module or ""
    if statement.level:
        parts = package.split(".")
        module = ".".join([*parts[: len(parts) - statement.level + 1], *([module] if module else [])])
    return {alias.asname or alias.name: (module, alias.name) for alias in statement.names}


def _bound(statement: ast.stmt) -> set[str]:
    """Returns the names that a statement binds, except within its functions and classes."""
    names, waiting = set(), [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= _imported(node, "").keys()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif not isinstance(node, ast.Lambda | ast.comprehension):
            waiting += ast.iter_child_nodes(node)
    return names


def _definition(statements: list[ast.stmt], package: str) -> Definition:
    nodes = [node for statement in statements for node in ast.walk(statement)]
    imports = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= _imported(node, package)
    free = set(imports)
    for statement in statements:
        free |= _free(symtable.symtable(ast.unparse(statement), "", "exec"))
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_"):
            free |= {argument.arg for argument in statement.args.args}  # fixtures
    chains = {chain for statement in statements for chain in _chains(statement) if chain[0] in free}
    patterns = {p for node in nodes if isinstance(node, ast.JoinedStr) for p in [_pattern(node, package)]}
    computed = {
        _pattern(node.args[0], package)
        for node in nodes
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module")
    }
    lists = [node.elts for node in nodes if isinstance(node, ast.List | ast.Tuple)]
    pairs = [(_constant(a), _constant(b)) for each in lists for a, b in itertools.pairwise(each)]
    return Definition(
        code=_code(statements),
        chains=frozenset(chains | {(name,) for name in free if name not in {chain[0] for chain in chains}}),
        imports=imports,
        strings=frozenset(s for node in nodes if (s := _constant(node))),
        patterns=frozenset(patterns),
        computed=frozenset(computed),
        runs=frozenset(b for a, b in pairs if a == "-m" and b),
    )


def _free(table: symtable.SymbolTable) -> set[str]:
    """Returns the names in a statement that refer to its module's globals."""
    names = {
        s.get_name()
        for s in table.get_symbols()
        if (s.is_global() or table.get_type() == "module") and s.is_referenced()
    }
    return names.union(*map(_free, table.get_children()))


def _chains(node: ast.AST) -> Iterator[Chain]:
    attributes, root = [], node
    while isinstance(root, ast.Attribute):
        attributes.append(root.attr)
        root = root.value
    if isinstance(root, ast.Name):
        yield root.id, *reversed(attributes)
    else:
        for child in ast.iter_child_nodes(root):
            yield from _chains(child)


def _pattern(node: ast.expr, package: str) -> Pattern:
    """Returns the constant parts of a string, with `__name__` filled in; ("", "") for any other expression."""
    if not isinstance(node, ast.JoinedStr):
        return (string,) if (string := _constant(node)) else ("", "")
    parts = [""]
    for value in node.values:
        inner = value.value if isinstance(value, ast.FormattedValue) else value
        if isinstance(inner, ast.Name) and inner.id in ("__name__", "__package__"):
            parts[-1] += package
        elif string := _constant(inner):
            parts[-1] += string
        else:
            parts.append("")
    return tuple(parts)


def _constant(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _code(node: object) -> str:
    """Returns a syntax tree as text that is the same for every Python. Docstrings are already replaced by `pass`."""
    if isinstance(node, list):
        return f"[{','.join(_code(each) for each in node if not isinstance(each, ast.Pass))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={_code(value)}"
        for name, value in ast.iter_fields(node)
        if name not in ("ctx", "kind", "type_comment") and value not in (None, [])
    ]
    return f"{type(node).__name__}({','.join(fields)})"
