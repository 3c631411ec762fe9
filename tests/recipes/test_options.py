"""Every option of every recipe: changing it changes the last step of a run, or a line here names its test."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.hf.export import export_hf
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import read_description
from postlude.recipes.config.load import load
from postlude.recipes.config.schema import options
from postlude.recipes.registry import RECIPES
from tests.conftest import Ranks

pytest.importorskip("reasoning_gym", reason="some of the tasks are reasoning-gym's")

# Of each option: what it is changed to, and what else both runs are given that are then compared.
ChangedOptions = dict[str, tuple[str, ...]]
END = "<end>"

DECAY = ("--optimizer.schedule.shape=linear", "--optimizer.schedule.steps=4")
AHEAD = "--mtp.weight=0.3"
TRAINING: ChangedOptions = {
    "seed": ("1",),
    "steps": ("1",),
    "optimizer.kind": ("sgd",),
    "optimizer.lr": ("3e-4",),
    "weights": ("rounded",),
    "fp8": ("true",),
    "optimizer.betas": ("[0.5, 0.5]",),
    "optimizer.eps": ("1e-3",),
    "optimizer.weight_decay": ("0.5",),
    "optimizer.max_grad_norm": ("0.01",),
    "optimizer.momentum": ("0.9", "--optimizer=sgd", "--optimizer.lr=0.1", "--steps=3"),
    "optimizer.schedule.shape": ("cosine", *DECAY),
    "optimizer.schedule.warmup": ("3",),
    "optimizer.schedule.steps": ("3", *DECAY),
    "optimizer.schedule.floor": ("0.5", *DECAY),
    "mtp.weight": ("0.6", AHEAD),
    "mtp.depths": ("2", AHEAD),
    "mtp.layers": ("-", AHEAD),
    "mtp.stop_trunk": ("true", AHEAD),
    "mtp.stop_head": ("true", AHEAD),
}
SUPERVISED: ChangedOptions = {
    **TRAINING,
    "batch_size": ("3",),
    "epochs": ("2", "--steps=null", "--epochs=1"),
    "held_out.every": ("0",),
    "held_out.rows": ("2",),
}
ANSWERS: ChangedOptions = {
    "max_new_tokens": ("2",),
    "temperature": ("0.5",),
    "top_k": ("2",),
    "top_p": ("0.3",),
    "min_p": ("0.5",),
    "stop": ("['1']",),
}
FILTERS = ("top_k", "top_p", "min_p", "stop")
ROWS = "--data.path=FILES/rows.jsonl"
TEXTS = "--data.path=FILES/texts.jsonl"
EXAMPLES: ChangedOptions = {
    "data.messages": ("other_messages",),
    "data.turns": ("last",),
    "data.prompt": ("other_prompt", ROWS),
    "data.completion": ("other_completion", ROWS),
    "data.text": ("other_text", TEXTS),
}
OWN = ("--data=on_policy", *(f"--data.{setting}" for setting in ("environment=dataset", "sampling.max_new_tokens=3")))
OWN_TASKS = (
    *OWN,
    "--data.environment.path=FILES/sums.jsonl",
    "--data.environment.reward=FILES/judge.py:judge",
    "--data.environment.workers=0",
)
RECOMPUTE = "--old_logprobs=recompute"
PENALTY = "--objective.kl.coefficient=0.1"
UNBOUNDED = "--objective.correction.truncate=null"
FAR = ("--minibatches=4", "--optimizer.lr=3e-3")
LATER = ("--steps=2", "--optimizer.lr=1e-2")  # a second step that is not at the reference any more
CRITIC = "--critic.model=FILES/model"
SHORT = "--sampling.max_new_tokens=2"
WARM = "--warm_start.steps=1"
EVALUATED = (
    "--evaluation.every=2",
    "--evaluation.tasks=4",
    "--evaluation.samples_per_prompt=2",
    "--evaluation.temperature=1",
)
GYM = (
    "--environment=reasoning_gym",
    "--environment.task=chain_sum",
    "--environment.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "--environment.template={metadata[expression]}=",
    "--environment.size=64",
)
OPTIONS_WITH_EFFECT: dict[str, ChangedOptions] = {
    "sft": {**SUPERVISED, **EXAMPLES, "objective.z_loss": ("0.1",), "objective.over": ("tokens",)},
    "dpo": {
        "data.prompt": ("other_prompt",),
        "data.chosen": ("other_chosen",),
        "data.rejected": ("other_rejected",),
        "data.margin": ("margin",),
        "objective.loss_type": ("ipo",),
        "objective.beta": ("0.3",),
        "objective.length_normalised": ("true",),
        "objective.label_smoothing": ("0.2",),
        "objective.reference": ("false",),
        "objective.nll": ("0.5",),
        "objective.margin": ("0.5",),
    },
    "kto": {
        "data.label": ("other_label",),
        "objective.beta": ("0.3",),
        "objective.desirable_weight": ("2",),
        "objective.undesirable_weight": ("2",),
    },
    "rm": {
        **{f"data.{name}": (f"other_{name}",) for name in ("prompt", "chosen", "rejected")},
        "data.margin": ("margin",),
        "objective.margin": ("0.5",),
        "objective.centring": ("0.5",),
    },
    "distill": {
        "teacher": ("tiny-moe",),
        "top_k": ("2",),
        "objective.forward": ("0",),
        "objective.outside": ("renormalise",),
        "objective.nll": ("0.5",),
        "objective.temperature": ("2",),
        "objective.over": ("tokens",),
        "data.samples_per_prompt": ("2", *OWN_TASKS),
        **{f"data.sampling.{name}": (value, *OWN_TASKS) for name, (value,) in ANSWERS.items()},
    },
    "grpo": {
        **{path: TRAINING[path] for path in ("seed", "steps", "optimizer.kind", "optimizer.lr")},
        "prompts_per_step": ("6",),
        "samples_per_prompt": ("4",),
        "minibatches": ("2",),
        "epochs": ("2",),
        "reference_every": ("1", PENALTY, *LATER),
        "reference_model": ("tiny-dense", PENALTY),
        "overlong_buffer": ("2", "--overlong_penalty=0.5", SHORT),
        "reward_kl.coefficient": ("1.0", "--reward_kl.coefficient=0.1", *LATER),
        "reward_kl.estimator": ("k3", "--reward_kl.coefficient=0.1", *LATER),
        "advantages": ("rloo",),
        "old_logprobs": ("recompute",),
        "replay_routing": ("true", "--model=tiny-moe"),
        "dynamic_sampling": ("1", "--samples_per_prompt=2"),  # of two answers, many are alike
        "overlong": ("mask", SHORT),
        "overlong_penalty": ("0.5", SHORT),
        "warm_start.steps": ("2",),
        "warm_start.batch_size": ("4", WARM),
        "warm_start.optimizer.kind": ("sgd", WARM),
        "warm_start.optimizer.lr": ("1e-2", WARM),
        "evaluation.every": ("0", *EVALUATED),
        "evaluation.tasks": ("7", *EVALUATED),
        "evaluation.samples_per_prompt": ("3", *EVALUATED),
        "evaluation.temperature": ("0.1", *EVALUATED),
        "evaluation.solved": ("2", *EVALUATED),
        "environment.task": (
            "basic_arithmetic",
            *GYM,
            "--environment.settings={}",
            "--environment.template={question}",
        ),
        "environment.settings": ("{min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}", *GYM),
        "environment.size": ("48", *GYM),
        "environment.template": ("{metadata[expression]} is", *GYM),
        **{f"sampling.{name}": value for name, value in ANSWERS.items()},
        "objective.surrogate": ("cispo",),
        "objective.ratio": ("sequence",),
        "objective.clip_low": ("0.001", *FAR),
        "objective.clip_high": ("0.001", *FAR),
        "objective.dual_clip": ("1.001", *FAR),
        "objective.correction.level": ("sequence", RECOMPUTE, UNBOUNDED),
        "objective.correction.truncate": ("[2, 3]", RECOMPUTE),
        "objective.correction.mask": ("[2, 3]", RECOMPUTE, UNBOUNDED),
        "objective.correction.sequence_mask": ("[2, 3]", RECOMPUTE, UNBOUNDED),
        "objective.kl.coefficient": ("1.0", PENALTY),
        "objective.kl.estimator": ("k2", PENALTY),
        "objective.entropy": ("0.1",),
        "objective.positive_nll": ("0.5",),
        "objective.over": ("sequence_mean",),
        "objective.length": ("3",),
    },
    "ppo": {
        "samples_per_prompt": ("4",),
        "gamma": ("0.5",),
        "gae_lambda": ("0.1",),
        "whiten_advantages": ("false",),
        "critic.model": ("FILES/model",),
        "critic.optimizer.kind": ("sgd", CRITIC),
        "critic.optimizer.lr": ("1e-2", CRITIC),
        "critic.coefficient": ("5.0",),
        "critic.clip": ("0.001", *FAR),
        "critic.warmup": ("1",),
    },
    "eval": {
        "seed": ("1",),
        "tasks": ("7",),
        "samples_per_prompt": ("2",),
        "solved": ("2",),
        **{f"sampling.{name}": value for name, value in ANSWERS.items()},
        "sampling.temperature": ("0",),  # its metrics see answers alone, and these are all the likeliest
    },
}
# `make test` shows these in another recipe, which has them by the same code: the sampling in `eval`, the rest in `sft`.
# Of an objective's settings it shows that some of each section reach it; tests/objectives have what each of them does.
SAME_CODE = {
    "grpo": ("seed", "steps", "optimizer.kind", "optimizer.lr", *(f"sampling.{name}" for name in FILTERS)),
    "distill": tuple(f"data.sampling.{name}" for name in FILTERS),
}
SHOWN = ("surrogate", "clip_low", "over", "correction.level", "kl.coefficient", "loss_type", "beta", "nll", "margin")
for _command, _options in OPTIONS_WITH_EFFECT.items():
    _settings = [path for path in _options if path.startswith("objective.") and path[10:] not in SHOWN]
    SAME_CODE[_command] = (*SAME_CODE.get(_command, ()), *_settings)
TESTED_ELSEWHERE = {
    "model": "the model that the runs begin with is trained here",
    "run": "every run has its own",
    "layout": "test_grpo.py and test_supervised.py: test_every_layout_gives_the_same_losses; tests/verify",
    "budget": "it divides the work and changes no number; tests/data/test_packing.py",
    "context_length": "tests/recipes/test_context_length.py",
    "trust_remote_code": "tests/hf/test_remote_code.py",
    "head.backend": "it changes no number; tests/model/test_output.py: test_a_head_is_computed_as_its_config_says",
    "head.memory_budget": "it changes no number; tests/model/test_output.py, as head.backend",
    "recompute": "it changes no number; tests/verify",
    "overlap": "it changes no number; tests/engine/test_overlap.py and test_zero_bubble.py",
    "gather_once": "it changes no number; tests/engine/test_sharding.py",
    **{
        f"lora.{name}": "tests/hf/test_lora_targets.py; test_resume.py: test_a_run_with_lora_resumes_to_the_bit"
        for name in ("rank", "alpha", "rslora", "targets", "experts", "ranks", "alphas")
    },
    "selection_bias_rate": "tests/engine/test_training.py: test_a_selection_bias_is_updated_by_its_own_rate_only",
    "mtp.processor": "test_mtp.py: test_a_processor_of_the_user_is_named_in_a_recipe",
    "mtp.context": "test_mtp.py: test_a_processor_of_the_user_is_named_in_a_recipe",
    "optimizer.moments": "tests/engine/test_optimizers.py",
    "optimizer.offload": "it changes no number; tests/engine/test_optimizers.py",
    "dtype": "test_grpo.py: test_dtype_sets_the_compute_dtype",
    "loggers": "test_sinks.py",
    "file_changes": "test_resume.py: test_changed_code_is_refused_unless_it_is_allowed",
    "save_every": "test_grpo.py: test_a_run_leaves_metrics_samples_checkpoints_and_a_report",
    "keep_checkpoints": "test_grpo.py: test_a_run_leaves_metrics_samples_checkpoints_and_a_report",
    "export": "test_grpo.py: test_excluded_trajectories_are_not_trained_on",
    "max_skipped_steps": "test_supervised.py: test_gradients_that_are_not_finite_end_the_run",
    "limits.failed_rewards": "test_health.py",
    "limits.weight_growth": "test_health.py",
    "limits.entropy": "test_health.py",
    "limits.patience": "test_health.py",
    "limits.rollout_kl": "test_fp8_rollout.py",
    "limits.rollout_chi2": "test_fp8_rollout.py",
    "reference": "test_grpo.py: test_an_objective_of_the_user",
    "objective.kind": "test_an_objective_of_the_user",
    "objective.file": "test_an_objective_of_the_user",
    "objective.settings": "test_an_objective_of_the_user",
    "kto objective.mask": "as of dpo",
    "objective.margins": "data.margin sets it; tests/objectives/test_plain.py",
    "dpo objective.mask": "a run has one mask; tests/objectives/test_plain.py",
    "objective.kl.gradient": "tests/objectives/test_plain.py: its gradient, which one step's loss does not show",
    "data.kind": "test_supervised.py: test_a_teacher_corrects_the_students_own_completions",
    "data.path": "every test has rows of its own",
    "data.format": "tests/recipes/test_row_formats.py",
    "data.tools": "tests/data/test_encoding.py: test_tools_of_a_row_reach_the_template",
    "data.overlong": "test_supervised.py: test_long_rows_may_be_left_out_or_cut",
    "asynchrony.max_staleness": "test_asynchrony.py",
    "sampling.stop_tokens": "test_serving.py",
    "sampling.stop_tokens.*": "test_serving.py",
    "data.sampling.stop_tokens": "test_serving.py",
    "data.sampling.stop_tokens.*": "test_serving.py",
    "sampling.draft": "it changes no answer; test_ahead.py, tests/generate/test_draft.py",
    "data.sampling.draft": "it changes no answer; test_ahead.py, tests/generate/test_draft.py",
    **{
        f"{within}rollout.{name}": "test_serving.py; tests/serving/test_server_pool.py, test_transfer.py"
        for within in ("", "data.")
        for name in (
            "kind",
            "urls",
            "urls.*",
            "api",
            "model",
            "api_key",
            "concurrency",
            "timeout",
            "retries",
            "backoff",
            "outage_timeout",
            "sync",
            "sync_timeout",
            "checksum_every",
        )
    },
    **{
        f"{within}rollout.{name}": "test_serving.py; tests/serving/test_supervisor.py; tests/serving/test_vllm.py"
        for within in ("", "data.")
        for name in (
            "count",
            "cpus",
            "arguments",
            "arguments.*",
            "env",
            "start_timeout",
            "max_restarts",
            "device",
            "gpus",
            "threads",
            "python",
        )
    },
    **{
        f"{within}rollout.share_gpu": "it changes no number; test_share_gpu.py, tests/engine/test_offload.py"
        for within in ("", "data.")
    },
    **{
        f"{within}rollout.{name}": f"tests/generate/test_{tested}.py, test_fp8_rollout.py"
        for within in ("", "data.")
        for name, tested in (("kv_cache_dtype", "kv_cache_fp8"), ("quantization", "fp8_weights"))
    },
    **{f"{within}rollout.batch_invariant": "test_batch_invariant.py" for within in ("", "data.")},
    **{
        f"{within}rollout.probe_limit": "test_probe.py: test_the_limit_is_set_and_taken_away_in_a_config"
        for within in ("", "data.")
    },
    "cluster.cpus_per_rank": "tests/cluster/test_rank_actors.py",
    "cluster.gpus_per_rank": "tests/cluster/test_capacity.py",
    "cluster.cpus_per_worker": "tests/cluster/test_actor_pool.py",
    "cluster.max_restarts": "tests/cluster/test_rank_actors.py",
    "environment.kind": "test_grpo.py: test_a_conversation, and the others here",
    "environment.task": "in grpo here",
    "environment.settings": "in grpo here",
    "environment.size": "in grpo here",
    "environment.template": "in grpo here",
    "environment.tag": "tests/rollout/test_environments.py",
    "environment.system": "tests/rollout/test_environments.py",
    "environment.overlong": "test_bad_starts.py: a prompt that is too long",
    "environment.workers": "tests/rollout/test_rewards.py",
    "environment.timeout": "tests/rollout/test_rewards.py",
    "environment.path": "test_grpo.py: test_a_conversation",
    "environment.reward": "tests/rollout/test_rewards.py",
    **{
        f"environment.rewards.*.{name}": "tests/rollout/test_function_reward.py, test_judge.py; test_rewards.py"
        for name in (
            *("kind", "weight", "function", "group", "batch_size", "concurrency", "timeout", "model", "device"),
            *("budget", "url", "template", "system", "pattern", "scores", "lowest", "highest", "unparsable_reward"),
            *("temperature", "max_new_tokens", "retries", "key_variable", "extra"),
        )
    },
    **{
        f"sets.*.{name}": "test_rewards.py: test_sets_have_their_own_tasks_rewards_and_metrics"
        for name in ("environment", "tasks", "samples_per_prompt", "temperature", "solved")
    },
    "environment.rewards": "its keys, below it",
    "environment.weight": "test_environment_mixture.py",
    "evaluation.sets": "test_rewards.py: test_sets_have_their_own_tasks_rewards_and_metrics",
    "sets": "test_rewards.py: test_an_evaluation_has_sets_too",
    **{
        f"{within}.{name}": "tests/data/test_hub.py"
        for within in ("data", "environment")
        for name in ("config", "split")
    },
    **dict.fromkeys(
        ("chat_template", "data.system", "data.template_variables", "environment.template_variables"),
        "tests/data/test_chat_options.py",
    ),
    **{
        f"data.{name}": "test_mixed_rows.py and tests/data/test_streamed_rows.py"
        for name in ("weight", "shuffle", "streaming", "shuffle_buffer")
    },
    "environment.model": "test_reward_model.py",
    "environment.device": "test_reward_model.py",
    "environment.trust_remote_code": "tests/hf/test_remote_code.py",
    "environment.rewards.*.trust_remote_code": "tests/hf/test_remote_code.py",
    "environment.budget": "test_reward_model.py: test_a_completion_that_cannot_be_scored_is_a_failed_call",
    "environment.prompt": "test_grpo.py: test_a_conversation",
    "environment.answer": "test_rewards.py: test_answers_may_be_in_another_column",
    "environment.chat": "tests/rollout/test_environments.py",
    "environment.reply": "test_grpo.py: test_a_conversation",
    "environment.max_turns": "test_grpo.py: test_a_conversation",
    "evaluation.split_by": "tests/rollout/test_environments.py: test_copies_of_a_prompt",
    "split_by": "test_split.py",
    "environment.failed_reward": "test_grpo.py: test_completions_whose_reward_failed, tests/rollout/test_rewards.py",
    "environment.unfinished_reward": "test_grpo.py: test_a_conversation",
    "environment.keep_reasoning": "tests/data/test_chat.py",
    "environment.tools": "tests/rollout/test_tools.py",
    "environment.format": "tests/data/test_tool_calls.py",
    "environment.episode": "test_turns.py: test_episodes_and_servers_are_chosen_in_a_config",
    "environment.address": "test_turns.py: test_episodes_and_servers_are_chosen_in_a_config",
    "environment.action": "tests/rollout/test_async_environment.py",
    "environment.observation": "tests/rollout/test_async_environment.py",
}


@pytest.mark.parametrize("command", sorted(RECIPES))
def test_every_option_is_tested(command: str) -> None:
    paths = dict.fromkeys(option.path for option in options(RECIPES[command].config))
    sections = {path.rpartition(".")[0] for path in paths}
    leaves = [path for path in paths if path not in sections and not path.startswith("layout.")]
    missing = []
    for path in leaves:
        shared = path.removeprefix("data.") if path.startswith("data.environment.") else path
        shared = re.sub(r"^(evaluation\.)?sets\.\*\.environment\.", "environment.", shared)
        shared = shared.removeprefix("evaluation.") if ".sets." in shared else shared
        by_the_same_code = path.startswith(("warm_start.optimizer.", "critic.optimizer."))
        by_the_same_code |= path in SUPERVISED and command != "eval"
        by_the_same_code |= path in EXAMPLES and command in ("kto", "distill")
        by_the_same_code |= path.startswith(("data.datasets", "environment.environments"))  # each is what one is, alone
        by_the_same_code |= path in OPTIONS_WITH_EFFECT["grpo"] and command == "ppo"
        if (
            path not in OPTIONS_WITH_EFFECT[command]
            and not {shared, f"{command} {path}"} & TESTED_ELSEWHERE.keys()
            and not by_the_same_code
        ):
            missing.append(path)
    assert missing == []
    assert [path for path in OPTIONS_WITH_EFFECT[command] if path not in leaves] == [], "options that are no more"


JUDGE = """
def judge(prompt, completion, example):
    return float(completion[:1] == "1")
