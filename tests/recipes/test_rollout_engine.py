"""Recipes with servers: completions use the newest weights, also after servers are lost, or the run fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from postlude.checks import USER_ERRORS
from postlude.data.chat import Encoder
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf import export
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import read_description, read_model
from postlude.recipes.checks.environment import _stop_tokens
from postlude.recipes.checks.environment import _tasks as look_at_tasks
from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs
from postlude.recipes.checks.servers import ServerUse, server_checks
from postlude.recipes.config.load import ConfigError
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain
from postlude.recipes.rollouts.engine import connect_servers, launch_servers
from postlude.recipes.rollouts.server_commands import build_server_command, vllm_max_length
from postlude.recipes.run.outcome import read_outcome
from postlude.recipes.run.runtime import Runtime
from postlude.recipes.sequence_limit import SequenceLimit, sequence_limit
from postlude.rollout.tasks import Task
from tests.conftest import Ranks
from tests.recipes.test_grpo import VARIED_REWARDS, config_of, run_and_read_metrics, without_times
from tests.serving.fake_receiver import Receiver
from tests.serving.fake_vllm import FakeVLLM
from tests.serving.test_generation_server import request_json, serving

pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")


class TinyVLLM(FakeVLLM):
    """Serves a tiny model with the native generator, and loads weights from the given directory."""

    def __init__(self, model: str = "tiny-dense", port: int = 0) -> None:
        self.tokenizer = load_tokenizer(model)
        self.generator = Generator(load_model(model), self.tokenizer)
        super().__init__(self.sampled, port)
        self.read = lambda directory: setattr(self.generator, "model", load_model(directory))

    def broken_reply(self, path: str, body: Any) -> bytes | None:
        """Counts the run's completions, not those of the weight probe."""
        is_probe = body and body.get("sampling_params", body).get("max_tokens") == 1
        return None if is_probe else super().broken_reply(path, body)

    def sampled(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        drawn = body["sampling_params"]
        sampling = SamplingParams(
            max_new_tokens=drawn["max_tokens"],
            temperature=drawn["temperature"],
            top_k=drawn.get("top_k", 0),
            seed=drawn["seed"],
            ignore_eos=drawn.get("ignore_eos", False),
        )
        with self.lock:
            ((completion,),) = self.generator.generate([body["token_ids"]], sampling)
        return completion.tokens, completion.logprobs


@pytest.fixture
def server() -> Iterator[TinyVLLM]:
    with closing(TinyVLLM()) as tiny_vllm:
        yield tiny_vllm


SHORT = ("--warm_start.steps=0", "--evaluation.every=0", "--save_every=0", "--export=false", "--prompts_per_step=2")


def run_losing_server(group: Any, directory: str, *overrides: str) -> tuple[str, str]:
    config = config_of(Path(directory), *overrides)
    RECIPES["grpo"].run(config)
    ending = read_outcome(config.run)
    assert ending is not None
    return ending.status, ending.message


@pytest.mark.slow
def test_grpo_with_a_server_continues_when_a_lost_server_is_back(ranks: Ranks, tmp_path: Path) -> None:
    """The server is killed during the third step: two steps are saved, and the third runs when it is back."""
    with closing(TinyVLLM()) as server:
        answers_left = iter(range(15))  # of 6 answers a step
        server.before = lambda: server.kill() if next(answers_left, None) is None else None
        once = ("--rollout.retries=1", "--rollout.backoff=0.01", "--rollout.outage_timeout=0")
        ((outcome, sentence),) = ranks(1, run_losing_server, str(tmp_path), *SHORT, f"--rollout={server.url}", *once)
    assert outcome == "failed"
    assert sentence.startswith(f"the only server does not reply any more: {server.url} cannot be reached")
    assert "step-000002 is complete" in sentence
    with closing(TinyVLLM()) as another:
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *SHORT, f"--rollout={another.url}")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0.0 <= row["rollout_kl"] < 1e-9, "the server has the weights that learn"
        assert (row["servers/up"], row["servers/failed"], row["servers/retried"]) == (1.0, 0.0, 0.0)
        assert row["servers/reload_seconds"] <= row["time/weight_sync"]
        phases = {name.removeprefix("time/") for name in row if name.startswith("time/")}
        assert phases == {"weight_sync", "rollout", "reward", "logprobs", "train", "other"}, (
            "as of the native generator"
        )
    assert (server.calls.count("/collective_rpc"), another.calls.count("/collective_rpc")) == (3, 1)
    assert not (tmp_path / "run" / "weights").exists()
    assert not {key for row in rows for key in row if explain(key) is None} - {"step", "phase"}


