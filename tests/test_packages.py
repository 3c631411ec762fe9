"""The structure of src/postlude: imports follow the package order, and the core needs only torch."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import postlude

ROOT = Path(postlude.__file__).parent
PACKAGES = (
    "version",
    "json_log",
    "error_output",
    "user_code",
    "checks",
    "options",
    "layout",
    "optimizer",
    "head",
    "lora",
    "router_losses",
    "option_types",
    "training_options",
    "durable_files",
    "prometheus",
    "pool",
    "world",
    "safetensors_file",
    "sharded_tensors",
    "trace",
    "ops",
    "integrations",
    "data",
    "model",
    "hf",
    "pipeline",
    "plan",
    "objectives",
    "engine",
    "generate",
    "serving",
    "rollout",
    "recipes",
    "verify",
    "cluster",
    "tinker",
    "jobs",
    "commands",
    "cli",
)
MAY_IMPORT = {"integrations": {"ops"}}  # a package that may import only these
TORCH_ONLY = (
    "error_output",
    "user_code",
    "checks",
    "options",
    "layout",
    "optimizer",
    "head",
    "lora",
    "router_losses",
    "world",
    "trace",
    "ops",
    "model",
    "pipeline",
)
OUTSIDE = {"torch", "triton", "numpy", "cloudpickle"}
RL_WORDS = ("reward", "advantage", "policy", "rollout", "grpo", "ppo", "dpo", "reinforce", "rlhf")


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first in ("__init__", "__main__") else first


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
    return names


def test_imports_follow_the_package_order() -> None:
    mistakes = []
    for path in modules():
        package, used = package_of(path), imports(path)
        if not package:
            continue  # postlude/__init__.py re-exports the public names
        assert package in PACKAGES, f"{package} is not in PACKAGES; add it there and to docs/architecture.md"
        allowed = MAY_IMPORT.get(package, set(PACKAGES[: PACKAGES.index(package)])) | {package}
        below = {name.split(".")[1] for name in used if name.startswith("postlude.")} - allowed
        if below:
            mistakes.append(f"{path.relative_to(ROOT)} in {package} imports {sorted(below)}")
        if "postlude" in used:
            mistakes.append(
                f"{path.relative_to(ROOT)} imports postlude itself; import the module that defines the name"
            )
    assert not mistakes


LAZY = {"__init__.py", "data/__init__.py"}  # import a public name when it is first used; type checkers see an import


def test_our_modules_are_imported_by_statements() -> None:
    """`import_module("postlude.…")` hides an import from mypy and readers."""
    mistakes = []
    for path in modules():
        name = str(path.relative_to(ROOT))
        calls = [ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Call)]
        dynamic = [text for text in calls if re.match(r".*import_module\(.*(postlude|__name__|_HOME)", text)]
        if bool(dynamic) != (name in LAZY):
            mistakes.append((name, dynamic))
    assert not mistakes


def test_docstrings_name_files_that_exist() -> None:
    files = {path.name for path in modules()} | {"x.py", "x_device.py", "file.py"}  # `x` stands for any
    mistakes = []
    for path in modules():
        documented = [node for node in nodes(path) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        text = "\n".join(ast.get_docstring(node) or "" for node in documented)
        missing = set(re.findall(r"`(?:[\w/]*/)?(\w+\.py)`", text)) - files
        mistakes += [(str(path.relative_to(ROOT)), name) for name in missing]
    assert not mistakes


def names_of_types(path: Path) -> list[str]:
    """Returns the public classes of a file, and the types that it names at its top level: `Name = type`."""
    names = [node.name for node in nodes(path) if isinstance(node, ast.ClassDef)]
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name[0].isupper() and not name.isupper()]


def test_public_type_names_are_unique() -> None:
    defined: dict[str, list[str]] = {}
    for path in modules():
        for name in names_of_types(path):
            defined.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(defined) > 500
    assert not {name: files for name, files in defined.items() if len(files) > 1}


LONGEST_FILE = 500  # lines


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE}, "split it by what it does"


def name_of(path: Path) -> str:
    return ".".join(("postlude", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def files_imported(path: Path, known: set[str]) -> set[str]:
    """Returns the modules of postlude that a file imports, by dotted name, including those imported for types only."""
    froms = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    pairs = [(str(node.module), f"{node.module}.{alias.name}") for node in froms for alias in node.names]
    return {inner if inner in known else outer for outer, inner in pairs} & known


def test_there_is_no_import_cycle() -> None:
    """Imports for type checking alone count too."""
    paths = {name_of(path): path for path in modules()}
    needed = {name: files_imported(path, set(paths)) for name, path in paths.items()}
    size = 0
    while size != len(needed):  # leave out files without imports and files that nothing imports
        size = len(needed)
        reached = set().union(*needed.values())
        needed = {
            name: needs & needed.keys() for name, needs in needed.items() if needs & needed.keys() and name in reached
        }
    assert not needed, f"these files import each other: {needed}"


def test_core_imports_only_torch() -> None:
    import sys

    known = {*sys.stdlib_module_names, *OUTSIDE, "postlude"}
    core = [path for path in modules() if package_of(path) in TORCH_ONLY]
    assert {package_of(path) for path in core} == set(TORCH_ONLY)
    others = {str(path.relative_to(ROOT)): {name.split(".")[0] for name in imports(path)} - known for path in core}
    assert not {name: outside for name, outside in others.items() if outside}


def test_model_package_does_not_mention_reinforcement_learning() -> None:
    texts = {path.name: path.read_text().lower() for path in modules() if package_of(path) == "model"}
    assert texts
    assert not [(name, word) for name, text in texts.items() for word in RL_WORDS if re.search(rf"\b{word}", text)]


def test_no_patched_forwards_and_no_globals() -> None:
    mistakes = []
    for path in modules():
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Global):
                mistakes.append(f"{path.relative_to(ROOT)}:{node.lineno} has a global")
            if "forward" in [target.attr for target in targets if isinstance(target, ast.Attribute)]:
                mistakes.append(f"{path.relative_to(ROOT)}:{node.lineno} rebinds a forward")
    assert not mistakes


# Each says why torch has no public name for what it needs.
PRIVATE = {"ops/attention.py", "ops/foreach.py", "ops/segment_attention.py"}


def private_names_of_torch(path: Path) -> set[str]:
    """Returns the private torch names that a file uses, such as `torch._foreach_norm`."""
    private = [node for node in nodes(path) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    named = {name for name in map(ast.unparse, private) if name.startswith("torch.")} | imports(path)
    return {name for name in named if re.search(r"^torch\b.*\._[a-z]", name)}


def test_each_private_torch_name_is_used_in_one_file() -> None:
    by_file = {str(path.relative_to(ROOT)): private_names_of_torch(path) for path in modules()}
    used = {name: sorted(names) for name, names in by_file.items() if names}
    assert used.keys() == PRIVATE, used


TORCH_ALONE = """
import sys
for name in ("transformers", "tokenizers", "safetensors", "numpy", "rich", "yaml"):
    sys.modules[name] = None  # importing it now fails
