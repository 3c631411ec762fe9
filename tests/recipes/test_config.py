"""The config loader: written configs are read back, later values win, and every mistake gives one clear error."""

# ruff: noqa: E501 - sentences stand whole, as a user sees them

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, create_model, model_validator

from postlude.layout import Layout
from postlude.objectives import SFT, Distill, PolicyGradient, Preference, ReferenceKL, RolloutCorrection
from postlude.optimizer import SGD, AdamW
from postlude.recipes.config.help import describe
from postlude.recipes.config.load import ConfigError, load, to_yaml
from postlude.recipes.config.schema import Settings, TaggedUnion, options


class ReasoningGym(Settings):
    task: str
    """Name of the task."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task as they are."""


class Jsonl(Settings):
    path: Path
    """The file with one problem a line."""
    weight: float = 1.0
    """Weight of the dataset."""

    @model_validator(mode="after")
    def _drawn(self) -> Self:
        if self.weight <= 0:
            raise ValueError(f"weight is {self.weight:g}, but it must be above 0.")
        return self


Environment = Annotated[ReasoningGym | Jsonl, TaggedUnion(reasoning_gym=ReasoningGym, jsonl=Jsonl)]


class Evaluation(Settings):
    every: int
    """Steps between two evaluations."""
    prompts: int | None = 64
    """Number of prompts; none takes all."""


class Base(Settings):
    seed: int = 0
    """Random seed.

    The same seed gives the same run."""


class Run(Base):
    model: str
    """The model to train."""
    steps: int = 100
    """Optimizer steps."""
    name: str | None = None
    """Name of the run."""
    resume: bool = True
    """Whether to resume the last run."""
    directory: Path = Path("runs")
    """Output directory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype."""
    recompute: Literal["none", "full"] = "none"
    """Activations to recompute."""
    world: Literal[1, 2, 4] | None = None
    """Number of ranks."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    betas: tuple[float, int] = (0.9, 2)
    """A number and a whole one."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    mixture: dict[str, float] = Field(default_factory=lambda: {"math": 1.0})
    """Weights of datasets."""
    optimizer: Annotated[AdamW | SGD, TaggedUnion(adamw=AdamW, sgd=SGD)] = AdamW(lr=3e-6)
    """Optimizer."""
    objective: PolicyGradient = PolicyGradient(clip_high=0.28)
    """Objective to minimise."""
    environment: Environment
    """Source of prompts."""
    held_out: tuple[Environment, ...] = ()
    """Evaluation sets."""
    evaluation: Evaluation | None = None
    """When it is evaluated."""
    layout: Annotated[Layout, TaggedUnion(Layout)] = Layout()
    """Parallel layout."""
    extra: Any = None
    """Whatever else."""


class Small(Settings):
    steps: int = 100
    """Optimizer steps."""
    layout: Annotated[Layout, TaggedUnion(Layout)] = Layout()
    """Parallel layout."""
    evaluation: Evaluation
    """When it is evaluated."""


GIVEN = ("--model", "tiny", "--environment", "{kind: reasoning_gym, task: sums}")
DEFAULT = Run(model="tiny", environment=ReasoningGym(task="sums"))


def changed(run: Run, **changes: Any) -> Run:
    return run.model_copy(update=changes)


def written(text: str, folder: Path) -> Path:
    file = folder / "grpo.yaml"
    file.write_text(text, encoding="utf-8")
    return file


# what is written is read back

