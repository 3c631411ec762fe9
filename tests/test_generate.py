"""`postlude generate` and `postlude chat` print the generator's completions, in scripts and conversations."""

import io
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from postlude import Engine, Layout, export_hf, load_model, load_tokenizer
from postlude.cli import main
from postlude.commands.generate import Conversation
from postlude.data.chat import Encoder
from postlude.data.turn_encoding import turn_ends
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from tests.commands import run_command
from tests.conftest import Ranks

FEW = ["--max-new-tokens", "6", "--seed", "3", "--device", "cpu", "--dtype", "float32"]
SAMPLING = SamplingParams(max_new_tokens=6, seed=3)


def run_generate(
    prompts: Sequence[object], sampling: SamplingParams | Sequence[SamplingParams], n: int = 1
) -> list[list[Completion]]:
    tokenizer = load_tokenizer("tiny-dense")
    encoder = Encoder(tokenizer=tokenizer)
    tokens = [encoder.prompt(prompt) for prompt in prompts]  # type: ignore[arg-type]
    return Generator(load_model("tiny-dense").eval(), tokenizer).generate(tokens, sampling, n=n)


def make_messages(text: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def test_json_lines_equal_the_generators_completions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "tiny-dense", "--prompt", "Hi", "--prompt", "Ho", "--n", "2", "--json", "--system", "Sing."]
    assert main([*words, *FEW]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    groups = run_generate([make_messages("Hi", "Sing."), make_messages("Ho", "Sing.")], SAMPLING, n=2)
    assert [row["tokens"] for row in rows] == [completion.tokens for group in groups for completion in group]
    assert [row["text"] for row in rows] == [completion.text for group in groups for completion in group]
    assert [(row["prompt"], row["number"], row["seed"]) for row in rows] == [
        ("Hi", 0, 3), ("Hi", 1, 3), ("Ho", 0, 3), ("Ho", 1, 3)
    ]  # fmt: skip


def ends_in_training(group: object, directory: str) -> set[int]:
    """Returns the tokens that end a completion of the generator in a trainer's rank."""
    with closing(SyncedGenerator(Engine(directory, layout=Layout()), load_tokenizer(directory))) as native:
        return set(native.generator.eos_tokens)


def test_completion_ends_with_any_eos_token_of_the_generation_config(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer("tiny-dense")
    ((completion,),) = run_generate([make_messages("Hi")], SAMPLING)
    last = completion.tokens[2]
    export_hf(load_model("tiny-dense"), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 257]}))
    assert main(["generate", str(tmp_path), "--prompt", "Hi", "--json", *FEW]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["tokens"] == completion.tokens[: completion.tokens.index(last) + 1]
    assert row["finish_reason"] == "stop"
    assert ranks(1, ends_in_training, str(tmp_path)) == [{last, 257, *turn_ends(tokenizer)}]


@pytest.mark.parametrize("words", [[], ["--prompt", "-"]])
def test_prompt_from_standard_input_with_and_without_chat_template(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert main(["generate", "tiny-dense", "--plain", *words, *FEW]) == 0
    ((completion,),) = run_generate(["Once upon"], SAMPLING)
    assert capsys.readouterr().out == f"{completion.text}\n"


class Terminal(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_for_a_line_and_an_empty_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("Once upon\nnot read\n"))
    assert main(["generate", "tiny-dense", "--plain", *FEW]) == 0
    ((completion,),) = run_generate(["Once upon"], SAMPLING)
    assert capsys.readouterr() == (f"{completion.text}\n", "prompt> ")
    for empty in (io.StringIO(), io.StringIO("\n"), Terminal()):
        monkeypatch.setattr("sys.stdin", empty)
        assert main(["generate", "tiny-dense", *FEW]) == 2
        assert "standard input is empty; write the prompt there, or give it with --prompt." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generate", "tiny-dense", "--prompt", "a", "--top-p", "2"], "top_p=2.0: give a probability"),
        (["generate", "tiny-dense", "--prompt", "a", "--plain", "--system", "b"], "--system is a message, but --plain"),
        (["generate", "tiny-dense", "--prompt", "a", "--n", "0"], "--n: '0' is not a whole number of at least 1"),
        (["chat", "tiny-dense", "--temperature", "-1"], "--temperature: '-1' is not a number of at least 0"),
    ],
)
def test_user_error_gives_one_line(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert sentence in capsys.readouterr().err


def test_a_conversation_continues_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd?\n/reset\nHi\n/what\n"))
    assert main(["chat", "tiny-dense", "--system", "Sing.", *FEW]) == 0
    ((first,),) = run_generate([make_messages("Hi", "Sing.")], [replace(SAMPLING, seed=5)])
    messages = [
        *make_messages("Hi", "Sing."),
        {"role": "assistant", "content": str(first.text)},
        *make_messages("And?"),
    ]
    ((second,),) = run_generate([messages], [replace(SAMPLING, seed=7)])
    out = capsys.readouterr().out
    assert out.startswith(f"{first.text}\n{second.text}\n{first.text}\n")
    assert "/what is not a command" in out


def test_ctrl_c_ends_a_completion_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer("tiny-dense")
    sampling = replace(SAMPLING, ignore_eos=True)
    talk = Conversation(Generator(load_model("tiny-dense").eval(), tokenizer), tokenizer, sampling, None)
    step, steps = Session.step, []

    def interrupted(session: Session) -> object:
        steps.append(session)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(session)

    monkeypatch.setattr(Session, "step", interrupted)
    cut = talk.reply("Hi")
    ((completion,),) = run_generate([make_messages("Hi")], [replace(sampling, seed=4)])
    assert str(completion.text).startswith(cut)
    assert talk.messages[-1] == {"role": "assistant", "content": cut}
    assert talk.reply("And?") in capsys.readouterr().out
    assert len(talk.messages) == 4


def test_too_long_prompt_gives_an_error_and_the_conversation_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'x' * 200}\nHi\n"))
    assert main(["chat", "tiny-dense", "--max-batch-tokens", "96", *FEW]) == 0
    out = capsys.readouterr().out
    assert "max_batch_tokens is 96" in out
    assert "/reset starts a new conversation" in out
    ((completion,),) = run_generate([make_messages("Hi")], [replace(SAMPLING, seed=4)])
    assert out.endswith(f"{completion.text}\n")


