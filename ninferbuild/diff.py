"""Two artifacts or targets compared object by object.

Objects are matched by what they are for: the parameters bound to them, the uses they belong to, the roles of
resources. Their ids are positions in one artifact and mean nothing in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
import json
from typing import Any, Literal

from ninferbuild import explain
from ninferbuild.artifact.schema import ArtifactObject, Directory, TensorObject, binding_parts
from ninferbuild.resolve import Action
from ninferbuild.sides import Side

Role = tuple[str, ...]
"""What an object is for: ``("parameter", name, first element)``, ``("use", parameter, input, role)``,
``("resource", component, role)``, or ``("object", id)`` for one that nothing refers to."""

Status = Literal["equal", "differs", "unknown"]


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """Two objects that belong together and are not known to be equal.

    Attributes:
        name: what they are for.
        a, b: their ids.
        status: ``unknown`` when only encoding would tell.
        differences: one line each, from A to B.
        explain: between targets, what differs in what their actions depend on.
    """

    name: str
    a: str
    b: str
    status: Status
    differences: tuple[str, ...]
    explain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lone:
    """An object without a counterpart: what it is for, its id, and the parameters bound to it."""

    name: str
    id: str
    parameters: tuple[str, ...]


@dataclass(slots=True)
class Comparison:
    """What two sides have in common and what not.

    Attributes:
        bindings, uses, components, metadata: differences of the directories, one line each, from A to B; without
            the bindings of objects that have no counterpart, and without the uses of parameters that only one side has.
        provenance: the same of where the artifacts came from; does not count as a difference.
        payloads: whether payloads were compared.
    """

    a: Side
    b: Side
    payloads: bool
    same: int = 0
    objects: list[ObjectDifference] = field(default_factory=list)
    only_a: list[Lone] = field(default_factory=list)
    only_b: list[Lone] = field(default_factory=list)
    bindings: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    components: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    provenance: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both hold the same, wherever they came from and however it is spread over files."""
        members = (self.objects, self.only_a, self.only_b, self.bindings, self.uses, self.components, self.metadata)
        return not any(members)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "a": {"name": self.a.name, "kind": self.a.kind},
            "b": {"name": self.b.name, "kind": self.b.kind},
            "equal": self.equal,
            "payloads_compared": self.payloads,
            "equal_objects": self.same,
            "objects": [asdict(item) for item in self.objects],
            "only_a": [asdict(item) for item in self.only_a],
            "only_b": [asdict(item) for item in self.only_b],
            "bindings": self.bindings,
            "uses": self.uses,
            "components": self.components,
            "metadata": self.metadata,
            "provenance": self.provenance,
        }


def compare(a: Side, b: Side, *, payloads: bool = True) -> Comparison:
    """Compare two sides.

    Args:
        payloads: compare digests of payloads, for which artifacts are read whole; otherwise directories alone.

    Raises:
        ArtifactError, OSError: a payload cannot be read.
    """
    found = Comparison(a, b, payloads)
    roles_a, roles_b = roles_of(a.directory), roles_of(b.directory)
    pairs = _pairs(roles_a, roles_b)
    objects_a, objects_b = ({item.id: item for item in side.directory.objects} for side in (a, b))
    for one, other in pairs.items():
        difference = _compare_objects(
            found, _label(roles_a[one]), objects_a[one], objects_b[other], roles_a[one], roles_b[other]
        )
        if difference is None:
            found.same += 1
        else:
            found.objects.append(difference)
    taken = set(pairs.values())
    found.only_a = [_lone(name, roles) for name, roles in roles_a.items() if name not in pairs]
    found.only_b = [_lone(name, roles) for name, roles in roles_b.items() if name not in taken]
    found.bindings = list(_bindings(a.directory, b.directory, pairs))
    found.uses = list(_uses(a.directory, b.directory, pairs))
    found.components = list(_values(_plain(a.directory.components), _plain(b.directory.components), "components"))
    found.metadata = list(_values(a.directory.metadata, b.directory.metadata, "metadata"))
    found.provenance = list(_values(_origin(a, b), _origin(b, a), "provenance"))
    return found


# Matching


