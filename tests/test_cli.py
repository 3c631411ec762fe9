"""The command line prints what the library computes; user errors give one line and exit code 2."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from postlude import export_hf, load_model, load_tokenizer, pack
from postlude.cli import main
from postlude.commands import info, serve, verify
from postlude.hf.peft import write_adapter
from postlude.hf.read_model import read_description, read_model
from postlude.verify.cases import Case
from postlude.verify.choices import GRID
from postlude.verify.compare import Report
from tests.commands import run_on_shared_ranks
from tests.conftest import Ranks


def test_info_counts_every_parameter(capsys) -> None:
    assert main(["info", "tiny-moe"]) == 0
    printed = capsys.readouterr().out
    model = load_model("tiny-moe")
    assert "[*E]{4}" in printed
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in printed
    moe = sum(parameter.numel() for name, parameter in model.named_parameters() if ".moe." in name)
    assert f"{moe:,}" in printed


def test_logprobs_prints_the_models_log_probs(capsys) -> None:
    assert main(["logprobs", "tiny-dense", "--text", "hello"]) == 0
    rows = re.findall(r"│ (\d+)\s+│ '(.)'\s+│ (-[\d.]+)\s+│ ([\d.]+)\s+│ (\d+)", capsys.readouterr().out)
    (microbatch,) = pack([list(b"hello")], budget=8)
    distribution = load_model("tiny-dense")(microbatch).log_softmax(-1)
    for i, letter, logprob, entropy, rank in rows:
        row = distribution[int(i) - 1]
        assert float(logprob) == pytest.approx(row[ord(letter)].item(), abs=1e-4)
        assert float(entropy) == pytest.approx(-(row.exp() * row).sum().item(), abs=1e-4)
        assert int(rank) == 1 + int((row > row[ord(letter)]).sum())
    assert [letter for _, letter, *_ in rows] == list("ello")


def test_convert_writes_a_model_that_scores_the_same(tmp_path: Path, capsys) -> None:
    assert main(["convert", "tiny-moe", str(tmp_path / "moe"), "--dtype", "bfloat16"]) == 0
    written = load_model(tmp_path / "moe")
    assert torch.equal(written.head.weight, load_model("tiny-moe").head.weight.bfloat16())
    capsys.readouterr()
    assert main(["logprobs", str(tmp_path / "moe"), "--text", "hello", "--dtype", "float32"]) == 0
    assert "'o'" in capsys.readouterr().out


def test_logprobs_prints_tokens_verbatim(tmp_path: Path, capsys) -> None:
    assert main(["convert", "tiny-dense", str(tmp_path / "model[bold]")]) == 0
    assert str(tmp_path / "model[bold]") in capsys.readouterr().out
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.add_tokens(["[/INST]"])
    export_hf(load_model("tiny-dense"), tmp_path / "inst", tokenizer=tokenizer)
    assert main(["logprobs", str(tmp_path / "inst"), "--text", "a[/INST]b"]) == 2
    assert "gives token 264, but the vocabulary ends at 263" in capsys.readouterr().err
    wider = read_description("tiny-dense")
    wider.vocab_size = 272
    export_hf(load_model(wider), tmp_path / "inst", tokenizer=tokenizer, overwrite=True)
    assert main(["logprobs", str(tmp_path / "inst"), "--text", "a[/INST]b"]) == 0
    assert "'[/INST]'" in capsys.readouterr().out


def test_info_names_missing_parts_of_an_adapter(tmp_path: Path, capsys) -> None:
    write_adapter(tmp_path, {"peft_type": "LORA", "lora_alpha": 8}, {"a": torch.zeros(2)})
    assert main(["info", str(tmp_path)]) == 2
    assert "the adapter's config has r=None, but it is a number above 0." in capsys.readouterr().err


def test_convert_works_without_a_tokenizer(tmp_path: Path, capsys) -> None:
    source = export_hf(load_model("tiny-dense"), tmp_path / "bare")
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    assert main(["convert", str(source), str(tmp_path / "copy")]) == 0
    assert "written without one" in capsys.readouterr().err
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_convert_to_another_pattern_and_back_round_trips(tmp_path: Path, capsys) -> None:
    first, recast, back = (str(tmp_path / name) for name in ("first", "own", "back"))
    assert main(["convert", "tiny-dense", first]) == 0
    assert main(["convert", first, recast, "--pattern", "*-*-*-*-"]) == 0
    assert "Freshly" not in capsys.readouterr().out
    assert main(["info", recast]) == 0
    assert "(*-){4}" in capsys.readouterr().out
    assert main(["logprobs", first, "--text", "hello"]) == 0
    scores = capsys.readouterr().out
    assert main(["logprobs", recast, "--text", "hello"]) == 0
    assert capsys.readouterr().out == scores
    assert main(["convert", recast, back, "--pattern", "[*-]{4}"]) == 0
    first_tensors, last_tensors = (load_file(Path(directory) / "model.safetensors") for directory in (first, back))
    assert first_tensors.keys() == last_tensors.keys()
    assert all(torch.equal(first_tensors[name], last_tensors[name]) for name in first_tensors)


def test_convert_lists_new_and_dropped_blocks(tmp_path: Path, capsys) -> None:
    arguments = ["convert", "tiny-dense", str(tmp_path / "own"), "--pattern", "[*-][ME][S-][G-]/[*-]"]
    assert main([*arguments, "--dtype", "bfloat16", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    for line in ("M is MambaConfig(", "E is MoEConfig(", "S is SlidingAttentionConfig(", "G is GatedDeltaConfig("):
        assert line in output
    fresh = "Freshly initialised, and to be trained: layers.1.mamba, layers.1.moe, layers.3.gated_delta, mtp.0."
    assert fresh in output
    assert "Left out: layers.1.attention, layers.1.mlp, layers.3.attention." in output
    assert fresh in (tmp_path / "own" / "README.md").read_text()
    written, source = load_model(tmp_path / "own").state_dict(), load_model("tiny-dense", seed=3).state_dict()
    unchanged_name = "layers.2.attention.q_proj.weight"  # a window changes none of them
    assert torch.equal(written[unchanged_name], source[unchanged_name].bfloat16())
    assert main(arguments) == 2
    assert "holds a model already (model.safetensors)" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    other_state = load_model(tmp_path / "own").state_dict()
    assert not torch.equal(other_state["layers.1.moe.router.weight"], written["layers.1.moe.router.weight"].float())


def test_a_model_without_a_family_is_scored_trained_and_loaded_again(tmp_path: Path, capsys) -> None:
    assert main(["info", "tiny-hybrid"]) == 0
    output = capsys.readouterr().out
    assert "tiny-hybrid  of no family" in output
    assert str(read_model("tiny-hybrid")[1].pattern) in output
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n' * 4)
    settings = ["--model=tiny-hybrid", f"--data.path={tmp_path}/rows.jsonl", "--held_out.rows=0"]
    assert main(["sft", f"--run={tmp_path}/run", "--steps=2", "--batch_size=2", "--optimizer.lr=1e-3", *settings]) == 0
    exported = load_model(tmp_path / "run" / "model")
    checkpoint = load_model(tmp_path / "run" / "checkpoints" / "step-000002")
    before, after = load_model("tiny-hybrid").state_dict(), exported.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in checkpoint.state_dict().items())
    assert not torch.equal(after["head.weight"], before["head.weight"])
    capsys.readouterr()
    assert main(["logprobs", str(tmp_path / "run" / "model"), "--text", "one"]) == 0
    assert "'e'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["convert", "tiny-dense", "DST", "--pattern", "[*-"], "'[' is never closed (column 1)"),
        (["convert", "tiny-dense", "DST", "--pattern", "[*-]{3}"], "the trunk has 8 blocks in [*-]{4}, but 6 in"),
        (["convert", "tiny-dense", "DST", "--pattern", "[*-]{3}[Q-]"], "'Q' is not a block symbol"),
        (["convert", "no/such/model", "DST", "--pattern", "[*-]"], "'no/such/model' is neither a model directory"),
        (["convert", "EMPTY", "DST", "--pattern", "*-*-"], "holds neither model.safetensors nor"),
        (["convert", "NOTHING", "DST", "--pattern", "[*-]{4}"], "has no config.json and no postlude.json"),
        (["info", "BROKEN"], "postlude.json describes no model: its format is 7"),
        (["verify", "BROKEN", "--layout", "tp=2"], "postlude.json describes no model: its format is 7"),
        (["logprobs", "BROKEN", "--text", "hi"], "postlude.json describes no model: its format is 7"),
    ],
)
def test_invalid_pattern_or_description_gives_clear_error(
    arguments: list[str], sentence: str, tmp_path: Path, capsys
) -> None:
    from transformers import LlamaConfig

    for name in ("NOTHING", "EMPTY", "BROKEN"):
        (tmp_path / name).mkdir()
    LlamaConfig(hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "EMPTY")
    load_tokenizer("tiny-dense").save_pretrained(tmp_path / "BROKEN")
    (tmp_path / "BROKEN" / "postlude.json").write_text('{"format": 7}')
    code = main([str(tmp_path / word) if word.isalpha() and word.isupper() else word for word in arguments])
    output = capsys.readouterr().err
    assert code == 2
    assert sentence in output
    assert "Traceback" not in output
    assert not (tmp_path / "DST").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["info", "no/such/model"], "postlude info: 'no/such/model' is neither a model directory"),
        (["info", "tiny-dense", "--verbose"], "postlude info: '--verbose' is not an option"),
        (["logprobs", "tiny-dense", "--text", "hi", "--dtyp", "float32"], "did you mean --dtype?"),
        (
            ["generate", "tiny-dense", "--max_new_tokens", "4"],
            "'--max_new_tokens' is not an option; did you mean --max-new",
        ),
        (["generate", "tiny-dense", "hi"], "'hi' is one argument too many. See `postlude generate --help`."),
        (["logprobs", "tiny-dense"], "the following arguments are required: --text"),
        (["logprobs", "tiny-dense", "--text", "h"], "the text has 1 token(s)"),
        (["logprobs", "tiny-dense", "--text", "hi", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["logprobs", "tiny-dense", "--text", "hi", "--device", "warp"], "device 'warp' is unknown to torch"),
        (["convert", "tiny-dense"], "the following arguments are required: DST"),
        (["juggle"], "'juggle' is not a command; there are info, convert, "),
        (["inf", "tiny-dense"], "'inf' is not a command; did you mean info? See `postlude --help`."),
        (["info", "tiny-dens"], "Did you mean tiny-dense?"),
        (["info", "models/Qwen3-8B"], "ORG/NAME on the Hugging Face Hub. The directory models does not exist."),
        (["info", "Qwen/Qwen3-0.6B"], "HF_HUB_OFFLINE is set. Run `hf download Qwen/Qwen3-0.6B` where the Hub can be"),
        (["logprobs", "tiny-dense", "--text", "h\udcff"], "the text is not UTF-8 at character 1"),
        (["serve", "tiny-dense", "--threads", "0"], "argument --threads: '0' is not a whole number of at least 1."),
        (["serve", "tiny-dense", "--port", "99999"], "argument --port: '99999' is not from 1 to 65535, or 0"),
        (["serve", "tiny-dense", "--host", "0.0.0.0"], "--host 0.0.0.0 is reached from other machines"),
        (["serve", "tiny-dense", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1, port 0: cannot assign"),
        (["verify", "tiny-dense", "--grid", "--tolerance", "-1"], "--tolerance: '-1' is not a number of at least 0."),
        (["verify", "tiny-dense", "--layout", "tp=x"], "--layout: layout 'tp=x': 'tp=x' is not of the form tp=N"),
        (["verify", "tiny-dense", "--layout", "pq=2"], "layout 'pq=2': 'pq' is not an axis; the axes are pp,"),
        (
            ["verify", "tiny-dense", "--layout", "tp=2", "--lora", "rnk=8"],
            "'rnk' is not a setting; did you mean 'rank'?",
        ),
        (["verify", "tiny-dense", "--layout", "tp=2", "--lora", "rank=x"], "rank is 'x'; give a whole number"),
        (["verify", "tiny-dense", "--layout", "tp=2", "--lora", "rank=0"], "rank is 0, but it must be a number"),
        (["verify", "tiny-dense", "--layout", "tp=2", "--lora", "targets=q_proj,v_porj"], 'did you mean "v_proj"?'),
        (["plan", "tiny-dense", "--seq", "8", "--lora", "experts=none"], "lora.experts is 'none', but the choices are"),
        (["verify", "tiny-dense"], "one of the arguments --layout --grid is required"),
        (["trace", "tiny-moe", "--to", "x", "--layout", "dp_shard=2,ep=3"], "ep=3 does not divide"),
        (["trace", "tiny-moe", "--to", "x", "--microbatches", "0"], "--microbatches: '0' is not a whole number"),
        (["plan", "tiny-dense", "--seq", "8", "--batch-tokens", "0"], "--batch-tokens: '0' is not a whole number"),
        (["grpo"], "postlude grpo: give a CONFIG, or fields such as --model"),
        (
            ["grpo", "--environment.kind", "dataset", "--environment.path", "rows.jsonl"],
            'config key "environment" on the command line: it has neither reward nor rewards',
        ),
        (["sft", "--data.path=a.jsonl", "--objective.kind=file"], 'config key "objective.file" is missing'),
        (["eval", "--rollout.kind=server"], 'config key "rollout.urls" is missing on the command line; give a list'),
        (["grpo", "--timeout", "-3"], "argument --timeout: '-3' is not a number above 0."),
        (["grpo", "--nproc", "0"], "argument --nproc: '0' is not a whole number of at least 1."),
        (["sft", "--data.path=a.jsonl", "--run="], "run is empty, which would be the working directory itself"),
        (["sft", "/"], '"/" is a directory; give the config file itself.'),
        (["generate", "tiny-dense", "--seed", str(2**63)], "--seed: '9223372036854775808' is not a whole"),
        (["plan", "tiny-dense", "--seq", "8", "--mtp", "-1"], "--mtp is -1; give the number of depths"),
        ([], "required: COMMAND"),
    ],
)
def test_user_error_gives_one_line_and_exit_code_2(arguments: list[str], sentence: str, capsys) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert sentence in printed.err
    assert "Traceback" not in printed.err
    assert len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", ["convert tiny-dense", "schema grpo --to", "report RUN --to", "trace tiny-moe --to"])
def test_output_path_below_a_file_is_refused_first(words: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").touch()
    below = tmp_path / "metrics.jsonl" / "below" / "it"
    assert main([*words.replace("RUN", str(tmp_path)).split(), str(below)]) == 2
    assert f"but {tmp_path / 'metrics.jsonl'} is a file. Give " in capsys.readouterr().err


def test_port_in_use_is_refused_before_loading_a_model(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(serve, "load_generator", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", "tiny-dense", "--port", str(port)]) == 2
    assert f"cannot listen at 127.0.0.1, port {port}: address already in use. Give" in capsys.readouterr().err


def test_file_system_error_gives_one_line(tmp_path: Path, capsys) -> None:
    assert main(["schema", "grpo", "--to", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"postlude schema: {tmp_path} cannot be used: is a directory.\n"


@pytest.mark.parametrize("words", ["plan MODEL --seq 8", "verify MODEL --layout tp=2"])
def test_similarly_named_config_is_not_used(words: str, tmp_path: Path, capsys) -> None:
    read_description("tiny-dense").save_pretrained(tmp_path)
    (tmp_path / "other.json").write_text('{"model_type": "qwen3"}')
    assert main(words.replace("MODEL", str(tmp_path / "other.json")).split()) == 2
    assert "other.json is known by its name: call it config.json" in capsys.readouterr().err


def test_info_prints_the_training_memory_of_the_planner(capsys) -> None:
    assert main(["info", "tiny-dense"]) == 0
    shown_text = re.search(r"bfloat16 +│ \S+ MiB │ (\S+) MiB", capsys.readouterr().out)
    assert main(["plan", "tiny-dense", "--seq", "8"]) == 0
    parts = re.findall(r"│ (?:weights|gradients|optimizer|gathered) +│ (\S+) MiB", capsys.readouterr().out)
    assert shown_text is not None
    assert len(parts) == 4
    assert float(shown_text[1]) == pytest.approx(sum(map(float, parts)), abs=0.2)


def test_missing_tokenizer_error_names_its_directory(tmp_path: Path, capsys) -> None:
    source = export_hf(load_model("tiny-dense"), tmp_path / "bare")
    assert main(["logprobs", str(source), "--text", "hi"]) == 2
    assert "has no tokenizer. Put the model's tokenizer.json" in capsys.readouterr().err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt, even if this process was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_during_object_deletion_is_not_lost(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class InterruptedOnDelete:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def run(options: Any) -> None:
        InterruptedOnDelete()
        for _ in range(30_000):  # until the interrupt comes
            time.sleep(0.01)

    monkeypatch.setattr(info, "run", run)
    assert main(["info", "tiny-dense"]) == 130
    assert capsys.readouterr().err == "postlude info: SIGINT ended it.\n"


@pytest.mark.slow
def test_installed_command_runs() -> None:
    command = Path(sys.executable).with_name("postlude")
    if not command.exists():
        pytest.skip("postlude is not installed beside this interpreter, only on its path")
    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in ("info", "convert", "logprobs"))


class TestVerify:
    def test_exit_code_reports_the_result(
        self, ranks: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reports: list[Report] = []

        def run_on_ranks(*arguments: Any, **options: Any) -> Any:  # once: the second time what was found the first
            reports.extend([] if reports else run_on_shared_ranks(ranks)(*arguments, **options))
            return reports

        monkeypatch.setattr(verify, "run_on_ranks", run_on_ranks)
        assert main(["verify", "tiny-dense", "--layout", "tp=2"]) == 0
        assert "all 1 equal within 1e-05" in capsys.readouterr().out
        assert main(["verify", "tiny-dense", "--layout", "tp=2", "--tolerance", "1e-12"]) == 1
        output = capsys.readouterr().out
        assert "the gradient furthest off is model." in output
        assert "1 of 1 differ by more than 1e-12" in output

    def test_no_rank_starts_for_an_invalid_layout(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verify, "run_on_ranks", lambda *args, **options: pytest.fail("ranks were started"))
        assert main(["verify", "tiny-dense", "--layout", "tp=2", "--layout", "tp=3"]) == 2
        assert "8 heads" in capsys.readouterr().err

    def test_layouts_with_the_same_number_of_ranks_share_one_launch_and_an_80_column_table(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        starts = []

        def run_on_ranks(function: Any, cases: list[Case], place: str, *, nproc: int, **options: Any) -> list[Report]:
            starts.append(nproc)
            return [Report(case, 1e-7, 1e-7, 1e-7, {"model.norm.weight": 1e-7}) for case in cases]

        monkeypatch.setattr(verify, "run_on_ranks", run_on_ranks)
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["verify", "tiny-moe", "--grid", "--device", "cpu"]) == 0
        assert starts == sorted(set(starts))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        head = lines[0].split()
        assert head == ["layout", "with", "loss", "log-prob", "entropy", "grad", "layers", "steps"]
        assert len([line for line in lines if line.rstrip().endswith("equal")]) == 2 * len(GRID)
        assert any(line.startswith("pp=2,vpp=2,dp_shard=2,cp=2 ") for line in lines), "no layout of the grid is folded"


class TestGrpo:
    @pytest.mark.slow
    def test_a_dry_run_prints_the_whole_config(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["grpo", "demo", "--dry-run", "--optimizer.lr", "3e-5", "--layout", "pp=2"]) == 0
        output = capsys.readouterr().out
        assert "lr: 3.0e-05" in output or "lr: 3e-05" in output
        assert "pp: 2" in output

    def test_user_errors_give_one_line(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert main(["grpo", "demo", "--optimzer.lr", "1"]) == 2
        assert 'did you mean "optimizer.lr"?' in capsys.readouterr().err
        assert main(["grpo", str(tmp_path / "none.yaml")]) == 2
        assert "none.yaml" in capsys.readouterr().err
        assert main(["report", str(tmp_path / "no-run")]) == 2
        assert "no-run" in capsys.readouterr().err


def test_objective_that_returns_no_loss_gives_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def mine(inputs):\n    return 3\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n' * 4)
    settings = [f"--objective={tmp_path}/mine.py:mine", f"--data.path={tmp_path}/rows.jsonl", "--held_out.rows=0"]
    assert main(["sft", f"--run={tmp_path}/run", "--steps=1", "--batch_size=2", *settings]) == 2
    output = capsys.readouterr().err.strip().splitlines()
    assert output[-1].startswith("postlude sft: ")
    assert "int" in output[-1]
