"""What objects are called without their ids: by the parameters bound to them.

Ids count objects, so one more object changes the ids of all that follow; labels stay.
"""

from __future__ import annotations

from ninferbuild.artifact.directory import Directory

Label = tuple[str, tuple[str, ...]]
"""What an object is called without its id, and the parameters bound to it."""


def labels_of(directory: Directory) -> dict[str, Label]:
    """Object id → label and bound parameters, in file order.

    A weight is called by its first parameter and how many more it holds; an auxiliary tensor by the uses that refer to
    it; a resource, and what nothing refers to, by its id. Equal names are numbered in file order.
    """
    bound: dict[str, list[tuple[int, str]]] = {}
    for name, binding in directory.bindings.items():
        for part in binding.get("parts") or ({"object": binding["object"], "range": (0, 0)},):
            bound.setdefault(part["object"], []).append((part["range"][0], name))
    served: dict[str, list[tuple[str, str]]] = {}
    for use in directory.uses:
        for role, reference in use.get("auxiliaries", {}).items():
            call = f"{role} of {use['parameter']} × {use['input']}"
            for identifier in dict.fromkeys(part["object"] for part in reference.get("parts", (reference,))):
                served.setdefault(identifier, []).append((call, use["parameter"]))
    labels: dict[str, Label] = {}
    taken: dict[str, int] = {}
    for item in directory.objects:
        # Stable: aliases of one range stay in the order of the bindings.
        parameters = [name for _, name in sorted(bound.get(item.id, ()), key=lambda place: place[0])]
        calls = parameters or [call for call, _ in served.get(item.id, ())] or [item.id]
        names = dict.fromkeys(parameters or [name for _, name in served.get(item.id, ())])
        label = calls[0] + (f" (+{len(calls) - 1})" if len(calls) > 1 else "")
        taken[label] = number = taken.get(label, 0) + 1
        labels[item.id] = (label if number == 1 else f"{label} #{number}", tuple(names))
    return labels