finite = st.floats(allow_nan=False, allow_infinity=False)
numbers = st.floats(allow_nan=False)
positive = st.floats(min_value=1e-30, max_value=1e30)
words = st.text() | st.sampled_from(
    ["", "none", "None", "null", "~", "no", "yes", "true", "1e-6", "1_0", "1.", "+.5", "010", "0x1F", "0o7", "1:30", "-",
     ".inf", ".nan", "2024-01-01", "<<", "=", "a: b", "# c", "[a]", "{a: 1}", " a ", "a\nb\n", "\n", "'", '"', "\x85"]
)  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
environments = st.builds(ReasoningGym, task=words, settings=st.dictionaries(words, anything, max_size=3)) | st.builds(
    Jsonl, path=words.filter(lambda text: "\0" not in text).map(Path), weight=positive
)
shares = st.floats(0, 1, exclude_max=True)
optimizers = st.builds(
    AdamW, lr=positive, betas=st.tuples(shares, shares), max_grad_norm=st.none() | positive, eps=positive
) | st.builds(SGD, lr=positive, momentum=shares)
objectives = st.builds(
    PolicyGradient,
    clip_low=st.floats(0, 1),
    entropy=finite,
    correction=st.none() | st.builds(RolloutCorrection, truncate=st.sampled_from([None, (0.0, 2.0), (0.5, math.inf)])),
    kl=st.none() | st.builds(ReferenceKL, coefficient=positive, estimator=st.sampled_from(["k2", "k3"])),
    over=words.filter(lambda text: text != "sequences"),
)
layouts = st.builds(lambda pp, vpp, ep: Layout(pp=1 + pp, vpp=vpp, cp=ep, ep=ep), *[st.integers(1, 4)] * 3)
runs = st.builds(
    Run,
    seed=st.integers(),
    model=words,
    steps=st.integers(),
    name=st.none() | words,
    resume=st.booleans(),
    directory=words.map(Path),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    recompute=st.sampled_from(["none", "full"]),
    world=st.sampled_from([None, 1, 2, 4]),
    stop=st.lists(words, max_size=3).map(tuple),
    betas=st.tuples(numbers, st.integers()),
    tags=st.lists(words, max_size=3),
    mixture=st.dictionaries(words, numbers, max_size=3),
    optimizer=optimizers,
    objective=objectives,
    environment=environments,
    held_out=st.lists(environments, max_size=2).map(tuple),
    evaluation=st.none() | st.builds(Evaluation, every=st.integers(), prompts=st.none() | st.integers()),
    layout=layouts,
    extra=anything,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(runs)
def test_a_written_config_is_read_back(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert load(Run, written(to_yaml(run), Path(folder))) == run


@pytest.mark.slow
@settings(max_examples=25)
@given(runs)
def test_other_yaml_parsers_read_written_configs_equally(run: Run) -> None:
    read = yaml.safe_load(to_yaml(run))
    for field in ("seed", "model", "name", "resume", "dtype", "world", "tags", "mixture"):
        assert read[field] == getattr(run, field)


@settings(max_examples=40)
@given(
    runs, st.lists(st.tuples(st.sampled_from(["steps", "name", "objective.entropy", "layout.tp"]), st.integers(1, 9)))
)
def test_overrides_beat_the_file_and_the_last_override_wins(run: Run, later: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        actual = load(Run, written(to_yaml(run), Path(folder)), [f"--{key}={value}" for key, value in later])
    last = dict(later)
    assert actual == changed(
        run,
        steps=last.get("steps", run.steps),
        name=str(last["name"]) if "name" in last else run.name,
        objective=replace(run.objective, entropy=float(last.get("objective.entropy", run.objective.entropy))),
        layout=replace(run.layout, tp=last.get("layout.tp", run.layout.tp)),
    )


# what may be written


def test_config_without_a_file_has_the_defaults() -> None:
    assert load(Run, None, GIVEN) == DEFAULT


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("steps: 1_000", {"steps": 1000}),
        ("name: no", {"name": "no"}),
        ("name: 010", {"name": "010"}),
        ("name: none", {"name": None}),
        ("name:", {"name": None}),
        ("name: 'none'", {"name": "none"}),
        ("recompute: none", {"recompute": "none"}),
        ("resume: False", {"resume": False}),
        ("resume: no", {"resume": False}),
        ("directory: /tmp/x", {"directory": Path("/tmp/x")}),
        ("world: 2", {"world": 2}),
        ("stop: [a, 1]", {"stop": ("a", "1")}),
        ("betas: [1e-3, 4]", {"betas": (0.001, 4)}),
        ("mixture: {code: 1}", {"mixture": {"code": 1.0}}),
        ("mixture: {}", {"mixture": {}}),
        ("optimizer: {lr: 1e-6}", {"optimizer": AdamW(lr=1e-6)}),
        ("mixture: {a: .inf}", {"mixture": {"a": math.inf}}),
        ("optimizer: {kind: adamw}", {"optimizer": AdamW(lr=3e-6)}),
        ("optimizer: sgd", {"optimizer": SGD()}),
        ("optimizer: {kind: sgd, lr: '1'}", {"optimizer": SGD(lr=1.0)}),
        ("objective: {kl: {coefficient: 1e-3}}", {"objective": PolicyGradient(clip_high=0.28, kl=ReferenceKL(coefficient=0.001))}),
        ("layout: pp=2,cp=2", {"layout": Layout(pp=2, cp=2)}),
        ("layout: {pp: 2}", {"layout": Layout(pp=2)}),
        ("evaluation: {every: 3}", {"evaluation": Evaluation(every=3)}),
        ("held_out: [{kind: jsonl, path: a}]", {"held_out": (Jsonl(path=Path("a")),)}),
        ("extra: {a: [1, 1e-6, no, none, {b: 010}]}", {"extra": {"a": [1, 1e-6, "no", None, {"b": "010"}]}}),
        ("tags: &x [a]\nstop: *x", {"tags": ["a"], "stop": ("a",)}),
        ("# nothing", {}),
    ],
)  # fmt: skip
def test_file_values_are_parsed_by_field_type(text: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert load(Run, written(text, tmp_path), GIVEN) == changed(DEFAULT, **changes)


@pytest.mark.parametrize(
    ("text", "overrides", "changes"),
    [
        ("", "--steps|-3", {"steps": -3}),
        ("", "--name=", {"name": None}),
        ("", "--model={a: b: c}", {"model": "{a: b: c}"}),
        ("", "--model=[a]", {"model": "[a]"}),
        ("", "--model={a: 1}", {"model": "{a: 1}"}),
        ("", "--model|a: b # c", {"model": "a: b # c"}),
        ("", "--model=--x=y", {"model": "--x=y"}),
        ("", "--model=", {"model": ""}),
        ("", "--model=null", {"model": "null"}),
        ("", "--betas|[0.5, 3]", {"betas": (0.5, 3)}),
        ("", "--optimizer|sgd|--optimizer.lr|1", {"optimizer": SGD(lr=1.0)}),
        ("", "--optimizer.kind|sgd", {"optimizer": SGD()}),
        ("", "--optimizer|{kind: sgd, lr: 1}|--optimizer.lr|2", {"optimizer": SGD(lr=2.0)}),
        ("optimizer: {kind: adamw, eps: 1}", "--optimizer|sgd", {"optimizer": SGD()}),
        ("layout: pp=2", "--layout.vpp|2", {"layout": Layout(pp=2, vpp=2)}),
        ("layout: {pp: 2}", "--layout=cp=2", {"layout": Layout(cp=2)}),
        ("evaluation: none", "--evaluation.every|3", {"evaluation": Evaluation(every=3)}),
        ("evaluation: {every: 3}", "--evaluation|none", {}),
        ("", "--mixture.code|2", {"mixture": {"math": 1.0, "code": 2.0}}),
        ("mixture: {a: 1}", "--mixture.b|2", {"mixture": {"a": 1.0, "b": 2.0}}),
        ("extra: {a: {b: 1}}", "--extra.a.c|2", {"extra": {"a": {"b": 1, "c": 2}}}),
        ("", "--environment.settings.a|2", {"environment": ReasoningGym(task="sums", settings={"a": 2})}),
    ],
)
def test_command_line_overrides_the_file(text: str, overrides: str, changes: Any, tmp_path: Path) -> None:
    actual = load(Run, written(text, tmp_path), [*GIVEN, *overrides.split("|")])
    assert actual == changed(DEFAULT, **changes)


def test_section_without_a_default_is_built_from_its_keys() -> None:
    assert load(Small, None, ["--evaluation.every=3"]) == Small(evaluation=Evaluation(every=3))


# every mistake is a sentence

MODEL = "model: tiny\nenvironment: {kind: jsonl, path: a}\n"  # two lines; the third is the mistake


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("optimzer: {lr: 1}", 'config key "optimzer" is unknown in FILE line 3; did you mean "optimizer"?'),
        ("optimizer:\n  lrr: 1", 'config key "optimizer.lrr" is unknown for adamw in FILE line 4; did you mean "optimizer.lr"?'),
        ("optimizer: {kind: sgd, eps: 1}", 'config key "optimizer.eps" is unknown for sgd in FILE line 3; it is a key of adamw: set optimizer.kind.'),
        ("lr: 3", 'config key "lr" is unknown in FILE line 3; did you mean "optimizer.lr"?'),
        ("weight_decay: 3", 'config key "weight_decay" is unknown in FILE line 3; did you mean "optimizer.weight_decay"?'),
        ("every: 3", 'config key "every" is unknown in FILE line 3; did you mean "evaluation.every"?'),
        ("rollout: {count: 2}", 'config key "rollout" is unknown in FILE line 3; it is a key of grpo, ppo, eval.'),
        ("optimizer.lr: 3", 'config key "optimizer.lr" is unknown in FILE line 3; write what follows a dot on a line of its own, indented.'),
        ("? [a]\n: 3", 'config key "?" is unknown in FILE line 3; the keys there are seed, model, steps, name, resume, directory, dtype, recompute, world, stop, betas, tags, mixture, optimizer, objective, environment, held_out, evaluation, layout, extra.'),
        ("steps: many", 'config key "steps" is "many" in FILE line 3; give a whole number.'),
        ("steps: 1e3", 'config key "steps" is "1e3" in FILE line 3; give a whole number.'),
        ("steps: [1]", 'config key "steps" is a list in FILE line 3; give a whole number.'),
        ("steps: {}", 'config key "steps" is a mapping in FILE line 3; give a whole number.'),
        ("steps: {a: 1}", 'config key "steps.a" is unknown in FILE line 3; "steps" takes a whole number.'),
        ("resume: maybe", 'config key "resume" is "maybe" in FILE line 3; give true or false.'),
        ("dtype: Float32", 'config key "dtype" is "Float32" in FILE line 3; give "float32" or "bfloat16".'),
        ("world: 3", 'config key "world" is "3" in FILE line 3; give 1, 2 or 4 or none.'),
        ("directory:", 'config key "directory" is empty in FILE line 3; give a path.'),
        ("stop: a", 'config key "stop" is "a" in FILE line 3; give a list in brackets, each text.'),
        ("betas: [1, 2, 3]", 'config key "betas" is a list in FILE line 3; give a list of 2: a number, a whole number.'),
        ("betas:\n- 1\n- x", 'config key "betas.1" is "x" in FILE line 5; give a whole number.'),
        ("betas: [.nan, 1]", 'config key "betas.0" is ".nan" in FILE line 3; give a number.'),
        ("mixture: 3", 'config key "mixture" is "3" in FILE line 3; give names and values, each a number.'),
        ("mixture: {a: x}", 'config key "mixture.a" is "x" in FILE line 3; give a number.'),
        ("extra: !!int x", 'config key "extra" is "x" in FILE line 3; give any value.'),
        ("extra: !mine x", 'config key "extra" is "x" in FILE line 3; give any value.'),
        ("objective: 3", 'config key "objective" is "3" in FILE line 3; give keys and values.'),
        ("objective:", 'config key "objective" is empty in FILE line 3; give keys and values.'),
        ("objective: []", 'config key "objective" is a list in FILE line 3; give keys and values.'),
        ("optimizer: lion", 'config key "optimizer" is "lion" in FILE line 3; give keys and values of kind "adamw" or "sgd".'),
        ("optimizer: {kind: lion}", 'config key "optimizer.kind" is "lion" in FILE line 3; give "adamw" or "sgd".'),
        ("held_out: [{path: a}]", 'config key "held_out.0.kind" is missing in FILE line 3; give "reasoning_gym" or "jsonl" there.'),
        ("layout: 3", "config key \"layout\" in FILE line 3: layout '3': '3' is not an axis; the axes are pp, vpp, dp_replicate, dp_shard, cp, tp, ep."),
        ("evaluation: {}", 'config key "evaluation.every" is missing in FILE line 3; give a whole number there or as --evaluation.every.'),
        ("held_out:\n- {kind: jsonl, path: a, weight: 0}", 'config key "held_out.0" in FILE line 4: weight is 0, but it must be above 0.'),
        ("steps: 1\n\nsteps: 2", 'config key "steps" is given twice, in FILE line 3 and in FILE line 5; keep one.'),
        ("extra: {a: {b: 1, b: 2}}", 'config key "extra.a.b" is given twice, in FILE line 3 and in FILE line 3; keep one.'),
        ("steps: a: b", "FILE line 3 is not YAML: mapping values are not allowed here."),
        ("steps: [1", "FILE line 4 is not YAML: expected ',' or ']', but got '<stream end>'."),
        ("---\nsteps: 3", "FILE line 3 is not YAML: but found another document."),
        ("extra: &a [*a]", "FILE is not YAML: a value contains itself, or is nested too deeply."),
        ("extra: \x00", "FILE is not YAML: unacceptable character #x0000: special characters are not allowed in \"<unicode string>\", position 55."),
    ],
)  # fmt: skip
def test_invalid_file_gives_clear_error(text: str, sentence: str, tmp_path: Path) -> None:
    file = written(f"{MODEL}{text}\n", tmp_path)
    with pytest.raises(ConfigError) as error:
        load(Run, file)
    assert str(error.value).replace(str(file), "FILE") == sentence


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("--optimzer.lr|1", 'config key "optimzer.lr" is unknown on the command line; did you mean "optimizer.lr"?'),
        ("--optimzer.foo|1", 'config key "optimzer.foo" is unknown on the command line; did you mean "optimizer"?'),
        ("--steps.x|1", 'config key "steps.x" is unknown on the command line; "steps" takes a whole number.'),
        ("--steps|3|--steps.x|1", 'config key "steps.x" is unknown on the command line; "steps" takes a whole number.'),
        ("--betas|[1, 2]|--betas.0|1", 'config key "betas.0" is unknown on the command line; "betas" takes a list of 2: a number, a whole number.'),
        ("--betas.0|1", 'config key "betas.0" is unknown on the command line; "betas" takes a list of 2: a number, a whole number.'),
        ("--steps|many", 'config key "steps" is "many" on the command line; give a whole number.'),
        ("--betas|[1", 'config key "betas" is "[1" on the command line; give a list of 2: a number, a whole number.'),
        ("--steps", "--steps has no value; write --steps VALUE or --steps=VALUE."),
        ("--resume|--steps|3", "--resume has no value; write --resume VALUE or --resume=VALUE."),
        ("steps=3", '"steps" is not a config key; write --a.b VALUE or --a.b=VALUE, and a config file before them.'),
        ("--a..b=3", '"--a..b" is not a config key; write --a.b VALUE or --a.b=VALUE, and a config file before them.'),
        ("--|3", '"--" is not a config key; write --a.b VALUE or --a.b=VALUE, and a config file before them.'),
        ("--extra|{a: 1, a: 2}", 'config key "extra.a" is given twice, on the command line and on the command line; keep one.'),
        ("--objective.kl.coefficient|-1", 'config key "objective.kl.coefficient" is "-1" on the command line; give a number above 0.'),
        ("--environment.weight|0", 'config key "environment" in FILE line 2 and on the command line: weight is 0, but it must be above 0.'),
        ("--layout.vpp|2", 'config key "layout" on the command line: Layout(pp=1, vpp=2): virtual stages interleave pipeline ranks, so they need pp of at least 2. Use vpp=1, or raise pp.'),
    ],
)  # fmt: skip
def test_invalid_command_line_gives_clear_error(overrides: str, sentence: str, tmp_path: Path) -> None:
    file = written(MODEL, tmp_path)
    with pytest.raises(ConfigError) as error:
        load(Run, file, overrides.split("|"))
    assert str(error.value).replace(str(file), "FILE") == sentence


