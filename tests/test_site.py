"""The documentation site has every page and name, and builds without a warning. Its commands run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import postlude
from postlude.recipes.config.schema import options
from postlude.recipes.registry import RECIPES
from tests.commands import run_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def module_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = module_of("site_pages")


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r": ([\w/-]+\.md)$", text[text.index("nav:") :], re.MULTILINE)


def test_the_navigation_has_every_page_once() -> None:
    """A page that mkdocs.yml does not name comes last."""
    pages = {path.name for path in DOCS.glob("*.md")} | set(site_pages.generated_pages())
    assert len(navigation()) == len(set(navigation()))
    assert set(navigation()) <= pages
    config = SimpleNamespace(nav=[{"Home": "index.md"}, {"Guides": [{"Plan": "plan.md"}]}])
    (section,) = site_pages.on_config(config).nav[2:]
    assert set(section["More"]) == {path.name for path in DOCS.glob("*.md")} - {"plan.md"}


def test_the_reference_has_every_command_key_and_public_name() -> None:
    pages = site_pages.generated_pages()
    commands, config, api = (pages[f"reference/{name}.md"]() for name in ("commands", "config", "api"))
    for name in (*RECIPES, "demo", "env", "verify", "serve"):
        assert f"\n## {name}\n" in commands
    for name, recipe in RECIPES.items():
        section = config.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
        for option in options(recipe.config):
            assert f"[`{option.path}`](#{name}.{option.path}" in section
    anchors, targets = re.findall(r'<a id="([^"]+)">', config), re.findall(r"\]\(#([^)]+)\)", config)
    assert len(anchors) == len(set(anchors))
    assert set(anchors) == set(targets)
    for name in postlude.__all__:
        assert re.search(rf"^::: postlude\.[\w.]+\.{name}$", api, re.MULTILINE), name


def test_links_out_of_the_documentation_point_to_copies_in_the_site() -> None:
    text = "[a](../examples/block.py) [b](plan.md#x) [c](../README.md) [d](../src/postlude/configs/models) [e](https://x.y)"
    linked, files = site_pages.links_inside(text, "recipes.md")
    assert linked == "[a](source/examples/block.py.txt) [b](plan.md#x) [c](index.md) [d] [e](https://x.y)"
    assert files == {"examples/block.py"}
    assert site_pages.links_inside("[a](docs/plan.md)", "index.md")[0] == "[a](plan.md)"
    assert site_pages.links_inside("[a](../plan.md)", "notebooks/layout.md")[0] == "[a](../plan.md)"
    code = "```\n[a](../x.py)\n```"
    assert site_pages.links_inside(code, "plan.md") == (code, set())


@pytest.mark.slow  # renders every page and reads every docstring
def test_the_site_builds_without_a_warning_or_a_request(tmp_path: Path) -> None:
    """A broken link, an unknown anchor or an unknown name is a warning, which fails. No page loads from other hosts."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "tutorial.html", "reference/api.html", "notebooks/train_on_rewards.html"} <= pages
    for page in pages:
        html = (tmp_path / "site" / page).read_text()
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?://[^"]+)"', html)
        assert not loaded, f"{page} loads {loaded}"
    api = (tmp_path / "site/reference/api.html").read_text()
    assert 'id="postlude.engine.Engine.forward_backward"' in api
    constructor = re.search(r'id="postlude.generate.generator.Generator".*?</code></pre>', api, re.DOTALL)
    assert constructor is not None
    assert {"max_batch_tokens", "eos_tokens"} <= set(re.findall(r"\w+", constructor[0]))
    assert (tmp_path / "site/search/search_index.js").is_file(), "the search needs a server"
    assert 'src="../vendor/iframe-worker.js"' in api


def tutorial() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", (DOCS / "tutorial.md").read_text(), re.MULTILINE | re.DOTALL)


SHORT = {"sft": "--epochs 1", "grpo": "--steps 1 --prompts_per_step 4 --samples_per_prompt 2 --evaluation.tasks 4"}


@pytest.mark.slow  # five commands, two of which train
def test_the_commands_of_the_tutorial_work(tmp_path: Path) -> None:
    """In order, in an empty directory, with training cut short and everything else unchanged."""
    (tmp_path / "python").symlink_to(sys.executable)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    place = tmp_path / "new"
    place.mkdir()
    outputs = {}
    for block in tutorial():
        lines = block.splitlines()
        commands = [shlex.split(line)[1:] for line in lines if line.startswith("postlude ")]
        script = "\n".join(line for line in lines if not line.startswith("postlude "))
        subprocess.run(["bash", "-euc", script], cwd=place, env=environment, check=True, timeout=600)
        for words in commands:
            done = run_command([*words, *shlex.split(SHORT.get(words[0], ""))], place)
            assert done.returncode == 0, block + done.stdout + done.stderr
            outputs[" ".join(words[:1] + words[2:])] = done.stdout
    assert "kernels" in outputs["env"]
    assert (place / "runs" / "sums" / "report.html").is_file()
    assert len(tutorial()) == 7
    assert len(outputs) == 5


@pytest.mark.slow  # each starts a kernel; the two others train and verify, as the README's and the guide's calls do
@pytest.mark.parametrize(
    "name", ["objective", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("layout", "train_on_rewards"))]
)
def test_notebook_runs_and_shows_its_stored_outputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its assertions hold in a kernel, and cells that print or draw here do so in the stored notebook."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebooks = module_of("run_notebooks")
    path = notebooks.NOTEBOOKS[name]
    stored, run = json.loads(path.read_text()), notebooks.run(path, tmp_path)
    printing = [[bool(cell.get("outputs")) for cell in notebook["cells"]] for notebook in (stored, run)]
    assert printing[0] == printing[1], "run `python docs/run_notebooks.py`"
    curves = [
        output for cell in run.cells for output in cell.get("outputs", ()) if "image/svg+xml" in output.get("data", {})
    ]
    assert len(curves) == (2 if name == "train_on_rewards" else 0)
