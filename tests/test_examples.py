"""The examples work. Those that extend Postlude, one file of at most 60 lines each, run on two ranks.

examples/block.py is tested in engine/test_own_block.py.
"""

import contextlib
import json
import multiprocessing
import runpy
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.family import largest_difference
from examples.objective import soft_clip

from postlude import Batch, Engine, Layout, load_model, load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES, UserRecipe
from tests.commands import run_command

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
USES_OF_THE_SEAM = ("selected_logprobs", "custom_loss", "value_head")
EXTENSIONS = ("block", "family", "objective", "recipe", "environment", "rollout_server")


def run(name: str, output: Path) -> None:
    with output.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", USES_OF_THE_SEAM)
@pytest.mark.slow
def test_example_runs_and_is_short(tmp_path: Path, name: str) -> None:
    """Runs in a process without ranks, as a user starts it. Each example ends with its own assertions."""
    source = (EXAMPLES / f"{name}.py").read_text()
    code = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 25
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(name, tmp_path / "output"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "output").read_text().strip()


def test_every_extension_example_is_one_short_file_listed_in_contributing() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for name in EXTENSIONS:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
        assert f"[examples/{name}.py](examples/{name}.py)" in contributing
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*USES_OF_THE_SEAM, *EXTENSIONS}


def family_in(group: Any, layout: str) -> float:
    return largest_difference(Layout.parse(layout))


@pytest.mark.parametrize("layout", ["tp=2", "pp=2"])
def test_custom_family_on_two_ranks_equals_transformers(ranks: Any, layout: str) -> None:
    assert max(ranks(2, family_in, layout)) < 1e-5


def objective_in(group: Any, layout: str) -> dict[str, float]:
    engine = Engine("tiny-dense", layout=Layout.parse(layout))
    sequences = [list(b"a completion"), list(b"another"), list(b"and a third one")]
    generator = torch.Generator().manual_seed(0)
    columns = {
        name: [torch.randn(len(sequence), generator=generator) for sequence in sequences]
        for name in ("advantages", "old_logprobs")
    }
    masks = {"response_mask": [[0.0] * 3 + [1.0] * (len(sequence) - 3) for sequence in sequences]}
    result = engine.forward_backward(Batch(sequences, columns | masks), lambda inputs: soft_clip(inputs, bonus=0.1))
    return {"loss": result.loss, "grad_norm": engine.grad_norm(), **result.metrics}


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "cp=2", "dp_shard=2"])
def test_custom_objective_on_two_ranks_equals_one_rank(ranks: Any, layout: str) -> None:
    (expected,) = ranks(1, objective_in, "")
    for result in ranks(2, objective_in, layout):
        assert result == pytest.approx(expected, rel=1e-5)


def metrics_of(group: Any, recipe: str, config_file: str, *overrides: str) -> list[dict[str, float]]:
    """Returns the metrics of each step that are the same on every machine."""
    chosen = UserRecipe.load(recipe) if ".py:" in recipe else RECIPES[recipe]
    config = load(chosen.config, ROOT / config_file if config_file.endswith(".yaml") else Path(config_file), overrides)
    chosen.run(config, "cpu")
    return read_metrics_of(config.run)


def read_metrics_of(directory: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "reward_mean", "reward/asked", "turns_mean", "tokens")
    return [{name: row[name] for name in names if name in row} for row in rows]


CALCULATOR = "examples/calculator.yaml"
ENVIRONMENT_RUN = (
    "--steps=1",
    "--prompts_per_step=4",
    "--samples_per_prompt=4",
    "--minibatches=1",
    "--warm_start.batch_size=16",
    "--evaluation.every=0",
)