def test_error_names_a_missing_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(Run)
    assert str(error.value) == 'config key "model" is missing; give text as --model.'
    with pytest.raises(ConfigError) as error:
        load(Run, written("model: tiny", tmp_path))
    assert str(error.value) == (
        f'config key "environment" is missing in {tmp_path / "grpo.yaml"}; give keys and values of kind "reasoning_gym" '
        'or "jsonl" there or as --environment.'
    )
    with pytest.raises(ConfigError, match=r'config key "evaluation.every" is missing; give a whole number'):
        load(Small)


def test_error_names_a_missing_file(tmp_path: Path) -> None:
    written("", tmp_path)
    with pytest.raises(ConfigError) as error:
        load(Run, tmp_path / "grop.yaml")
    assert str(error.value) == (
        f'there is no config file "{tmp_path / "grop.yaml"}"; did you mean "{tmp_path / "grpo.yaml"}"?'
    )
    with pytest.raises(ConfigError, match=r"there is no config file .*; the current directory is /"):
        load(Run, tmp_path / "other.yaml")


def test_error_names_a_file_that_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo.yaml line 2 is not a config; write lines of `key: value`\.$"):
        load(Run, written("# list\n- a", tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match=r"latin.yaml is not YAML: 'utf-8' codec can't decode"):
        load(Run, tmp_path / "latin.yaml")


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give any value"):
        load(Run, written(f"{MODEL}extra: !!python/object/apply:os.getcwd ''", tmp_path))


# help


def undocumented(config: type) -> list[str]:
    """Returns the paths of fields without help."""
    return [option.path for option in options(config) if not option.help]


def test_every_field_of_these_configs_has_help() -> None:
    assert undocumented(Evaluation) == []
    foreign = ("optimizer.", "objective.", "layout.")  # the string under a field is missing there
    assert [path for path in undocumented(Run) if not path.startswith(foreign)] == []


def test_error_names_a_field_without_help() -> None:
    class Local(Settings):
        """A string under a class's name is not the help of a field."""

        documented: int = 0
        """It has one."""
        bare: int = 0
        also_bare: int = 0

    assert undocumented(Local) == ["bare", "also_bare"]


def test_help_names_every_option_with_type_default_and_help() -> None:
    printed = describe(options(Run))
    for name in Run.model_fields:
        assert f"--{name}: " in printed
    for lines in (
        "--seed: a whole number, default 0\n    Random seed.  The same seed gives the same run.",
        "--model: text, required\n    The model to train.",
        "--name: text or none, default none",
        '--dtype: "float32" or "bfloat16", default "bfloat16"',
        '--optimizer: keys and values of kind "adamw" or "sgd"\n    Optimizer.',
        '--optimizer.kind: "adamw" or "sgd", default "adamw"',
        "--optimizer.lr (adamw): a number of at least 0, default 3e-06",
        "--optimizer.lr (sgd): a number of at least 0, default 0.001",
        "--objective.clip_high: a number of at least 0, default 0.28",
        "--objective.kl.coefficient: a number above 0, required",
        "--layout: keys and values, or text\n",
        '--held_out.*.kind: "reasoning_gym" or "jsonl", required',
        "--held_out.*.path (jsonl): a path, required\n    The file with one problem a line.",
        '--mixture: names and values, each a number, default {"math": 1.0}',
    ):
        assert lines in printed


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, describe(options(Run)).splitlines())) < 80


@pytest.mark.parametrize("part", [AdamW, SGD, Layout, PolicyGradient, Preference, SFT, Distill])
def test_every_library_dataclass_can_be_a_section(part: Any, tmp_path: Path) -> None:
    Config = create_model("Config", __base__=Settings, part=(part, part()))
    assert describe(options(Config))
    assert load(Config, written(to_yaml(Config()), tmp_path)) == Config()


def test_union_sections_without_a_tag_are_refused() -> None:
    class Untagged(Settings):
        value: AdamW | SGD = AdamW()

    with pytest.raises(TypeError, match="one of AdamW, SGD; name them by TaggedUnion"):
        describe(options(Untagged))