class TinyReceiver(TinyVLLM, Receiver):
    """Also receives weights over the network, and uses them once all have arrived."""

    def __init__(self, room: Path, port: int = 0) -> None:
        self.capacity, self.tensors = room, dict[str, torch.Tensor]()
        super().__init__(port=port)
        self.on_tensor = lambda name, tensor: self.tensors.update({name: tensor.clone()})

    def reply(self, path: str, body: Any) -> Any:
        if path == "/finish_weight_update":
            read_description("tiny-dense").save_pretrained(self.capacity)
            save_file(self.tensors, self.capacity / "model.safetensors")
            self.read(str(self.capacity))
            self.tensors = {}
        return super().reply(path, body)


@pytest.mark.thorough
@pytest.mark.slow
def test_run_with_sent_weights_equals_run_with_weights_from_disk(ranks: Ranks, tmp_path: Path) -> None:
    rows = {}
    for sync in ("disk", "network"):
        with closing(TinyReceiver(tmp_path / f"{sync} server")) as server:
            chosen = (f"--rollout.urls=[{server.url}]", f"--rollout.sync={sync}")
            (rows[sync],) = ranks(
                1, run_and_read_metrics, str(tmp_path / sync), *SHORT, "--rollout.kind=server", *chosen
            )
            assert server.calls.count("/collective_rpc") == (3 if sync == "disk" else 0)
            assert server.calls.count("/finish_weight_update") == (3 if sync == "network" else 0)
    for row in rows["network"]:
        assert 0.0 < row["servers/send_seconds"] <= row["servers/sync_seconds"] <= row["time/weight_sync"]
        assert row["servers/sync_bytes"] > 0
    plain = {
        sync: [{key: value for key, value in row.items() if not key.startswith("servers/")} for row in sync_rows]
        for sync, sync_rows in rows.items()
    }
    assert without_times(plain["network"]) == without_times(plain["disk"])
    assert not (tmp_path / "network" / "run" / "weights").exists()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_restarted_only_server_gets_weights_in_the_middle_of_a_step(
    ranks: Ranks, tmp_path: Path, staleness: int
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(closing(TinyReceiver(tmp_path / "first")))

        def restart() -> None:
            if not first.dead:
                first.kill()
                stack.enter_context(closing(TinyReceiver(tmp_path / "second", first.port)))

        answers_left = iter(range(8))  # of 6 answers a step
        first.before = lambda: restart() if next(answers_left, None) is None else None
        patient = ("--rollout.backoff=0.01", "--rollout.retries=12")  # as long as another takes to start
        chosen = (f"--rollout.urls=[{first.url}]", "--rollout.sync=network", *patient)
        late = f"--asynchrony.max_staleness={staleness}"
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *SHORT, "--rollout.kind=server", *chosen, late)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["servers/failed"] for row in rows) >= 1
    if not staleness:
        assert all(0.0 <= row["rollout_kl"] < 1e-9 for row in rows), "it has the weights that learn"


def run_with_full_disk(group: Any, directory: str, *overrides: str) -> tuple[str, str]:
    """Like `run_losing_server`, on a disk that is full when the third model is written."""
    writes_left, written, pwrite = iter(range(2)), export.write, os.pwrite

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def write(*arguments: Any) -> None:
        if next(writes_left, None) is None:
            os.pwrite = full
        written(*arguments)

    export.write = write
    try:
        return run_losing_server(group, directory, *overrides)
    finally:
        export.write, os.pwrite = written, pwrite


@pytest.mark.thorough
@pytest.mark.slow
def test_full_disk_ends_a_run_with_clear_error_and_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    with closing(TinyVLLM()) as server:
        ((outcome, sentence),) = ranks(1, run_with_full_disk, str(tmp_path), *SHORT, f"--rollout={server.url}")
        assert outcome == "failed"
        assert sentence.startswith(f"weights for servers could not be written below {tmp_path}/run/weights: ")
        assert "No space left on device (os error 28). There must be room for two copies of the weights." in sentence
        assert "step-000002 is complete" in sentence
        assert not list((tmp_path / "run").rglob("*.partial"))
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *SHORT, f"--rollout={server.url}")
    assert [row["step"] for row in rows] == [1, 2, 3]


