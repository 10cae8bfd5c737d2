"""Imports point down, from the command line to the operating system, without circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from compiled import ROOT

# From the bottom up. Packages in the same row must not import each other.
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
    ("",),  # pyh2o itself, which exports the public names
    ("cli",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

# Exceptions, each with its reason.
ALLOWED = {
    # if a program imports llama_cpp, our library must be loaded first
    ("pyh2o.library", "pyh2o._native"),
}


def modules() -> dict[str, str]:
    """Return the source of each module by its name."""
    found = {}
    for folder in ("pyh2o", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


MODULES = modules()


def imports(module: str, source: str) -> set[str]:
    """Return our modules that a module imports."""
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
        # a name that is not a module is defined in one
        found |= {name if name in MODULES else parent(name) for name in names} & {*MODULES}
    return found - {module}


def walk(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return all imports of a module, including those for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
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


def test_modules_import_only_from_lower_layers() -> None:
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


def test_modules_do_not_import_each_other_in_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(GRAPH[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


def test_every_exception_is_needed() -> None:
    assert all(name in imports(module, MODULES[module]) for module, name in ALLOWED)
