"""Every call that the documentation writes can be made: its names exist and take these arguments.

That is of calls in prose, such as `engine.save(directory)`, and in blocks that tests/test_docs.py does not run.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from postlude import linear_logprobs
from postlude.ops.linear_logprobs import LogitConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Calls of what users or other packages define.
OF_OTHERS = {
    *("output_processor", "processor", "on_step", "checks", "model", "model.base_model.compile"),
    *("GRPOTrainer", "GRPOTrainer(model, reward_funcs, args, dataset).train"),
    *("compute_score", "EnvironmentInterface.step", "shutdown"),
}


def calls(code: str) -> list[ast.Call]:
    """Returns the calls of a piece of Python; none if it is something else."""
    try:
        return [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return []


def calls_of(page: Path) -> Iterator[ast.Call]:
    """Yields the calls in spans of code, and those of imported names in blocks of `py`, whose rest is of users."""
    text = page.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        yield from calls(" ".join(span.split()).replace("…", "..."))
    for block in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        imported = " ".join(re.findall(r"^from postlude[\w.]* import (.*)", block, re.MULTILINE)).replace(",", " ")
        yield from (call for call in calls(block) if ast.unparse(call.func) in imported.split())


@cache
def definitions() -> dict[str, list[tuple[str, str]]]:
    """Returns the module and the qualified name of every function, class and method of the package, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append((module, node.name))
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                        found.setdefault(member.name, []).append((module, f"{node.name}.{member.name}"))
    return found


def signatures(call: ast.Call) -> list[inspect.Signature]:
    """Returns the signatures that a call may have: a name in prose may be of several functions or methods."""
    holder, _, last = ast.unparse(call.func).rpartition(".")
    if holder.startswith("postlude"):
        return [inspect.signature(getattr(importlib.import_module(holder), last))]
    return [found for place in definitions().get(last, ()) if (found := signature(*place)) is not None]


def signature(module: str, qualified: str) -> inspect.Signature | None:
    """Returns the signature of a function, a class or a method without `self`.

    Returns None for a property, and for a module that another program imports, such as vLLM in its workers.
    """
    *owners, name = qualified.split(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("postlude"):
            raise
        return None
    owner = getattr(holder, owners[0]) if owners else holder
    if not callable(value := getattr(owner, name)):
        return None
    result = inspect.signature(value)
    if not owners or isinstance(owner.__dict__[name], classmethod | staticmethod):
        return result
    return result.replace(parameters=list(result.parameters.values())[1:])


def accepts(candidate: inspect.Signature, call: ast.Call) -> bool:
    """Whether a call can be made. Without positional arguments, or with `...`, it may leave out some."""
    arguments = [value for value in call.args if not (isinstance(value, ast.Constant) and value.value is ...)]
    only_by_name = {name for name, value in candidate.parameters.items() if value.kind is value.KEYWORD_ONLY}
    listed = {value.id for value in arguments if isinstance(value, ast.Name)} & only_by_name  # as in Layout(pp, tp)
    by_position = [value for value in arguments if not (isinstance(value, ast.Name) and value.id in listed)]
    whole = len(arguments) == len(call.args) and (by_position or not call.keywords)
    keywords = dict.fromkeys([*listed, *(keyword.arg for keyword in call.keywords if keyword.arg)])
    try:
        (candidate.bind if whole else candidate.bind_partial)(*by_position, **keywords)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_calls_in_the_documentation_have_the_arguments_of_the_source(page: Path) -> None:
    wrong = []
    for call in calls_of(page):
        name = ast.unparse(call.func)
        candidates = signatures(call)
        if name not in OF_OTHERS and not any(accepts(candidate, call) for candidate in candidates):
            wrong.append(f"{ast.unparse(call)}: {', '.join(map(str, candidates)) or 'there is no such name'}")
    assert wrong == []


def test_the_page_of_the_head_has_every_option() -> None:
    page = (ROOT / "docs" / "linear_logprobs.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    parameters = inspect.signature(linear_logprobs).parameters.values()
    results = {value.name for value in parameters if value.kind is value.KEYWORD_ONLY} - {"logit_config"}
    assert documented == results | {field.name for field in fields(LogitConfig)}
