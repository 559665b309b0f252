"""What a code object does and what it refers to, independent of where it stands in its file.

User modules are compiled from their source text when they are loaded (:mod:`ninferbuild.user_modules`), so the code
object *is* the source text without comments, positions and formatting, and it is what will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import dis
import inspect
from types import CodeType

_SKIPPED = frozenset({"NOP", "CACHE", "EXTENDED_ARG"})
"""Instructions that carry line numbers or room, no behaviour."""

_POSITIONAL = frozenset({"__doc__", "__firstlineno__", "__qualname__", "__static_attributes__"})
"""Names that a class body sets to where and how it is written; the last one in an order that varies."""

_KEPT_FLAGS = (
    inspect.CO_OPTIMIZED
    | inspect.CO_NEWLOCALS
    | inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


@dataclass(frozen=True, slots=True)
class Call:
    """How an object that was just loaded is called; ``keywords`` names the last of its arguments."""

    arguments: int
    keywords: tuple[str, ...] = ()
    only_none: bool = False  # called with nothing, or with a single None


@dataclass(frozen=True, slots=True)
class Reference:
    """One use of a name.

    Attributes:
        kind: ``global``; ``free``: a variable of an enclosing function; ``import``: a module.
        name: the variable, or the full name of the module.
        level: for imports: leading dots.
        chain: attributes taken from it right away: ``os.path.join`` → ``("path", "join")``.
        call: how the end of the chain is called, when it is called right away with arguments that are simple to follow.
        binds: for imports: nothing but the import itself; what is done with the variable are references of their own.
        stores: whether the use assigns or deletes the variable or an attribute at the end of ``chain``.
    """

    kind: str
    name: str
    level: int = 0
    chain: tuple[str, ...] = ()
    call: Call | None = None
    binds: bool = False
    stores: bool = False


@dataclass(frozen=True, slots=True)
class _Import:
    name: str
    level: int
    chain: tuple[str, ...] = ()


def nested(code: CodeType) -> Iterator[CodeType]:
    """``code`` and all code objects in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def attribute_names(code: CodeType) -> frozenset[str]:
    """Every attribute that ``code`` or code in it reads, from whatever object."""
    names: set[str] = set()
    for inner in nested(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                names.add(str(instruction.argval))
    return frozenset(names)


def code_text(code: CodeType, constant_text: Callable[[object], str]) -> str:
    """The behaviour of ``code`` as text; equal for code that differs in comments, docstrings and positions only.

    Args:
        constant_text: text of a constant other than code.
    """
    instructions = [item for item in dis.get_instructions(code) if item.opname not in _SKIPPED]
    index_of: dict[int, int] = {}
    position = 0
    for item in dis.get_instructions(code):
        index_of[item.offset] = position
        position += item.opname not in _SKIPPED
    arguments = code.co_argcount + code.co_kwonlyargcount
    arguments += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    lines = [
        f"code {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags & _KEPT_FLAGS}",
        f"arguments {' '.join(code.co_varnames[:arguments])}",
    ]
    for number, item in enumerate(instructions):
        if item.opname == "KW_NAMES":  # an index into the constants that Python 3.11 does not look up
            argument = constant_text(code.co_consts[item.arg or 0])
        elif item.opcode in dis.hasconst:
            following = instructions[number + 1] if number + 1 < len(instructions) else None
            if following is not None and following.opname == "STORE_NAME" and following.argval in _POSITIONAL:
                argument = "position"
            elif isinstance(item.argval, CodeType):
                argument = "(" + code_text(item.argval, constant_text) + ")"
            else:
                argument = constant_text(item.argval)
        elif item.opcode in dis.hasjrel or item.opcode in dis.hasjabs:
            argument = f"to {index_of.get(item.argval, item.argval)}"
        elif item.opcode in dis.hasname or item.opcode in dis.haslocal or item.opcode in dis.hasfree:
            # The raw argument as well: its low bits can say how the name is used.
            argument = f"{item.argval} {_flags_of(item)}"
        else:
            argument = "" if item.arg is None else str(item.arg)
        lines.append(f"{item.opname} {argument}")
    for entry in getattr(dis.Bytecode(code), "exception_entries"):  # noqa: B009 (newer than the type stubs)
        begin, end, target = (index_of.get(offset, position) for offset in (entry.start, entry.end, entry.target))
        lines.append(f"except {begin} {end} {target} {entry.depth} {entry.lasti}")
    return "\n".join(lines)


def _flags_of(item: dis.Instruction) -> str:
    """What the argument says beyond the name: ``NULL`` for calls, a comparison for super()."""
    return item.argrepr.replace(str(item.argval), "") if isinstance(item.argval, str) else item.argrepr


def references(code: CodeType) -> list[Reference]:
    """Every use of a global, of a variable of an enclosing function and of a module, in ``code`` and code in it."""
    return list(_references(code, frozenset(code.co_freevars), {}))


def _references(code: CodeType, free: frozenset[str], outer: dict[str, _Import]) -> Iterator[Reference]:
    """``free``: variables of functions around the outermost code; ``outer``: imports into variables seen in here."""
    instructions = [item for item in dis.get_instructions(code) if item.opname not in _SKIPPED]
    followed = _imported_variables(code, instructions)
    modules = {**outer, **followed}
    inner_free = free & frozenset(code.co_freevars)
    for index, item in enumerate(instructions):
        name = item.argval
        match item.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                yield _follow(code, instructions, index, Reference("global", name))
            case "STORE_GLOBAL" | "DELETE_GLOBAL":
                yield Reference("global", name, stores=True)
            case "IMPORT_NAME":
                yield from _import(instructions, index, followed)
            case "STORE_DEREF" | "DELETE_DEREF" if name in inner_free:
                yield Reference("free", name, stores=True)
            case "LOAD_DEREF" | "LOAD_CLASSDEREF" | "LOAD_FROM_DICT_OR_DEREF" if name in inner_free:
                yield _follow(code, instructions, index, Reference("free", name))
            case opname if opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")):
                if opname == "LOAD_FAST" and name in code.co_cellvars:
                    continue  # the cell itself, on its way into a closure
                names = name if isinstance(name, tuple) else (name,)
                for position, variable in enumerate(names):
                    if variable in modules and not (opname == "STORE_FAST_LOAD_FAST" and position == 0):
                        found = modules[variable]
                        reference = Reference("import", found.name, found.level, found.chain)
                        last = position == len(names) - 1
                        yield _follow(code, instructions, index, reference) if last else reference
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            visible = {name: found for name, found in modules.items() if name in constant.co_freevars}
            yield from _references(constant, inner_free, visible)


def _imported_variables(code: CodeType, instructions: list[dis.Instruction]) -> dict[str, _Import]:
    """Local variables that hold a module, or what was imported from one, and are never set otherwise."""
    found: dict[str, _Import] = {}
    stores: dict[str, int] = {}
    imported: _Import | None = None  # the module of the import statement that is under way
    value: _Import | None = None  # what the next store stores
    names: tuple[str, ...] = ()
    for index, item in enumerate(instructions):
        opname = item.opname
        if opname == "IMPORT_NAME":
            level, names = _import_arguments(instructions, index)
            imported = _Import(item.argval, level)
            value = imported if names else _Import(item.argval.partition(".")[0], level)
        elif opname == "IMPORT_FROM" and imported is not None:
            # `import a.b.c as d` fetches b and then c without names: the variable holds a.b.c itself.
            value = _Import(imported.name, imported.level, (item.argval,)) if names else imported
        elif opname in ("STORE_FAST", "STORE_DEREF"):
            stores[item.argval] = stores.get(item.argval, 0) + 1
            if value is not None:
                found[item.argval] = value
                value = None
        elif opname.startswith("STORE_FAST"):  # two variables at once: not worth following
            for variable in item.argval:
                stores[variable] = stores.get(variable, 0) + 2
        elif opname not in ("SWAP", "POP_TOP"):
            imported = value = None
    return {name: value for name, value in found.items() if stores[name] == 1 and name not in code.co_freevars}


def _import_arguments(instructions: list[dis.Instruction], index: int) -> tuple[int, tuple[str, ...]]:
    """The leading dots and the names of ``from`` of the IMPORT_NAME at ``index``."""
    level, names = instructions[index - 2].argval, instructions[index - 1].argval
    return (level if isinstance(level, int) else 0), (names if isinstance(names, tuple) else ())


def _import(instructions: list[dis.Instruction], index: int, followed: dict[str, _Import]) -> Iterator[Reference]:
    module = instructions[index].argval
    level, names = _import_arguments(instructions, index)
    if names:
        for name in names:
            binds = _Import(module, level, (name,)) in followed.values()
            yield Reference("import", module, level, (name,), binds=binds)
        return
    bound = {_Import(module, level), _Import(module.partition(".")[0], level)}
    yield Reference("import", module, level, binds=not bound.isdisjoint(followed.values()))


def _follow(code: CodeType, instructions: list[dis.Instruction], index: int, reference: Reference) -> Reference:
    """Extend ``reference`` by the attributes and the call that follow the instruction at ``index``."""
    chain = list(reference.chain)
    index += 1
    while index < len(instructions) and instructions[index].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        chain.append(instructions[index].argval)
        index += 1
    stores = False
    if index < len(instructions) and instructions[index].opname in ("STORE_ATTR", "DELETE_ATTR"):
        chain.append(instructions[index].argval)
        stores = True
    call = None if stores else _call(code, instructions, index)
    return Reference(reference.kind, reference.name, reference.level, tuple(chain), call, stores=stores)


def _call(code: CodeType, instructions: list[dis.Instruction], index: int) -> Call | None:
    """The call that consumes the callable on top of the stack before ``index``, if the way there is straight."""
    if index < len(instructions) and instructions[index].opname == "PUSH_NULL":
        index += 1
    first = index
    depth = 0
    keywords: tuple[str, ...] = ()
    while index < len(instructions):
        item = instructions[index]
        if item.opname == "KW_NAMES":
            keywords = code.co_consts[item.arg or 0]
        elif item.opname in ("CALL", "PRECALL") and depth == (item.arg or 0):
            only_none = depth == 0 or (depth == 1 and instructions[first].argval is None and index == first + 1)
            return Call(depth, keywords, only_none)
        elif item.opname == "CALL_KW" and depth == (item.arg or 0) + 1:
            names = instructions[index - 1].argval
            return Call(depth - 1, names if isinstance(names, tuple) else ())
        if item.opcode in dis.hasjrel or item.opcode in dis.hasjabs or item.opname.startswith("RETURN"):
            return None
        depth += dis.stack_effect(item.opcode, item.arg, jump=False)
        if depth < 0:
            return None
        index += 1
    return None