"""
# What the model of the runs says next, whatever came before, nearly: so every machine draws the same answers, some
# right and some wrong, some ended and some cut off, and each way to sample leaves some of these out.
SAID = {"1": 0.4, "2": 0.25, "3": 0.19, END: 0.16}


def write_files(directory: Path) -> None:
    """Writes sums as tasks, conversations, prompts with completions, text and pairs, each with an extra column."""
    sums = [(f"{first}+{second}=", str(first + second), str(first)) for first in range(5) for second in range(5)]

    def conversation(*texts: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]

    (directory / "judge.py").write_text(JUDGE)
    for name, rows in {
        "sums": [{"prompt": question, "answer": answer} for question, answer, _ in sums],
        "conversations": [
            {"messages": conversation(ask, right, ask, right), "other_messages": conversation(ask, wrong)}
            for ask, right, wrong in sums
        ],
        "rows": [
            {
                "prompt": ask,
                "completion": right,
                "other_prompt": f"say {ask}",
                "other_completion": wrong,
                "label": number % 2,
                "other_label": number % 3 == 0,
            }
            for number, (ask, right, wrong) in enumerate(sums)
        ],
        "texts": [{"text": ask + right, "other_text": ask + wrong} for ask, right, wrong in sums],
        "pairs": [
            {
                "prompt": ask,
                "chosen": right,
                "rejected": wrong,
                "other_prompt": f"say {ask}",
                "other_chosen": f"{right}!",
                "other_rejected": f"{wrong}?",
                "margin": number / 10,
            }
            for number, (ask, right, wrong) in enumerate(sums)
        ],
    }.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TASKS = (
    "--environment=dataset",
    "--environment.path=FILES/sums.jsonl",
    "--environment.reward=FILES/judge.py:judge",
    "--environment.workers=0",
    "--sampling.max_new_tokens=3",
)
SMALL = ("--budget=256", "--steps=2", "--export=false", "--save_every=0", "--optimizer.lr=1e-4")
ROUND = (
    "--prompts_per_step=4",
    "--samples_per_prompt=8",
    "--warm_start.batch_size=8",
    "--evaluation.every=0",
)
HELD_OUT = ("--batch_size=4", "--held_out.rows=3", "--held_out.every=2")
PLAIN = {
    "sft": (*SMALL, *HELD_OUT, "--data.path=FILES/conversations.jsonl"),
    "dpo": (*SMALL, *HELD_OUT, "--data.path=FILES/pairs.jsonl"),
    "kto": (*SMALL, *HELD_OUT, "--data.path=FILES/rows.jsonl"),
    "rm": (*SMALL, *HELD_OUT, "--data.path=FILES/pairs.jsonl"),
    "distill": (*SMALL, *HELD_OUT, "--teacher=tiny-dense", "--data=examples", "--data.path=FILES/conversations.jsonl"),
    "grpo": (
        *SMALL,
        *TASKS,
        *ROUND,
        "--warm_start.steps=0",
    ),
    "ppo": (
        *SMALL,
        *TASKS,
        *ROUND,
        "--warm_start.steps=0",
    ),
    "eval": ("--budget=256", *TASKS, "--sampling.temperature=1", "--tasks=8"),
}


def merge_settings(*settings: str) -> list[str]:
    """Later settings replace earlier ones; another kind of section drops the keys of the first."""
    chosen: dict[str, str] = {}
    for key, _, value in (setting.partition("=") for setting in settings):
        if chosen.get(key, value) != value:
            chosen = {name: chosen_value for name, chosen_value in chosen.items() if not name.startswith(f"{key}.")}
        chosen[key] = value
    return [f"{key}={value}" for key, value in chosen.items()]


def last_step(group: Any, command: str, *settings: str) -> str:
    """Returns the last step of a run without its times."""
    config: Any = load(RECIPES[command].config, None, merge_settings(*settings))
    RECIPES[command].run(config, "cpu")
    row = json.loads((config.run / "metrics.jsonl").read_text().splitlines()[-1])
    return json.dumps({key: row[key] for key in row if not key.startswith(("time/", "tokens_per_second"))})


def write_model(directory: Path) -> None:
    """Writes a model with nearly constant hidden states, whose head gives `SAID`."""
    hf, tokenizer = read_description("tiny-dense"), load_tokenizer("tiny-dense")
    hf.tie_word_embeddings, hf.num_hidden_layers = False, 1
    model = load_model(hf)
    with torch.no_grad():
        model.embedding.weight += 1.0
        model.head.weight -= 12.0 / hf.hidden_size  # what is not in SAID is hardly ever said
        for text, probability in SAID.items():
            token = tokenizer.eos_token_id if text == END else tokenizer.encode(text)[0]
            model.head.weight[token] += (12.0 + math.log(probability)) / hf.hidden_size
    export_hf(model, directory, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets, and a model that answers some of the sums."""
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    write_model(directory / "model")
    return directory