@pytest.mark.slow
def test_a_model_fine_tuned_on_chat_stops_by_itself_at_every_station(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SFT on chats, GRPO from its model, evaluation, chat and transformers: no completion reaches its limit."""
    talks = [[*make_messages(f"{number}?"), {"role": "assistant", "content": "ok"}] for number in range(32)]
    prompts = [{"prompt": f"{number}?", "answer": "ok"} for number in range(16)]
    for name, content in {"talks": [{"messages": talk} for talk in talks], "tasks": prompts}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    data = ["--data.path=talks.jsonl", "--held_out.rows=0", "--steps=60", "--batch_size=8", "--optimizer.lr=0.01"]
    settings = {"kind": "dataset", "path": "tasks.jsonl", "reward": "exact", "chat": "true", "workers": "0"}
    tasks = [*(f"--environment.{name}={value}" for name, value in settings.items()), "--sampling.max_new_tokens=16"]
    sizes = ["--steps=1", "--prompts_per_step=4", "--samples_per_prompt=2", "--evaluation.tasks=4"]
    for command, words in (
        ("sft", ["--model=tiny-dense", *data]),
        ("grpo", ["--model=sft/model", *tasks, *sizes]),
        ("eval", ["--model=grpo/model", *tasks, "--tasks=4"]),
    ):
        common = [f"--run={command}", "--budget=128", "--loggers=[]", "--device=cpu"]
        done = run_command([command, *words, *common], tmp_path)
        assert done.returncode == 0, done.stderr
    for run in ("grpo", "eval"):
        metrics = json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1])
        assert (metrics["truncated"], metrics["reward_mean"]) == (0, 1), run
    monkeypatch.setattr("sys.stdin", io.StringIO("3?\n"))
    assert main(["chat", str(tmp_path / "grpo" / "model"), "--temperature=0"]) == 0
    assert capsys.readouterr().out == "ok\n"
    # In transformers alone, with what the export says.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "grpo" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "grpo" / "model")
    prompt = tokenizer.apply_chat_template(talks[3][:1], add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "ok<|im_end|>"