def roles_of(directory: Directory) -> dict[str, list[Role]]:
    """Object id → what the object is for, in the order of the directory."""
    by_id = {item.id: item for item in directory.objects}
    roles: dict[str, list[Role]] = {name: [] for name in by_id}
    for parameter, binding in directory.bindings.items():
        element = 0
        for name, begin, end in binding_parts(binding, by_id):
            roles[name].append(("parameter", parameter, str(element)))
            element += end - begin
    for use in directory.uses:
        for role, binding in use.get("auxiliaries", {}).items():
            for name, _, _ in binding_parts(binding, by_id):
                roles[name].append(("use", use["parameter"], use["input"], role))
    for component, record in directory.components.items():
        for role, name in record.get("resources", {}).items():
            roles[name].append(("resource", component, role))
    for name, found in roles.items():
        if not found:
            found.append(("object", name))
    return roles


def _pairs(roles_a: Mapping[str, Sequence[Role]], roles_b: Mapping[str, Sequence[Role]]) -> dict[str, str]:
    """Objects of A → objects of B: those for exactly the same, then those for some of the same."""
    exact = {frozenset(roles): name for name, roles in roles_b.items()}
    pairs = {name: exact[key] for name, roles in roles_a.items() if (key := frozenset(roles)) in exact}
    taken = set(pairs.values())
    holders = {role: name for name, roles in roles_b.items() if name not in taken for role in roles}
    for name, roles in roles_a.items():
        if name in pairs:
            continue
        other = next((holders[role] for role in roles if role in holders and holders[role] not in taken), None)
        if other is not None:
            pairs[name] = other
            taken.add(other)
    return {name: pairs[name] for name in roles_a if name in pairs}


def _label(roles: Sequence[Role]) -> str:
    kind, *words = roles[0]
    if kind == "parameter":
        name, element = words
        first = name if element == "0" else f"{name} from element {element}"
    elif kind == "use":
        first = f"{words[2]} of {words[0]} × {words[1]}"
    else:
        first = " ".join((kind, *words))
    return first + (f" (+{len(roles) - 1})" if len(roles) > 1 else "")


def _lone(name: str, roles: Sequence[Role]) -> Lone:
    parameters = dict.fromkeys(role[1] for role in roles if role[0] == "parameter")
    return Lone(_label(roles), name, tuple(parameters))


# Objects


