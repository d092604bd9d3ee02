"""Read from the source of a class or function what it takes; nothing is imported for it.

A class, anyone's, declares its arguments by the types of `trainer.config.components`, as in
`dropout: Share = 0.0`. So a mistake is answered before torch is imported, and no list of classes
stands beside them. Arguments are not read in a module that imports none of these types.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal, final, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.config import components
from trainer.config.components import Number, PlainText, Whole

_TYPES = components.__name__
_OBJECTIVE = "trainer.objectives.base.Objective"
_PLAIN: Mapping[str, Any] = {
    **{"bool": bool, "int": Whole, "float": Number, "str": PlainText},
    "dict[str, Any]": dict[str, Any],
}


@final
@dataclass(frozen=True)
class Declared:
    """What a class declares about its arguments."""

    types: Mapping[str, Any]
    flags: Mapping[str, bool]  # class attributes that are true or false
    takes_more: bool = False  # whether it takes further names, as `**others`


@final
@dataclass(frozen=True)
class _Module:
    """The statements of a module that types are found by."""

    name: str
    imports: Mapping[str, str]  # dotted names by what they are called here
    definitions: Mapping[str, ast.stmt]  # classes and functions

    def full_name(self, node: ast.expr) -> str:
        """Give the import path of what a name of this module stands for."""
        name = ast.unparse(node)
        root, dot, rest = name.partition(".")
        return f"{self.imports.get(root, f'{self.name}.{root}')}{dot}{rest}"


@cache
def declared(target: str) -> Declared:
    """Give what a class by its import path declares, its bases included, or a function."""
    module_name, _, name = target.rpartition(".")
    module = _parsed(module_name, _source_of(module_name))
    definition = module.definitions.get(name)
    if definition is None:
        # Its constructor answers for its arguments, once it is imported.
        return Declared({}, {})
    if isinstance(definition, ast.FunctionDef):
        return _of_call(module, definition)
    assert isinstance(definition, ast.ClassDef)
    for each in definition.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return replace(_of_call(module, each), flags=_flags(definition))
    # No constructor of its own: the fields of a dataclass, or a constructor of its bases.
    arguments = list[tuple[str, ast.expr]]()
    for each in definition.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            arguments.append((each.target.id, each.annotation))
    bases = [declared(module.full_name(base)) for base in definition.bases]
    types, flags = _types(module, arguments), _flags(definition)
    for base in bases:
        types, flags = {**base.types, **types}, {**base.flags, **flags}
    return Declared(types, flags, any(base.takes_more for base in bases))


def metrics_of(objective: str) -> Collection[str] | None:
    """Give the metrics that a class of objectives lists itself, beside those that a run asks for.

    None where its source does not tell: it computes metrics of its own, or is a function.
    """
    if objective == _OBJECTIVE:
        return ()
    module_name, _, name = objective.rpartition(".")
    module = _parsed(module_name, _source_of(module_name))
    definition = module.definitions.get(name)
    if not isinstance(definition, ast.ClassDef):
        return None
    for each in definition.body:
        match each:
            case ast.FunctionDef(name="metrics" | "figures"):
                return None
            case ast.Assign(targets=[ast.Name(id="metric_names")], value=value):
                with suppress(ValueError):
                    return tuple(ast.literal_eval(value))
                return None
    return metrics_of(module.full_name(definition.bases[0])) if definition.bases else None


def _of_call(module: _Module, function: ast.FunctionDef) -> Declared:
    """Read the arguments of a function, or of a constructor."""
    names = function.args
    arguments = list[tuple[str, ast.expr]]()
    for each in (*names.posonlyargs, *names.args, *names.kwonlyargs):
        if each.annotation is not None:
            arguments.append((each.arg, each.annotation))
    return Declared(_types(module, arguments), {}, takes_more=names.kwarg is not None)


def _flags(definition: ast.ClassDef) -> dict[str, bool]:
    """Give the attributes of a class that its body sets to true or false."""
    flags = {}
    for each in definition.body:
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=bool() as flag))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=bool() as flag))
            ):
                flags[name] = flag
    return flags


def _types(module: _Module, arguments: Iterable[tuple[str, ast.expr]]) -> dict[str, Any]:
    """Give the types of arguments that are known here; none of a module that imports none."""
    found = dict[str, Any]()
    if any(f"{each}.".startswith(f"{_TYPES}.") for each in module.imports.values()):
        for argument, annotation in arguments:
            with suppress(LookupError):
                found[argument] = _type(module, annotation)
    return found


def _type(module: _Module, node: ast.expr) -> Any:  # noqa: ANN401 - a type, which has no type of its own
    """Read an annotation."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.BinOp(op=ast.BitOr()):
            return reduce(operator.or_, (_type(module, side) for side in (node.left, node.right)))
        case ast.Subscript(value=ast.Name(id="Literal")):
            return Literal[ast.literal_eval(node.slice)]
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *marks])):
            found = _type(module, kind)
            for mark in marks:  # of ours, such as `FREE`; others are not read
                with suppress(LookupError):
                    found = Annotated[found, _type(module, mark)]
            return found
        case ast.Name() | ast.Attribute():
            owner, _, name = module.full_name(node).rpartition(".")
            if owner == _TYPES:
                return vars(components)[name]
    return _PLAIN[ast.unparse(node)]


@cache
def _parsed(name: str, source: bytes) -> _Module:
    """Parse a module; empty where it is not Python, or imports nothing of ours."""
    imports, definitions = dict[str, str](), dict[str, ast.stmt]()
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        # Not into functions: a walk through all takes longer than the rest.
        for block in ast.parse(source).body if b"from trainer." in source else ():
            if isinstance(block, ast.ClassDef | ast.FunctionDef):
                definitions[block.name] = block
            # Types may be imported under `if TYPE_CHECKING:`.
            nodes = block.body if isinstance(block, ast.If) else [block]
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return _Module(name, imports, definitions)


def _source_of(name: str) -> bytes:
    """Read a module's file that an import would find, in the current folder last; empty: none."""
    root, *parts = name.split(".")
    # A name such as `__main__` is a ValueError.
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(root) or PathFinder.find_spec(root, [str(Path.cwd())])
        if spec is None:
            return b""
        files = list[Path]()
        for folder in spec.submodule_search_locations or ():
            place = Path(folder).joinpath(*parts)
            files += [place.with_name(f"{place.name}.py"), place / "__init__.py"]
        # A module of a single file is in no folder of its own.
        if spec.origin and not parts:
            files.append(Path(spec.origin))
        return next(map(Path.read_bytes, filter(Path.is_file, files)), b"")
    return b""


def alternatives(annotation: object) -> Iterator[tuple[str, bool]]:
    """Say in words what a type takes: phrases, each with whether it is typed as it stands."""
    origin, args = get_origin(annotation), get_args(annotation)
    described = [each.description for each in args if isinstance(each, FieldInfo)]
    if described and described[-1]:
        yield described[-1], False
    elif origin is Literal or annotation is bool:
        yield from ((word, True) for word in args or ("true", "false"))
    elif annotation is type(None) or origin in (dict, tuple):
        yield {dict: "a mapping", tuple: "a list"}.get(origin, "null"), False  # type: ignore[arg-type]
    else:
        for part in args:
            yield from alternatives(part)
