"""Invalid inputs and starts: exit code 2 and one error line with value, limit and fix; nothing is written.

A row is one mistake. Where it has a mend, the corrected command then works in the same directory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postlude.cli import main
from postlude.recipes.run.lock import RunLock

SHORT = ("--budget=256", "--save_every=0", "--export=false")
SFT = ("sft", "--data.path=rows.jsonl", "--batch_size=2", "--steps=1", *SHORT)
GRPO = (
    "grpo",
    "--environment=dataset",
    "--environment.path=tasks.jsonl",
    "--environment.reward=reward.py:score",
    "--environment.workers=1",
    "--sampling.max_new_tokens=4",
    "--prompts_per_step=2",
    "--samples_per_prompt=2",
    "--steps=1",
    "--evaluation.every=0",
    *SHORT,
)
DPO = ("dpo", "--data.path=pairs.jsonl", "--batch_size=2", "--steps=1", *SHORT)
TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def lines(path: str, *rows: Any) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_turn(content: Any) -> None:
    lines("rows.jsonl", {"messages": TALK}, {"messages": [{"role": "user", "content": content}, TALK[1]]})


def reward(text: str) -> None:
    Path("reward.py").write_text(text)


def model(change: Callable[[Path], Any]) -> Callable[[], None]:
    """Copies the model in `model/` and changes it."""

    def arrange() -> None:
        change(Path("model"))

    return arrange


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def other_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({str(number): number for number in range(900)}, unk_token="899"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for file in folder.glob("token*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1").save_pretrained(folder)


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@dataclass(frozen=True)
class InvalidStart:
    """One user error: the setup in an empty folder, the command, its error text, and the corrected command."""

    name: str
    command: tuple[str, ...]
    sentences: tuple[str, ...]
    arrange: Callable[[], Any] = lambda: None
    mend: Callable[[], Any] | None = None
    """Done before the corrected command."""
    mended: tuple[str, ...] | None = None
    """The corrected command."""


def sft(name: str, *settings: str, sentences: tuple[str, ...], **options: Any) -> InvalidStart:
    return InvalidStart(name, (*SFT, *settings), sentences, **options)


def grpo(name: str, *settings: str, sentences: tuple[str, ...], **options: Any) -> InvalidStart:
    return InvalidStart(name, (*GRPO, *settings), sentences, **options)


def good_rows() -> None:
    lines("rows.jsonl", *[{"messages": TALK}] * 4)


BAD = [
    # the layout
    sft("tp does not divide the heads", "--layout=tp=3", sentences=("8 heads", "tp=3", r"Use tp=2 or 4"), mended=SFT),
    sft("experts spread where there are none", "--layout=tp=2,ep=2", sentences=("ep is 2", "no experts", "Use ep=1")),
    sft("another number of ranks", "--layout=tp=2", "--nproc=3", sentences=(r"tp=2\) runs on 2", "3 are", "Start 2")),
    sft(
        "a bubble that is none",
        "--overlap=zero_bubble",
        sentences=("'zero_bubble' fills the bubble", "pp is 1", "Use pp=2"),
    ),
    sft(
        "an overlap that is none",
        "--overlap=zb",
        sentences=('"overlap" is "zb"', 'give true or false or "zero_bubble"'),
    ),
    sft("virtual stages alone", "--layout=vpp=2", sentences=("vpp=2", "at least 2", "Use vpp=1, or raise pp")),
    # the model
    grpo(
        "experts replayed where there are none",
        "--replay_routing=true",
        sentences=("replay_routing", "tiny-dense has no experts", "Set it to false"),
    ),
    sft(
        "no such model",
        "--model=modle",
        sentences=("'modle'", "neither a model directory"),
        mended=(*SFT, "--model=model"),
    ),
    sft(
        "pickled weights",
        "--model=model",
        sentences=(r"pytorch_model\.bin", "never loaded", "convert them"),
        arrange=model(pickled),
    ),
    sft(
        "another model's tokenizer",
        "--model=model",
        sentences=("gives token 899", "ends at 263", "own tokenizer"),
        arrange=model(other_tokenizer),
    ),
    sft(
        "a config with text for a number",
        "--model=model",
        sentences=(r"config\.json", "'hidden_size': TypeError", "int"),
        arrange=model(lambda folder: change_config(folder, hidden_size="wide")),
    ),
    # the dataset
    sft("no such dataset", "--data.path=row.jsonl", sentences=(r"row\.jsonl", r"did you mean rows\.jsonl"), mended=SFT),
    sft(
        "an empty dataset",
        sentences=(r"rows\.jsonl has no rows", "at least one"),
        arrange=lambda: Path("rows.jsonl").write_text(""),
        mend=good_rows,
        mended=SFT,
    ),
    sft(
        "a column of another name",
        sentences=('no column "prompt"', "promt", 'did you mean "promt"'),
        arrange=lambda: lines("rows.jsonl", {"promt": "a", "completion": "b"}),
        mended=(*SFT, "--data.prompt=promt"),
    ),
    sft(
        "a content with an image",
        sentences=(r"message 0 \(user\) of line 2", "models here read only text", "leave the row out"),
        arrange=lambda: first_turn([{"type": "text", "text": "2+2?"}, {"type": "image", "url": "sum.png"}]),
    ),
    sft(
        "a row that is too long",
        sentences=(
            r'line 2 of rows\.jsonl has \d+ tokens in "messages"',
            "for budget=256. Raise budget",
            "data.overlong to drop or cut",
        ),
        arrange=lambda: first_turn("2" * 300),
        mended=(*SFT, "--data.overlong=drop"),
    ),
    sft(
        "more rows held out than there are",
        "--held_out.rows=4",
        sentences=("4 rows are to be held out", "Lower held_out.rows"),
    ),
    InvalidStart(
        "a pair without a prompt",
        DPO,
        (r"line 1 of pairs\.jsonl has no prompt", "Give one"),
        arrange=lambda: lines("pairs.jsonl", {"chosen": "a", "rejected": "b"}),
        mend=lambda: lines("pairs.jsonl", *[{"prompt": "?", "chosen": "a", "rejected": "b"}] * 3),
        mended=DPO,
    ),
    # rewards
    grpo(
        "no such reward file",
        "--environment.reward=rewards.py:score",
        sentences=("rewards.py", r"did you mean reward\.py"),
    ),
    grpo("drafts without a depth", "--sampling.draft=mtp", sentences=('draft="mtp"', "has none", "or mtp in a recipe")),
    grpo(
        "no such reward",
        "--environment.reward=reward.py:scores",
        sentences=("no scores", "did you mean score"),
        mended=GRPO,
    ),
    grpo(
        "a reward that asks for no column",
        sentences=(r'score\(completion, gold\) asks for "gold"', "completion_ids, length, truncated"),
        arrange=lambda: reward("def score(completion, gold):\n    return 1.0\n"),
    ),
    grpo(
        "a reward that raises",
        sentences=("ZeroDivisionError", r"reward\.py, line 2", r"trial on line 1 of tasks\.jsonl", "Fix it"),
        arrange=lambda: reward("def score(prompt, completion, example):\n    return 1 / 0\n"),
        mend=lambda: reward("def score(prompt, completion, example):\n    return 1.0\n"),
        mended=GRPO,
    ),
    grpo(
        "a reward that hangs",
        "--environment.timeout=0.5",
        sentences=(r"took more than 0\.5 s", "trial on line 1"),
        arrange=lambda: reward("import time\ndef score(prompt, completion, example):\n    time.sleep(60)\n"),
    ),
    # tasks
    grpo(
        "a warm start without answers",
        "--warm_start.steps=1",
        sentences=('line 1 of tasks.jsonl has no "answer"', "it has: prompt", "warm_start.steps to 0"),
        arrange=lambda: lines("tasks.jsonl", *[{"prompt": "2+2="}] * 3),
    ),
    grpo(
        "a prompt that is too long",
        sentences=(r"line 2 of tasks\.jsonl has 300 tokens", "leaves 252", "Raise budget", "overlong"),
        arrange=lambda: lines("tasks.jsonl", {"prompt": "2"}, {"prompt": "2" * 300}),
        mended=(*GRPO, "--environment.overlong=drop"),
    ),
    grpo(
        "no prompt that is short enough",
        "--environment.overlong=drop",
        sentences=(r"every prompt of tasks\.jsonl", "252 tokens", "budget=256", "Raise budget"),
        arrange=lambda: lines("tasks.jsonl", {"prompt": "2" * 300}),
        mended=(*GRPO, "--budget=310"),
    ),
    grpo(
        "answers that leave no room",
        "--sampling.max_new_tokens=300",
        sentences=("max_new_tokens is 300", "256", "Raise bu"),
    ),
    grpo(
        "no task to train on",
        "--evaluation.every=1",
        "--evaluation.tasks=3",
        sentences=("3 tasks are to be held out", "Lower evaluation.tasks"),
    ),
    InvalidStart(
        "no such reasoning-gym task",
        ("eval", "--environment.task=chain_sums", "--budget=256", "--sampling.max_new_tokens=4"),
        ('no task "chain_sums"', "did you mean chain_sum"),
    ),
    InvalidStart(
        "no such setting of a task",
        ("eval", "--environment.settings.min_term=2", "--budget=256", "--sampling.max_new_tokens=4"),
        ('no setting "min_term"', 'did you mean "min_terms"'),
    ),
    grpo(
        "a prompt without tokens",
        sentences=(r"the prompt of line 2 of tasks\.jsonl has no tokens", "Give it text"),
        arrange=lambda: lines("tasks.jsonl", {"prompt": "2"}, {"prompt": ""}),
    ),
    # objectives
    sft("no such objective", "--objective=mine.py:los", sentences=("no los", "did you mean loss"), mended=None),
    sft("no such kind of objective", "--objective.kind=stf", sentences=("stf", "sft")),
    grpo(
        "no such key of an objective",
        "--objective.clip_hihg=0.3",
        sentences=("clip_hihg", 'did you mean "objective.clip_high"'),
    ),
    grpo(
        "a bound of an objective",
        "--objective.clip_low=-1",
        sentences=("clip_low", "-1"),
        mended=(*GRPO, "--objective.clip_low=0.1"),
    ),
    # optimizers
    sft("a negative learning rate", "--optimizer.lr=-1", sentences=("lr", "-1"), mended=(*SFT, "--optimizer.lr=1e-4")),
    grpo("negative steps of a warm start", "--warm_start.steps=-1", sentences=("steps", "-1")),
    # configs
    grpo(
        "an address that is none",
        "--rollout.kind=server",
        "--rollout.urls=[localhost:8000]",
        sentences=('"rollout.urls.0" is "localhost:8000"', r"give text that matches \^https\?://"),
    ),
    sft("a seed that is too large", "--seed=18446744073709551616", sentences=("seed", "1844", r"of at most 9\.22337e")),
    sft(
        "an adapter for a model",
        "--model=adapter",
        sentences=("adapter has no config.json", "It is an adapter: merge it with `postlude convert adapter BASE DST`"),
        arrange=lambda: (Path("adapter").mkdir(), Path("adapter/adapter_config.json").write_text("{}")),
    ),
    sft("a key that is none", "--optimzer.lr=1", sentences=("optimzer.lr", 'did you mean "optimizer.lr"')),
    InvalidStart("no such config", ("sft", "none.yaml"), (r"none\.yaml",)),
    # the run's directory
    sft(
        "a file in its place",
        sentences=("run", "is a file", "--run"),
        arrange=lambda: Path("run").write_text("mine"),
        mended=(*SFT, "--run=other"),
    ),
    InvalidStart(
        "another model in the way of an export",
        ("convert", "tiny-moe", "model"),
        ("model", "holds"),
        mended=("convert", "tiny-moe", "other"),
    ),
]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Returns what a folder holds, without the bytecode of imported files."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture(scope="module")
def valid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which everything is valid."""
    folder = tmp_path_factory.mktemp("good")
    assert main(["convert", "tiny-dense", str(folder / "model")]) == 0
    for name, rows in {
        "rows.jsonl": [{"messages": TALK}] * 4,
        "pairs.jsonl": [{"prompt": "?", "chosen": "a", "rejected": "b"}] * 3,
        "tasks.jsonl": [{"prompt": f"{number}+1=", "answer": f"{number + 1}"} for number in range(3)],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def score(prompt, completion, example):\n    return float(len(completion) % 2)\n"
    )
    (folder / "mine.py").write_text("def loss(inputs, *, scale=1.0):\n    raise NotImplementedError\n")
    return folder