def _compare_objects(
    found: Comparison,
    label: str,
    one: ArtifactObject,
    other: ArtifactObject,
    roles: Sequence[Role],
    other_roles: Sequence[Role],
) -> ObjectDifference | None:
    lines = list(_of_roles(roles, other_roles))
    before, after = _storage(one), _storage(other)
    lines += [
        explain.change(name, before.get(name), after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    reasons, same_action = _reasons(found.a, found.b, one.id, other.id)
    status: Status = "differs" if lines else "equal"
    if found.payloads and status == "equal":
        first, second = found.a.digest(one.id), found.b.digest(other.id)
        if first is not None and second is not None:
            if first != second:
                status = "differs"
                lines.append("payload differs")
            elif not reasons:
                return None
            else:  # another way to the same bytes
                reasons = []
        elif not same_action:
            status = "unknown"
            missing = " and ".join(
                side.name for side, digest in ((found.a, first), (found.b, second)) if digest is None
            )
            lines.append(f"payload not known: not built yet from the sources of {missing}")
    if status == "equal":
        return None
    return ObjectDifference(
        label, one.id, other.id, status, tuple(lines), tuple(line for line in reasons if line not in lines)
    )


def _of_roles(one: Sequence[Role], other: Sequence[Role]) -> Iterator[str]:
    mine, theirs = set(one), set(other)
    if mine != theirs:
        for side, ours, others in (("A", one, theirs), ("B", other, mine)):
            extra = [_label([role]) for role in ours if role not in others]
            if extra:
                yield f"only in {side} it also holds: {explain.listed(extra)}"


def _storage(item: ArtifactObject) -> dict[str, str]:
    if not isinstance(item, TensorObject):
        return {"encoding": item.encoding, "bytes": str(item.bytes)}
    return {
        "format": item.format,
        "layout": item.layout,
        "shape": str(list(item.shape)),
        "divisors": str(item.divisors),
        "bytes": str(item.bytes),
    }


def _reasons(a: Side, b: Side, one: str, other: str) -> tuple[list[str], bool]:
    """How the actions behind two objects of targets differ, and whether they are the same action."""
    if one not in a.actions or other not in b.actions:
        return [], False
    (first, _), (second, names) = a.actions[one], b.actions[other]
    old, new = _manifests(first, second)
    lines = explain.changes(old, new, names)
    return lines, not lines and not first.uncacheable and not second.uncacheable


def _manifests(first: Action, second: Action) -> tuple[str, str]:
    """The manifests of two actions. Equal regions of the same files are equal also where nobody has hashed them."""
    slots = {slot.line: index for index, slot in enumerate(second.template.slots)}
    old, new = list(first.digests), list(second.digests)
    for index, slot in enumerate(first.template.slots):
        other = slots.get(slot.line)
        if other is None or (old[index] is not None and new[other] is not None):
            continue
        key = first.memo_keys[index]
        if key is not None and key == second.memo_keys[other]:
            old[index] = new[other] = key
        else:  # a digest on one side only says "not hashed yet", whichever of the two is missing
            old[index], new[other] = old[index] or bytes(16), None
    return first.template.fill_known(old), second.template.fill_known(new)


# Directories


def _bindings(a: Directory, b: Directory, pairs: Mapping[str, str]) -> Iterator[str]:
    by_a, by_b = ({item.id: item for item in side.objects} for side in (a, b))
    taken = set(pairs.values())
    for name in dict.fromkeys([*a.bindings, *b.bindings]):
        if name not in b.bindings:
            if any(part in pairs for part, _, _ in binding_parts(a.bindings[name], by_a)):
                yield f"only in A: {name}"
        elif name not in a.bindings:
            if any(part in taken for part, _, _ in binding_parts(b.bindings[name], by_b)):
                yield f"only in B: {name}"
        else:
            one = [(pairs.get(part), begin, end) for part, begin, end in binding_parts(a.bindings[name], by_a)]
            other = [(part, begin, end) for part, begin, end in binding_parts(b.bindings[name], by_b)]
            if one != other:
                yield f"stored elsewhere: {name}"


def _uses(a: Directory, b: Directory, pairs: Mapping[str, str]) -> Iterator[str]:
    ours, theirs = ({(use["parameter"], use["input"]): use for use in side.uses} for side in (a, b))
    by_a, by_b = ({item.id: item for item in side.objects} for side in (a, b))
    for key in dict.fromkeys([*ours, *theirs]):
        if key[0] not in a.bindings or key[0] not in b.bindings:
            continue
        name = f"{key[0]} × {key[1]}"
        if key not in theirs:
            yield f"only in A: {name}"
            continue
        if key not in ours:
            yield f"only in B: {name}"
            continue
        one, other = ours[key], theirs[key]
        policies = one.get("activation_policy"), other.get("activation_policy")
        if policies[0] != policies[1]:
            yield explain.change(f"activation policy of {name}", *policies)
        first, second = one.get("auxiliaries", {}), other.get("auxiliaries", {})
        for role in dict.fromkeys([*first, *second]):
            if role not in second:
                yield f"only in A: {role} of {name}"
            elif role not in first:
                yield f"only in B: {role} of {name}"
            elif [(pairs.get(part), *extent) for part, *extent in binding_parts(first[role], by_a)] != [
                (part, *extent) for part, *extent in binding_parts(second[role], by_b)
            ]:
                yield f"another object: {role} of {name}"


def _origin(side: Side, other: Side) -> dict[str, Any]:
    """The provenance of a side, but for the digests that a target has only once it is built."""
    settled = "target" not in (side.kind, other.kind)
    members = side.directory.provenance.items()
    return {key: value for key, value in members if settled or key not in ("payload", "sources")}


def _plain(components: Mapping[str, Any]) -> dict[str, Any]:
    """Components without the ids of their resources, which are compared as objects."""
    return {
        name: {key: value for key, value in record.items() if key != "resources"} for name, record in components.items()
    }


def _values(one: object, other: object, path: str) -> Iterator[str]:
    """Differences of two JSON values by member."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            if key not in other or key not in one:
                yield f"only in {'A' if key in one else 'B'}: {path}.{key}"
            else:
                yield from _values(one[key], other[key], f"{path}.{key}")
    elif json.dumps(one) != json.dumps(other):
        yield explain.change(path, *(json.dumps(value, ensure_ascii=False) for value in (one, other)))