def run_killing_server(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    """Like `run_and_read_metrics`, but kills a server as soon as the first step is logged."""
    from postlude.serving.launch.launcher import LocalLauncher

    processes: list[Any] = []

    class Deadly(LocalLauncher):
        def start(self, program: Any) -> Any:
            processes.append(super().start(program))
            return processes[-1]

    def kill() -> None:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        keeper = processes[0].process.pid
        os.kill(int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    config = config_of(Path(directory), *overrides)
    RECIPES["grpo"].run(config, runtime=Runtime(launcher=Deadly(Path(directory) / "logs")))
    assert len(processes) > config.rollout.count, "another was started"
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_grpo_with_launched_generators(ranks: Ranks, tmp_path: Path) -> None:
    """Completions equal the native generator's, also if a server is killed during the run."""
    native_run, server_run, broken = tmp_path / "here", tmp_path / "there", tmp_path / "broken"
    settings = (*SHORT, *VARIED_REWARDS, "--steps=4")
    (native,) = ranks(1, run_and_read_metrics, str(native_run), *settings)
    (rows,) = ranks(1, run_and_read_metrics, str(server_run), *settings, "--rollout=generators")
    (interrupted_rows,) = ranks(
        1, run_killing_server, str(broken), *settings, "--rollout=generators", "--rollout.count=2"
    )
    for run_rows in (rows, interrupted_rows):
        for row, expected in zip(run_rows, native, strict=True):
            assert 0.0 <= row["rollout_kl"] < 1e-9, "the server has the weights that learn"
            assert (row["rewards"], row["lengths"]) == (expected["rewards"], expected["lengths"])
            for name in ("loss", "entropy", "grad_norm"):
                assert row[name] == pytest.approx(expected[name], abs=1e-4)
    assert min(row["grad_norm"] for row in native) > 0.0, "every step changes the weights"
    assert sum(row["servers/failed"] for row in interrupted_rows) >= 1
    assert "serving" in (server_run / "run" / "servers" / "0.log").read_text()


def test_servers_that_cannot_be_started_are_reported_in_the_preflight(tmp_path: Path, monkeypatch) -> None:
    assert (
        server_finding(tmp_path, "--rollout=generators", "--rollout.count=2") == "2 of postlude serve, to be launched"
    )
    vllm = (tmp_path, "--rollout=vllm", "--rollout.gpus=0")
    assert "cannot be run as a Python interpreter" in server_finding(*vllm, "--rollout.python=/nowhere/python")
    assert "has no vLLM. Install it there" in server_finding(*vllm)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert server_finding(tmp_path, "--rollout=generators", "--rollout.count=2", "--rollout.gpus=1").startswith("2 of")
    assert "needs 2 servers with 2 GPUs each, but the trainer leaves 2 of this machine's" in server_finding(
        tmp_path, "--rollout=vllm", "--rollout.count=2", "--rollout.gpus=2"
    )
    share = (tmp_path, "--rollout=generators", "--rollout.gpus=0.4")
    assert "rollout.gpus is 0.4, but only Ray gives out shares of a GPU" in server_finding(*share)
    on_ray = LaunchInfo("cuda", ray=True)
    assert server_finding(*share, start=on_ray) == "1 of postlude serve, to be launched"
    assert "on Ray a server that requests no GPU sees none" in server_finding(
        tmp_path, "--rollout=generators", start=on_ray
    )
    by_cpu = ("--rollout=generators", "--rollout.device=cpu")
    assert server_finding(tmp_path, *by_cpu, start=on_ray) == "1 of postlude serve, to be launched"


def server_finding(tmp_path: Path, *overrides: str, start: LaunchInfo | None = None, **fields: Any) -> str:
    """Returns the preflight finding about the servers of a GRPO run; `found` are fields of its inputs."""
    config = config_of(tmp_path, *overrides)
    inputs = PreflightInputs(config, start or LaunchInfo(), **fields)
    use = ServerUse(gets_weights=True, compares_logprobs=config.old_logprobs == "rollout")
    (check,) = server_checks(inputs, config.rollout, config.sampling, use)
    try:
        return check.run()
    except USER_ERRORS as error:
        return str(error)


@pytest.mark.slow
def test_missing_features_of_a_server_are_reported_in_the_preflight(server: TinyVLLM, tmp_path: Path) -> None:
    arguments = (tmp_path, f"--rollout={server.url}")
    assert server_finding(*arguments) == "1 of 1 reply (vllm)"
    finding = server_finding(tmp_path, f"--rollout={server.url},http://127.0.0.1:9")
    assert finding == "1 of 2 reply (vllm); http://127.0.0.1:9 cannot be reached: Connection refused"
    known, choice = server.reply, server.choice

    def reply(path: str, body: Any) -> Any:
        return {"data": [{"id": "tiny", "owned_by": "llamacpp"}]} if path == "/v1/models" else known(path, body)

    server.reply = reply
    assert f"{server.url} is llama.cpp, which takes no new weights" in server_finding(*arguments)
    server.reply = lambda path, body: {} if path == "/weight_info" else known(path, body)
    assert "does not report its weights at /weight_info" in server_finding(*arguments)
    server.reply = lambda path, body: (
        {"vllm_config": "device_config=cpu"} if path == "/server_info" else known(path, body)
    )
    assert "does not update a head that is tied to the embedding" in server_finding(
        *arguments
    )  # tiny-dense has such a head
    server.reply = known

    def without(**changes: Any) -> Any:
        def changed(body: Any) -> Any:
            answer = choice(body)
            answer["choices"][0] |= changes
            return answer

        return changed

    server.choice = without(logprobs=None)
    assert f"{server.url} gave no log-probs" in server_finding(*arguments)
    server.choice = without(token_ids=None)
    assert f"{server.url} gave text but no token ids" in server_finding(*arguments)
    server.choice = without(token_ids=[9999] * 8)
    assert f"{server.url} gave token 9999, which is not in the vocabulary (0 to" in server_finding(*arguments)
    server.choice = without(text="Rome")
    assert f"{server.url} decodes its tokens as 'Rome'" in server_finding(*arguments)
    server.choice = choice
    server.kill()
    assert "the only server does not reply any more" in server_finding(*arguments)


def test_servers_are_awaited_and_checked_against_the_models_vocabulary(tmp_path: Path) -> None:
    with closing(connect_servers(config_of(tmp_path, "--rollout=http://localhost:1").rollout, None, 258)) as engine:
        assert engine.pool.servers[0].vocab_size == 258
        assert engine.pool.outage_timeout == 600.0


def test_stop_tokens_of_a_recipe_are_found_in_the_tokenizer(tmp_path: Path) -> None:
    """Ids or token strings; unknown ones are refused before the run."""
    tokenizer = load_tokenizer("tiny-dense")
    config = config_of(tmp_path, "--sampling.stop_tokens=[65, Z]")
    assert config.sampling.stop_ids(tokenizer) == (65, tokenizer.get_vocab()["Z"])
    inputs = PreflightInputs(config, LaunchInfo())
    assert "65, " in _stop_tokens(inputs, config.sampling)
    for wrong, sentence in (
        ("nosuch", "'nosuch', which is not a token of the tokenizer"),
        (100000, "has 100000, but the"),
    ):
        results = config.sampling.model_copy(update={"stop_tokens": (wrong,)})
        with pytest.raises(ValueError, match=sentence):
            _stop_tokens(inputs, results)


def test_a_server_with_a_too_short_max_length_is_refused(server: TinyVLLM, tmp_path: Path) -> None:
    known, arguments = server.reply, (tmp_path, f"--rollout={server.url}")
    stated = {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 70}]}
    server.reply = lambda path, body: stated if path == "/v1/models" else known(path, body)
    assert server_finding(*arguments, longest_prompt=67) == "1 of 1 reply (vllm)"  # and 3 more
    assert server_finding(*arguments, longest_prompt=68) == (
        f"{server.url} takes 70 tokens (its max_model_len), but a prompt of 68 tokens and a completion of up to 3 make "
        "71. Start it with a larger one, or lower sampling.max_new_tokens."
    )
    assert "but a conversation of several turns may have budget=256 tokens. Start it with a larger one, or lower" in (
        server_finding(*arguments, longest_prompt=5, grows=True)
    )


