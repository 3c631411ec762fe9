"""The sdist and the wheel are complete: installed outside of the source tree, the command runs and trains.

One fixture builds the sdist, and the wheel from the sdist as pip does. Dependencies are those of this environment.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from postlude.version import __version__

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # builds the package, and imports torch in a new process


@dataclass(frozen=True)
class Installed:
    """An installation by pip with --target, and an empty working directory."""

    packages: Path
    directory: Path

    def run(self, *command: str, message: str = "") -> str:
        """Returns what a command that reads `message` prints. `postlude` is the installed one in all its processes."""
        environment = os.environ | {"PYTHONPATH": str(self.packages)}
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            input=message,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def postlude(self, *arguments: str, message: str = "") -> str:
        return self.run(sys.executable, str(self.packages / "bin" / "postlude"), *arguments, message=message)


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


def test_a_model_fine_tuned_on_chat_stops_by_itself_at_every_station(installed: Installed) -> None:
    """SFT on chats, GRPO from its model, evaluation, chat and transformers: no completion reaches its limit."""
    directory = installed.directory / "stations"
    directory.mkdir()
    talks = [
        [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "ok"}] for number in range(32)
    ]
    prompts = [{"prompt": f"{number}?", "answer": "ok"} for number in range(16)]
    rows = {"talks": [{"messages": talk} for talk in talks], "tasks": prompts}
    for name, content in rows.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    station = Installed(installed.packages, directory)
    common = ["--budget=128", "--loggers=[]", "--device=cpu"]
    data = ["--data.path=talks.jsonl", "--held_out.rows=0", "--steps=60", "--batch_size=8", "--optimizer.lr=0.01"]
    station.postlude("sft", "--model=tiny-dense", *data, "--run=sft", *common)
    settings = {"kind": "dataset", "path": "tasks.jsonl", "reward": "exact", "chat": "true", "workers": "0"}
    tasks = [*(f"--environment.{name}={value}" for name, value in settings.items()), "--sampling.max_new_tokens=16"]
    sizes = ["--steps=1", "--prompts_per_step=4", "--samples_per_prompt=2", "--evaluation.tasks=4"]
    station.postlude("grpo", "--model=sft/model", *tasks, *sizes, "--run=grpo", *common)
    station.postlude("eval", "--model=grpo/model", *tasks, "--tasks=4", "--run=eval", *common)
    for run in ("grpo", "eval"):
        metrics = json.loads((directory / run / "metrics.jsonl").read_text().splitlines()[-1])
        assert (metrics["truncated"], metrics["reward_mean"]) == (0, 1), run
    assert station.postlude("chat", "grpo/model", "--temperature=0", message="3?\n") == "ok\n"
    # In transformers alone, with what the export says.
    model = AutoModelForCausalLM.from_pretrained(directory / "grpo" / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "grpo" / "model")
    prompt = tokenizer.apply_chat_template(talks[3][:1], add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "ok<|im_end|>"


@pytest.mark.parametrize("name", ["tiny-sft", "models/qwen3-8b-sft-8gpus"])
def test_a_packaged_config_is_found_by_its_name(installed: Installed, name: str) -> None:
    program = "import sys; from postlude.recipes.registry import RECIPES; print(RECIPES['sft'].read(sys.argv[1]).data)"
    program = program.replace("sys.argv[1]", "__import__('pathlib').Path(sys.argv[1])")
    assert "jsonl" in installed.run(sys.executable, "-c", program, name)


def test_version_is_semantic_and_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", __version__)
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_in_the_readme_exists(installed: Installed) -> None:
    (distribution,) = importlib.metadata.distributions(name="postlude", path=[str(installed.packages)])
    extras = set(distribution.metadata.get_all("Provides-Extra") or ())
    assert {"tasks", "gguf", "parquet", "ray", "loggers"} <= extras