@pytest.fixture(scope="module")
def tool_calling_model(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model trained on examples to call the tool."""
    directory = tmp_path_factory.mktemp("caller")
    ranks(1, metrics_of, "grpo", CALCULATOR, f"--run={directory}", *ENVIRONMENT_RUN, "--warm_start.steps=24")
    return str(directory / "model")


@pytest.mark.slow
def test_custom_environment_on_two_ranks_equals_one_rank(ranks: Any, tool_calling_model: str, tmp_path: Path) -> None:
    words = (*ENVIRONMENT_RUN, f"--model={tool_calling_model}", "--warm_start.steps=0", "--export=false")
    runs = [
        ranks(size, metrics_of, "grpo", CALCULATOR, f"--run={tmp_path / str(size)}", *words, *layout)[0]
        for size, layout in ((1, ()), (2, ("--layout=tp=2",)))
    ]
    assert runs[0][-1]["turns_mean"] > 1  # some call the tool
    for first_row, two in zip(*runs, strict=True):
        assert two == pytest.approx(first_row, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_custom_recipe_on_two_ranks_equals_one_rank(ranks: Any, tmp_path: Path, started: bool) -> None:
    """One rank is a command. Two are the shared ranks, or `started` by a command."""
    recipe, config = str(EXAMPLES / "recipe.py:RowMeanTrainer"), "tiny-sft"
    words = ("--steps=3", "--held_out.rows=4", "--short_row_weight=2", "--export=false")
    on_one, on_two = (f"--run={tmp_path / 'one'}",), (f"--run={tmp_path / 'two'}", "--layout=tp=2")
    for settings in (on_one, on_two) if started else (on_one,):
        done = run_command([recipe, config, *words, *settings, "--device=cpu"], ROOT)
        assert done.returncode == 0, done.stderr
    if not started:
        ranks(2, metrics_of, recipe, config, *words, *on_two)
    single_rank, two_ranks = (read_metrics_of(tmp_path / name) for name in ("one", "two"))
    assert single_rank[-1]["loss"] < single_rank[1]["loss"]
    for expected, metrics in zip(single_rank, two_ranks, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-4)


class MinimalServer(ThreadingHTTPServer):
    """The server of examples/rollout_server.py, on the native generator."""

    daemon_threads = True

    def __init__(self, model: str) -> None:
        self.tokenizer, self.version, self.lock = load_tokenizer(model), "initial", threading.Lock()
        self.generator = Generator(load_model(model), self.tokenizer)
        super().__init__(("localhost", 0), MinimalHandler)

    def generate(self, prompt: list[int], sampling: dict[str, Any], first_index: int) -> Any:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in sampling.items()}
        return asdict(self.generator.generate([prompt], [SamplingParams(**values)], first_index=first_index)[0][0])

    def load(self, directory: str, version: str) -> Any:
        self.generator, self.version = Generator(load_model(directory), self.tokenizer), version
        return {"version": version}


class MinimalHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MinimalServer

    def do_GET(self) -> None:
        self.reply({"version": self.server.version, "data": [{"id": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.reply({"/generate": self.server.generate, "/load": self.server.load}[self.path](**body))

    def reply(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_custom_rollout_server_on_two_ranks_equals_the_native_generator(
    ranks: Any, tool_calling_model: str, tmp_path: Path
) -> None:
    """The run's metrics equal the native generator's: the server samples the same tokens with the newest weights."""
    with MinimalServer(tool_calling_model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, api = f"http://localhost:{server.server_port}", EXAMPLES / "rollout_server.py:MinimalAPI"
        words = (
            *ENVIRONMENT_RUN,
            f"--model={tool_calling_model}",
            "--warm_start.steps=0",
            "--steps=2",
            "--layout=tp=2",
        )
        served = (f"--rollout={url}", f"--rollout.api={api}", "--export=false")
        native = ranks(2, metrics_of, "grpo", CALCULATOR, *words, f"--run={tmp_path / 'native'}", "--export=false")[0]
        metrics = ranks(2, metrics_of, "grpo", CALCULATOR, *words, *served, f"--run={tmp_path / 'served'}")[0]
        assert server.version.endswith(".1")  # of the last step but one
        server.shutdown()
    for expected, actual in zip(native, metrics, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3)
