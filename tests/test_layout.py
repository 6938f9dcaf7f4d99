"""The import direction, read from the source without importing it, and the names no file may hold."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"loss", "baselines", "advantage", "reward", "types", "protocol"},
    {"attention", "batch", "packing", "policy", "lora", "shards", "engine", "data", "world", "metrics", "diagnostics",
     "statistics"},
    {"rollout", "evaluation", "agents", "endpoint", "eval_report", "warm_start", "checkpoint", "distributed", "launch",
     "watch", "report"},
    {"assemble", "plan", "train", "evaluate"},
)
# Only the scripts and what they share see the whole Config; it borrows the settings of two modules.
CONFIG_READERS = {"assemble", "plan", "train", "evaluate", "warm_start"}
CONFIG_IMPORTS = {"world", "warm_start"}
MACHINE_NAMES = re.compile(r"/(?:work|root|home|Users)/|[.][.]/shared|[.]library")


def layer_of(module: str) -> int:
    return next(n for n, names in enumerate(LAYERS) if module in names)


def sources() -> dict[str, Path]:
    """Source files by module name: `loss` is sapo/loss.py, `engine.hf` sapo/engine/hf.py, `train` train.py."""
    files = {path.stem: path for path in ROOT.glob("*.py")}
    for path in (ROOT / "sapo").rglob("*.py"):
        files[".".join(path.relative_to(ROOT / "sapo").with_suffix("").parts)] = path
    files.pop("__init__")
    return files


def imports(path: Path, body_only: bool = False) -> Iterator[str]:
    """Yield the full name of every imported module; `body_only` leaves out imports inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if body_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; write `from sapo.x import y`"
            yield node.module or ""
            if node.module == "sapo":
                yield from (f"sapo.{alias.name}" for alias in node.names)


def sapo_imports(path: Path, body_only: bool = False) -> set[str]:
    return {name.removeprefix("sapo.") for name in imports(path, body_only) if name.startswith("sapo.")}


@pytest.mark.parametrize("module", sorted(set(sources()) - {"config"}))
def test_imports_go_down_the_layers(module):
    own = module.split(".")[0]
    for imported in sapo_imports(sources()[module]):
        top = imported.split(".")[0]
        if top == "config":
            assert own in CONFIG_READERS, f"{module} imports the whole Config: pass it what it needs"
        else:
            assert layer_of(top) <= layer_of(own), f"{module} imports {imported}, which is above it"


def test_every_module_has_a_layer():
    modules = {name.split(".")[0] for name in sources()} - {"config"}
    assert modules <= set().union(*LAYERS)


def test_config_imports_only_the_settings_it_borrows():
    assert sapo_imports(ROOT / "sapo/config.py") == CONFIG_IMPORTS


def test_no_import_goes_round_in_a_circle():
    edges = {name: sapo_imports(path, body_only=True) for name, path in sources().items()}

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        for imported in edges.get(module, ()):
            visit(imported, (*above, module))

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("module", sorted({"loss", "baselines", "advantage"} & set(sources())))
def test_the_objective_needs_only_torch(module):
    path = sources()[module]
    foreign = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert foreign <= {"torch", "sapo"} and sapo_imports(path) <= {"loss"}


def test_the_retriever_knows_nothing_of_sapo():
    files = sorted((ROOT / "retriever").rglob("*.py"))
    assert files and not [f"{path}: {name}" for path in files for name in imports(path) if name.split(".")[0] == "sapo"]


def test_no_file_names_a_place_on_one_machine():
    """Only .ci/run may look for data beside the project."""
    kinds = {".py", ".md", ".yaml", ".toml", ".txt", ""}
    made = {"runs", "models", "data", "wandb", "__pycache__"}
    found = []
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT)
        foreign = any(part in made or part.startswith(".") for part in place.parts[:-1])
        if foreign or path.suffix not in kinds or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{place}: {match}" for match in MACHINE_NAMES.findall(text)]
    assert found == []