import torch
from postlude import linear_logprobs, linear_objective
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
linear_logprobs(hidden, weight, torch.tensor([0, 4, -100]), entropy=True).logprob.sum().backward()
assert hidden.grad.abs().sum() > 0
"""


@pytest.mark.slow
def test_fused_head_imports_only_torch() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH_ALONE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_postlude_exports_every_public_name() -> None:
    for name in postlude.__all__:
        assert getattr(postlude, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'grpo'"):
        _ = postlude.grpo


def public_names() -> Iterator[tuple[str, Any]]:
    """Yields classes and functions that packages name in `__all__`, with the public methods of these classes."""
    for path in (path for path in modules() if path.name == "__init__.py" and "__all__" in path.read_text()):
        package = importlib.import_module(".".join(("postlude", *path.parent.relative_to(ROOT).parts)))
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{package.__name__}.{name}", value
            for method, member in vars(value).items() if inspect.isclass(value) else ():
                if not method.startswith("_") and isinstance(member, FunctionType | property | classmethod):
                    yield f"{package.__name__}.{name}.{method}", member


def test_public_names_have_docstrings() -> None:
    """Elsewhere a docstring is there if it says more than the name and the types do."""
    documented = {name: value.__doc__ or "" for name, value in public_names()}
    assert len(documented) > 150
    generated = tuple(f"{name.rsplit('.')[-1]}(" for name in documented)  # what a dataclass has without a docstring
    assert not [name for name, text in documented.items() if not text or text.startswith(generated)]