def commands_with_options() -> list[Any]:
    """Returns every recipe with its options; options that other recipes show as well are separate."""
    cases = []
    for command, changed in sorted(OPTIONS_WITH_EFFECT.items()):
        skipped = SAME_CODE.get(command, ())
        cases.append(pytest.param(command, [path for path in changed if path not in skipped], id=command))
        if skipped:
            cases.append(pytest.param(command, skipped, id=f"{command}, as others", marks=pytest.mark.thorough))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("command", "paths"), commands_with_options())
def test_every_option_has_an_effect(
    ranks: Ranks, tmp_path: Path, files: Path, command: str, paths: Sequence[str]
) -> None:
    results: dict[tuple[str, ...], str] = {}

    def result(*changes: str) -> str:
        if changes not in results:
            run = f"--run={tmp_path / str(len(results))}"
            settings = (*PLAIN[command], "--model=FILES/model", *changes, run)
            (results[changes],) = ranks(
                1, last_step, command, *(setting.replace("FILES", str(files)) for setting in settings)
            )
        return results[changes]

    changes = {path: OPTIONS_WITH_EFFECT[command][path] for path in paths}
    ignored = [
        path for path, (value, *others) in changes.items() if result(*others, f"--{path}={value}") == result(*others)
    ]
    assert ignored == []
