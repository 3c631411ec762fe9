"""The sdist and the wheel are complete: installed outside of the source tree, the command runs and trains.

One fixture builds the sdist, and the wheel from the sdist as pip does. Dependencies are those of this environment.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from postlude.version import __version__

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # builds the package, and imports torch in a new process


@dataclass(frozen=True)
class Installed:
    """An installation by pip with --target, and an empty working directory."""

    packages: Path
    directory: Path

    def run(self, *command: str) -> str:
        """Returns what a command prints. `postlude` is the installed one in all its processes."""
        environment = os.environ | {"PYTHONPATH": str(self.packages)}
        options = {"cwd": self.directory, "env": environment, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(command, **options, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def postlude(self, *arguments: str) -> str:
        return self.run(sys.executable, str(self.packages / "bin" / "postlude"), *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    built = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(built), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True, timeout=600)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(built, filter="data")
    sources = built / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=sources, check=True, capture_output=True, timeout=600)
    shutil.rmtree(sources)
    (wheel,) = built.glob("*.whl")
    packages = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=600)
    return Installed(packages, tmp_path_factory.mktemp("elsewhere"))


def test_the_wheel_has_every_file_of_the_package(installed: Installed) -> None:
    """Exactly the files of src/postlude that git tracks, once each."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/postlude"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sources = {path for path in listed.splitlines() if (ROOT / path).is_file()}
    package = installed.packages / "postlude"
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {f"src/postlude/{path.relative_to(package)}" for path in files} == sources
    assert "src/postlude/py.typed" in sources


def test_command_runs_from_the_wheel(installed: Installed) -> None:
    assert installed.postlude("--version") == f"postlude {__version__}\n"
    location = installed.run(sys.executable, "-c", "import postlude.cli; print(postlude.cli.__file__)")
    assert Path(location.strip()) == installed.packages / "postlude" / "cli.py"
    assert "demo" in installed.postlude("--help")


def test_demo_trains_from_the_wheel_only(installed: Installed) -> None:
    """In an empty directory: its config and data are in the wheel."""
    sizes = ["--warm_start.steps=1", "--steps=1", "--prompts_per_step=4", "--samples_per_prompt=2", "--minibatches=1"]
    installed.postlude("demo", *sizes, "--evaluation.tasks=4", "--loggers=[]", "--device=cpu")
    run = installed.directory / "runs" / "demo"
    assert (run / "report.html").is_file()
    assert (run / "model" / "model.safetensors").is_file()


def test_packaged_configs_are_found_by_their_names(installed: Installed) -> None:
    names = ("tiny-sft", "models/qwen3-8b-sft-8gpus")
    program = "import sys; from pathlib import Path; from postlude.recipes.registry import RECIPES\n"
    program += "for name in sys.argv[1:]: print(RECIPES['sft'].read(Path(name)).data)"
    assert installed.run(sys.executable, "-c", program, *names).count("jsonl") == len(names)


def test_version_is_semantic_and_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", __version__)
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_in_the_readme_exists(installed: Installed) -> None:
    (distribution,) = importlib.metadata.distributions(name="postlude", path=[str(installed.packages)])
    extras = set(distribution.metadata.get_all("Provides-Extra") or ())
    assert {"tasks", "gguf", "parquet", "ray", "loggers"} <= extras