def test_launched_server_max_length_equals_the_budget(tmp_path: Path) -> None:
    _, tiny = read_model("tiny-dense")
    model_limit = vllm_max_length(tiny, load_tokenizer("tiny-dense"))
    assert model_limit == 2048
    stretched = replace(tiny, hf_config={**tiny.hf_config, "rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert vllm_max_length(stretched, None) == 4 * 2048
    assert vllm_max_length(stretched, SimpleNamespace(model_max_length=512)) == 512

    def words(budget: int, *overrides: str) -> str:
        config = config_of(tmp_path, f"--budget={budget}", *overrides)
        rollout = config.rollout
        options = {"limit": sequence_limit(config, tiny), "model_limit": model_limit}
        program = build_server_command(rollout, "m", torch.float32, "cpu", weights=False, **options)
        environment = [f"{name}={value}" for name, value in program.environment.items()]
        return " ".join([*program.command, *environment])

    assert "--max-model-len 1024" in words(1024, "--rollout=vllm")
    assert "--generation-config vllm" in words(1024, "--rollout=vllm"), "sampling values are ours alone"
    assert "--max-model-len" not in words(4096, "--rollout=vllm"), "a model's own length is vLLM's already"
    assert "--max-batch-tokens" not in words(1024, "--rollout=generators")
    assert "--context-length 1024" in words(1024, "--rollout=generators")
    assert "--context-length 2048" in words(70000, "--rollout=generators"), "the model's own"
    longer = words(70000, "--rollout=generators", "--context_length=80000")
    assert "--context-length 70000 --max-batch-tokens 70000" in longer
    assert "LONG_MAX_MODEL_LEN" not in words(1024, "--rollout=vllm")
    longer = words(4096, "--rollout=vllm", "--context_length=3000")
    assert "--max-model-len 3000" in longer
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in longer
    vllm = (tmp_path, "--rollout=vllm", "--rollout.gpus=0")
    assert "vLLM serves tiny-dense with 2048 tokens, as its config.json" in server_finding(*vllm, longest_prompt=2046)
    assert "has no vLLM" in server_finding(*vllm, longest_prompt=2045)
    short = (
        "rollout.arguments give servers --max-model-len 8, but a prompt of 6 tokens and a completion of up to 3 make 9"
    )
    for argument in ("--max-model-len,8", "--max_model_len=8"):
        assert f"{short}. Raise it, or" in server_finding(*vllm, f"--rollout.arguments=[{argument}]", longest_prompt=6)
    few = ("--rollout=generators", "--rollout.arguments=[--max-batch-tokens,8]")
    assert "rollout.arguments give servers --max-batch-tokens 8, but" in server_finding(
        tmp_path, *few, longest_prompt=6
    )


def command_of(rollout: Any, model: str = "m", *, weights: bool = True) -> Any:
    limit = SequenceLimit(64)
    return build_server_command(rollout, model, torch.float32, "cpu", weights=weights, limit=limit, model_limit=None)


def test_cpu_vllm_leaves_memory_for_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def space(*overrides: str) -> str | None:
        rollout = config_of(tmp_path, "--rollout=vllm", *overrides).rollout
        program = command_of(rollout, weights=False)
        return program.environment.get("VLLM_CPU_KVCACHE_SPACE")

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert (space(), space("--rollout.gpus=0")) == (None, "4")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert space("--rollout.gpus=0") == "2"
    assert space("--rollout.gpus=0", "--rollout.env={VLLM_CPU_KVCACHE_SPACE: '3'}") == "3"


def test_vllm_gets_the_revision_of_a_hub_model(tmp_path: Path) -> None:
    rollout = config_of(tmp_path, "--rollout=vllm").rollout
    for model, names in {"org/m@v2": ["org/m", "--revision", "v2"], str(tmp_path): [str(tmp_path), "--host"]}.items():
        command = command_of(rollout, model).command
        start = command.index("--model") + 1
        assert list(command[start : start + len(names)]) == names


@pytest.mark.parametrize(("kind", "variable"), [("generators", "POSTLUDE_API_KEY"), ("vllm", "VLLM_API_KEY")])
def test_launched_servers_have_a_secret_key(tmp_path: Path, kind: str, variable: str) -> None:
    rollout = config_of(tmp_path, f"--rollout={kind}").rollout
    program = command_of(rollout, weights=True)
    assert program.key_variable == variable
    arguments = (tmp_path, f"--rollout={kind}", "--rollout.gpus=0", "--rollout.arguments=[--api-key,mine]")
    assert "the run makes its own key" in server_finding(*arguments)


def test_a_launched_server_replies_only_to_its_run(tmp_path: Path) -> None:
    """It listens on this machine, and gets its key from its environment only."""
    rollout = config_of(tmp_path, "--rollout=generators").rollout
    program = command_of(rollout, weights=True)
    generator = Generator(load_model("tiny-dense"), load_tokenizer("tiny-dense"))
    with serving(generator, key="secret") as (_, url):
        running = SimpleNamespace(
            url=url, key="secret", exit_reason=lambda: None, is_listening=lambda: True, stop=lambda: None
        )
        with closing(launch_servers(rollout, program, None, 258, SimpleNamespace(start=lambda _: running))) as engine:
            ((completion,),) = engine.generate([[1]], SamplingParams(max_new_tokens=2))
            assert len(completion.tokens) == 2
        assert request_json(f"{url}/weights", {"directory": "/", "version": "1"})[0] == 401


def test_longest_prompt_is_computed_from_the_tasks(tmp_path: Path) -> None:
    inputs = PreflightInputs(config_of(tmp_path), LaunchInfo())
    encoder, results = Encoder(tokenizer=inputs.tokenizer), inputs.config.sampling
    look_at_tasks(inputs, [Task("1 + 1 ="), Task("1 + 1 + 1 =")], 2, encoder, results, None)
    assert inputs.longest_prompt == len(encoder.prompt("1 + 1 + 1 =")) > len(encoder.prompt("1 + 1 ="))


def test_logprobs_at_another_temperature_are_refused_with_old_logprobs_rollout(
    server: TinyVLLM, tmp_path: Path
) -> None:
    hot = (tmp_path, f"--rollout={server.url}", "--sampling.temperature=0.7")
    assert "1 of 1 reply" in server_finding(*hot)  # this one gives them at the temperature
    known = server.answer
    server.answer = lambda body: (known(body)[0], [-0.5] * len(known(body)[0]))
    assert "gives log-probs at temperature 1, but the temperature is 0.7" in server_finding(*hot)
    assert "1 of 1 reply" in server_finding(*hot, "--old_logprobs=recompute")
    server.answer = lambda body: (known(body)[0], [0.0] * len(known(body)[0]))
    assert "gives log-probs among the tokens that sampling.top_p leaves" in server_finding(*hot, "--sampling.top_p=0.9")


def test_invalid_configs_are_refused(tmp_path: Path) -> None:
    for overrides, sentence in (
        (("--rollout=ftp://there",), "rollout"),
        (("--rollout=generators", "--replay_routing=true"), "postlude serve does not report"),
        (("--rollout=vllm", "--rollout.gpus=0", "--replay_routing=true"), "vLLM on a CPU does not report"),
        (
            ("--rollout=http://there", "--replay_routing=true", "--sampling.stop=[x]"),
            "does not report with sampling.stop",
        ),
        (("--rollout=http://there", "--sampling.draft=mtp"), "a server drafts as it was started to"),
    ):
        with pytest.raises((ConfigError, ValueError), match=sentence):
            config_of(tmp_path, *overrides)


def distilled(group: Any, directory: str, *overrides: str) -> list[float]:
    from postlude.recipes.config.load import load
    from postlude.recipes.config.recipe_configs import DistillConfig

    common = ("--teacher=tiny-wide", "--data=on_policy", "--data.environment.size=16", "--steps=3", "--batch_size=2")
    options = ("--data.sampling.max_new_tokens=4", "--data.sampling.temperature=0", "--budget=512", "--export=false")
    config = load(DistillConfig, None, [f"--run={directory}", "--optimizer.lr=1e-2", *common, *options, *overrides])
    RECIPES["distill"].run(config)
    return [json.loads(line)["loss"] for line in (config.run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_distillation_with_a_server_equals_the_native_generator(ranks: Ranks, server: TinyVLLM, tmp_path: Path) -> None:
    (native,) = ranks(1, distilled, str(tmp_path / "native"))
    (served,) = ranks(1, distilled, str(tmp_path / "served"), f"--data.rollout={server.url}")
    assert served == native
    assert torch.tensor(native).diff().abs().min() > 0
