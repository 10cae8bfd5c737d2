"""Imports point down, from the command line to the operating system, and in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from compiled import ROOT

# From the bottom up. What has one place here knows nothing of each other.
LAYERS = (
    ("errors", "limits"),
    ("system",),
    ("library", "_native"),
    ("policies", "models"),
    ("cache",),
    ("core",),
    ("writing",),
    ("engine",),
    ("compat", "sessions"),
    ("server",),
    ("batch", "bench"),
    ("",),  # pyh2o itself, which names what users import
    ("cli",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

# Each with its reason.
ALLOWED = {
    # when somebody imports llama_cpp, our library is loaded first
    ("pyh2o.library", "pyh2o._native"),
}


def modules() -> dict[str, str]:
    """The source of each module, by its name."""
    found = {}
    for folder in ("pyh2o", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


MODULES = modules()


def imports(module: str, source: str) -> set[str]:
    """The modules of ours that a module imports when it runs; those for its types are none."""
    package = module if any(name.startswith(f"{module}.") for name in MODULES) else parent(module)
    found = set()
    for node in walk(ast.parse(source)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names = [f"{base}.{name}" for name in names]
        names = [name.replace("pyh2o.cli", "cli", 1) for name in names]
        # a name that is no module is one in a module
        found |= {name if name in MODULES else parent(name) for name in names} & {*MODULES}
    return found - {module}


def walk(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in a module but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from walk(child)


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def layer(module: str) -> str:
    first, *rest = module.split(".")
    return first if first == "cli" else (rest or [""])[0]


GRAPH = {
    module: {name for name in imports(module, source) if (module, name) not in ALLOWED}
    for module, source in MODULES.items()
}


def test_no_module_imports_from_a_layer_above_or_beside() -> None:
    wrong = [
        f"{module} -> {name}"
        for module, names in GRAPH.items()
        for name in names
        if not may_import(layer(module), layer(name))
    ]
    assert not wrong


def may_import(layer: str, other: str) -> bool:
    if {layer, other} == {"library", "_native"}:
        return True
    return layer == other or HEIGHT[other] < HEIGHT[layer]


def test_no_module_imports_itself_through_others() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(GRAPH[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_what_is_allowed_is_needed() -> None:
    assert all(name in imports(module, MODULES[module]) for module, name in ALLOWED)