@pytest.fixture
def directory(valid_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(valid_folder, folder)
    monkeypatch.chdir(folder)
    return folder


def run(command: tuple[str, ...]) -> int:
    if command[0] in ("sft", "dpo", "grpo", "eval") and not any(word.startswith("--run") for word in command):
        command = (*command, "--run=run")
    try:
        return main(list(command))
    except SystemExit as left:
        return int(left.code or 0)


def assert_refused(
    command: tuple[str, ...], sentences: tuple[str, ...], capsys: pytest.CaptureFixture[str], code: int = 2
) -> None:
    """Asserts exit code and one error line with all texts, and that no file changed."""
    before = tree(Path())
    capsys.readouterr()
    assert run(command) == code
    error_output = capsys.readouterr().err
    assert "Traceback" not in error_output
    assert error_output.startswith(f"postlude {command[0]}: "), error_output
    assert len(error_output.strip().splitlines()) == 1, error_output
    for part in sentences:
        assert re.search(part, error_output), f"{part!r} is not in: {error_output}"
    assert tree(Path()) == before


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
@pytest.mark.slow
def test_invalid_start_gives_one_line_error_and_writes_nothing(
    bad: InvalidStart, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad.arrange()
    assert_refused(bad.command, bad.sentences, capsys)
    if bad.mended is not None:
        if bad.mend is not None:
            bad.mend()
        assert run(bad.mended) == 0


def test_missing_gpu_is_refused(directory: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert_refused((*SFT, "--device=cuda"), ("cuda", "no GPU", "--device cpu"), capsys)
    assert run((*SFT, "--device=cpu")) == 0


def test_unwritable_run_directory_is_refused(directory: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert_refused(SFT, ("run", "cannot be written to", "--run"), capsys)


def test_full_disk_is_refused(directory: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(directory)._replace(free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert_refused(SFT, (r"checkpoint takes about \d", r"1\.0 MiB left", "Make room"), capsys)


def test_run_directory_in_use_by_another_process_is_refused(directory: Path, capsys: Any) -> None:
    (directory / "run").mkdir()
    lock = RunLock(directory / "run")
    assert_refused(SFT, ("in use by", "--run"), capsys)
    lock.release()
    assert run(SFT) == 0


def test_run_of_another_model_or_optimizer_is_refused(directory: Path, capsys: Any) -> None:
    assert run(SFT) == 0
    assert_refused((*SFT, "--model=tiny-moe"), ("another run", "model", "tiny-dense", "tiny-moe", "--run"), capsys)
    assert_refused((*SFT, "--optimizer=sgd"), ("another run", "optimizer", "--run"), capsys)
    assert_refused((*SFT, "--seed=3"), ("another run", "seed is 0 there and 3 here", "--run"), capsys)
    (directory / "run" / "config.yaml").write_text("model: [\n")
    assert_refused(SFT, (r"config\.yaml cannot be read", "--run"), capsys)
    assert run((*SFT, "--run=other")) == 0


def test_non_finite_weights_are_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    not_finite(directory / "model")
    assert run((*SFT, "--model=model")) == 2
    assert "the weights of model are not finite: their norm is nan. Fetch or export" in capsys.readouterr().err


@pytest.mark.slow
def test_missing_or_incomplete_checkpoints_are_refused(
    directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    two = (*SFT, "--steps=2", "--save_every=1", "--keep_checkpoints=2")
    assert run(two) == 0
    three_steps = (*two, "--steps=3")
    assert_refused((*three_steps, "--from=run/step-9"), ("step-000009", "has step-000001, step-000002"), capsys)
    assert_refused((*three_steps, "--resume-from=ten"), ("'ten' names no step", "step-100"), capsys)
    checkpoint_files = tree(directory / "run" / "checkpoints" / "step-000002")
    damage(directory / "run" / "checkpoints" / "step-000002")
    assert run(three_steps) == 0
    assert "step-000002" in caplog.text  # named, and the one before it taken
    assert any(
        set(tree(leftover)) == set(checkpoint_files)
        for leftover in (directory / "run" / "checkpoints").iterdir()
        if "damaged" in leftover.name
    )
    (directory / "run" / "checkpoints" / "step-000003" / "state.json").unlink()
    caplog.clear()
    assert run(three_steps) == 0
    assert "step-000003 has no state.json" in caplog.text  # the one before it taken again
    assert (directory / "run" / "checkpoints" / "step-000003" / "state.json").is_file()
    for checkpoint in (directory / "run" / "checkpoints").glob("step-*"):
        damage(checkpoint)
    capsys.readouterr()
    assert run((*three_steps, "--steps=4")) == 2
    assert "every checkpoint of" in capsys.readouterr().err


def damage(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
