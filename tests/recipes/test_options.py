"""Every option of every recipe: changing it changes the last step of a run, or a line here names its test."""

from __future__ import annotations

import ast
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
    "share_prefixes": ("always",),
    "optimizer.betas": ("[0.5, 0.5]",),
    "optimizer.eps": ("1e-3",),
    "optimizer.weight_decay": ("0.5",),
    "optimizer.max_grad_norm": ("0.01",),
    "optimizer.momentum": ("0.9", "--optimizer=sgd", "--optimizer.lr=0.1", "--steps=3"),
    "optimizer.schedule.shape": ("cosine", *DECAY),
    "optimizer.schedule.warmup": ("3",),
    "optimizer.schedule.steps": ("3", *DECAY),
    "optimizer.schedule.floor": ("0.5", *DECAY),
    "router_losses.balance_coefficient": ("0.5", "--model=tiny-moe"),
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
        "rollout_epochs": ("2",),
        "reference_every": ("1", PENALTY, *LATER),
        "reference_model": ("tiny-dense", PENALTY),
        "overlong_buffer": ("2", "--overlong_penalty=0.5", SHORT),
        "reward_kl.coefficient": ("1.0", "--reward_kl.coefficient=0.1", *LATER),
        "reward_kl.estimator": ("k3", "--reward_kl.coefficient=0.1", *LATER),
        "advantages": ("rloo",),
        "old_logprobs": ("recompute",),
        "replay_routing": ("true", "--model=tiny-moe"),
        "sampling_mask": ("false", "--sampling.top_k=20"),
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
# `make test` shows these in another recipe, which has them by the same code: sampling and evaluation in `eval`, the
# rest in `sft`.
# Of an objective's settings it shows that some of each section reach it; tests/objectives have what each of them does.
SAME_CODE = {
    "grpo": (
        *("seed", "steps", "optimizer.kind", "optimizer.lr", *(f"sampling.{name}" for name in FILTERS)),
        *(f"warm_start.optimizer.{name}" for name in ("kind", "lr")),
        *(f"evaluation.{name}" for name in ("samples_per_prompt", "temperature", "solved")),
    ),
    "distill": tuple(f"data.sampling.{name}" for name in FILTERS),
}
SHOWN = ("surrogate", "clip_low", "over", "correction.level", "kl.coefficient", "loss_type", "beta", "nll", "margin")
for _command, _options in OPTIONS_WITH_EFFECT.items():
    _settings = [path for path in _options if path.startswith("objective.") and path[10:] not in SHOWN]
    SAME_CODE[_command] = (*SAME_CODE.get(_command, ()), *_settings)
# The tests that show what an option does, or that it changes no number; several are separated by spaces.
MULTI_TURN = "recipes/test_grpo.py::test_multi_turn_environment"
AGENT_LIMITS = "rollout/test_hostile_agents.py::test_calls_beyond_a_limit_are_refused_and_end_who_does_not_stop"
PROGRAM_LIMITS = "rollout/test_sandbox.py::test_a_limit_ends_a_program"
EPISODES = "recipes/test_turns.py::test_episodes_and_servers_are_configured"
STOP_TOKENS = "recipes/test_rollout_engine.py::test_stop_tokens_of_a_recipe_are_found_in_the_tokenizer"
DRAFTS = "recipes/test_mtp.py::test_training_on_drafted_completions_is_unchanged"
SETS = "recipes/test_rewards.py::test_evaluation_sets_have_their_own_tasks_rewards_and_metrics"
REMOTE_CODE = "hf/test_remote_code.py::test_code_of_a_model_runs_only_with_the_users_word"
HUB = "data/test_hub.py::test_a_dataset_is_downloaded_by_config_and_split"
CLIENT = "recipes/test_server_settings.py::test_settings_of_running_servers_reach_their_client"
SYNC = "recipes/test_server_settings.py::test_settings_of_weight_updates_reach_the_engine"
LAUNCHED = "recipes/test_server_settings.py::test_settings_of_launched_servers_reach_them"
EXPLODING = "recipes/test_health.py::test_exploding_metrics_end_a_run"
MISMATCH = "recipes/test_fp8_rollout.py::test_mismatch_above_its_limit_gives_clear_error"
ADAPTER_FILES = "hf/test_peft.py::test_different_ranks_are_written_with_their_scales"
ADAPTER_RANKS = "hf/test_lora_targets.py::test_most_specific_rank_and_alpha_take_precedence"
SCORED = "recipes/test_reward_model.py::test_an_environment_scores_prompt_and_completion_as_transformers_does"
UNSCORED = "recipes/test_reward_model.py::test_completion_that_cannot_be_scored_fails_its_reward_call"
JUDGED = "rollout/test_judge.py::test_a_judge_gets_the_template_and_its_score_is_parsed"
JUDGE_SCORE = "rollout/test_judge.py::test_a_score_is_the_first_group_of_the_last_match"
JUDGE_CALLS = "rollout/test_judge.py::test_requests_run_concurrently_up_to_the_limit_and_timeout"
REWARD_BATCHES = "rollout/test_function_reward.py::test_batched_reward_function_gets_ordered_lists_up_to_the_batch_size"
REWARD_CALLS = "rollout/test_function_reward.py::test_coroutines_run_concurrently_up_to_the_limit_and_timeout"
MIXED_ROWS = "recipes/test_mixed_rows.py::"
CUSTOM_OBJECTIVE = "recipes/test_grpo.py::test_custom_objective"
CHECKPOINTS = (
    "recipes/test_grpo.py::test_run_writes_metrics_samples_checkpoints_and_a_report "
    "recipes/test_grpo.py::test_outputs_that_are_switched_off_are_not_written"
)
PLAIN_OBJECTIVES = "objectives/test_plain.py::test_equals_the_plain_formula"
TESTED_ELSEWHERE = {
    "layout": "recipes/test_grpo.py::test_every_layout_gives_the_same_losses "
    "recipes/test_supervised.py::test_every_layout_gives_the_same_losses",
    "budget": "objectives/test_plain.py::test_losses_of_microbatches_add_up_for_any_split",
    "context_length": "recipes/test_context_length.py::test_rows_longer_than_the_context_are_refused",
    "trust_remote_code": REMOTE_CODE,
    "head.backend": "model/test_output.py::test_head_uses_the_configured_budget_and_backend",
    "head.memory_budget": "model/test_output.py::test_head_uses_the_configured_budget_and_backend",
    "recompute": "verify/test_layouts.py::test_options_change_no_result",
    "overlap": "engine/test_overlap.py::test_overlapped_steps_equal_plain_steps",
    "offload_activations": "model/test_activation_offload.py::test_every_layout_trains_as_without_offload",
    "gather_once": "engine/test_sharding.py::test_gradients_reduced_once_equal_those_reduced_per_microbatch",
    "lora.rank": ADAPTER_RANKS,
    "lora.alpha": ADAPTER_RANKS,
    "lora.rslora": ADAPTER_FILES,
    "lora.targets": "hf/test_lora_targets.py::test_targets_accept_hugging_face_layer_names",
    "lora.experts": "hf/test_lora_targets.py::test_expert_adapters_are_shared_as_configured",
    "lora.ranks": ADAPTER_RANKS,
    "lora.alphas": ADAPTER_RANKS,
    "selection_bias_rate": "engine/test_training.py::test_a_selection_bias_is_updated_by_its_own_rate_only",
    **dict.fromkeys(
        (f"router_losses.{name}" for name in ("balance_coefficient", "z_coefficient", "balance")),
        "engine/test_router_losses.py::test_balance_over_a_batch_equals_transformers",
    ),
    "mtp.processor": "recipes/test_mtp.py::test_custom_mtp_processor_is_set_in_a_config",
    "mtp.context": "recipes/test_mtp.py::test_custom_mtp_processor_is_set_in_a_config",
    "optimizer.moments": "engine/test_optimizers.py::test_a_small_problem_is_trained_as_in_fp32",
    "optimizer.offload": "engine/test_optimizers.py::test_optimizer_state_in_host_memory_gives_equal_updates",
    "epochs": "recipes/test_grpo.py::test_epochs_are_passes_over_the_tasks",
    "dtype": "recipes/test_grpo.py::test_dtype_sets_the_compute_dtype",
    "loggers": "recipes/test_loggers.py::test_a_failing_logger_is_named_once_and_does_not_end_the_run",
    "file_changes": "recipes/test_resume.py::test_changed_user_code_is_refused_unless_allowed",
    "save_every": CHECKPOINTS,
    "keep_checkpoints": CHECKPOINTS,
    "export": f"{CHECKPOINTS} recipes/test_best_checkpoint.py::test_best_checkpoint_is_kept_and_exported",
    **dict.fromkeys(
        ("save_completions", "data.save_completions"),
        "recipes/test_completion_tables.py::test_all_completions_are_saved_once",
    ),
    "push_to_hub": "recipes/test_hub_push.py::test_model_is_uploaded_and_a_failure_leaves_the_run_finished",
    "max_skipped_steps": "recipes/test_supervised.py::test_gradients_that_are_not_finite_end_the_run",
    "limits.failed_rewards": "recipes/test_health.py::test_failing_rewards_end_a_run",
    "limits.weight_growth": EXPLODING,
    "limits.entropy": "recipes/test_health.py::test_zero_entropy_and_equal_rewards_give_warnings",
    "limits.patience": "recipes/test_health.py::test_a_reward_that_always_fails_ends_a_run",
    "limits.rollout_kl": MISMATCH,
    "limits.rollout_chi2": MISMATCH,
    "reference": CUSTOM_OBJECTIVE,
    "objective.kind": CUSTOM_OBJECTIVE,
    "objective.file": CUSTOM_OBJECTIVE,
    "objective.settings": CUSTOM_OBJECTIVE,
    "objective.margins": PLAIN_OBJECTIVES,
    "kto objective.mask": PLAIN_OBJECTIVES,
    "dpo objective.mask": PLAIN_OBJECTIVES,
    "objective.kl.gradient": PLAIN_OBJECTIVES,  # one step's loss does not show it
    "data.kind": "recipes/test_supervised.py::test_on_policy_distillation",
    "data.format": "recipes/test_row_formats.py::test_rows_of_other_formats_equal_our_own",
    "data.tools": "data/test_encoding.py::test_tools_of_a_row_reach_the_template",
    "data.overlong": "recipes/test_supervised.py::test_long_rows_may_be_dropped_or_truncated",
    "asynchrony.max_staleness": "recipes/test_asynchrony.py::test_every_task_is_trained_on_once_within_max_staleness",
    **{
        f"{within}{name}": tests
        for within in ("", "data.")
        for name, tests in {
            "sampling.stop_tokens": STOP_TOKENS,
            "sampling.stop_tokens.*": STOP_TOKENS,
            "sampling.draft": DRAFTS,
            **dict.fromkeys(
                (
                    "rollout.kind",
                    *(f"rollout.{name}" for name in ("urls", "urls.*", "api", "model", "api_key", "concurrency")),
                    *(f"rollout.{name}" for name in ("timeout", "retries", "backoff", "outage_timeout")),
                ),
                CLIENT,
            ),
            **dict.fromkeys(("rollout.sync", "rollout.sync_timeout", "rollout.checksum_every"), SYNC),
            **dict.fromkeys(
                (
                    *(f"rollout.{name}" for name in ("count", "cpus", "arguments", "arguments.*", "env", "gpus")),
                    *(f"rollout.{name}" for name in ("start_timeout", "max_restarts", "device", "threads", "python")),
                ),
                LAUNCHED,
            ),
            "rollout.share_gpu": "recipes/test_share_gpu.py::test_run_that_shares_its_gpu_equals_one_that_does_not",
            "rollout.kv_cache_dtype": "generate/test_kv_cache_fp8.py::test_fp8_pages_equal_rounded_rows "
            "recipes/test_fp8_rollout.py::test_a_run_above_its_limit_saves_its_state_and_ends",
            "rollout.quantization": "generate/test_fp8_weights.py::test_new_weights_of_a_session_are_rounded "
            "recipes/test_fp8_rollout.py::test_a_run_above_its_limit_saves_its_state_and_ends",
            "rollout.batch_invariant": "recipes/test_batch_invariant.py::test_in_bfloat16_rollout_kl_is_exactly_zero",
            "rollout.probe_limit": "recipes/test_probe.py::test_probe_limit_is_set_and_disabled_in_a_config",
        }.items()
    },
    "observe.metrics_port": "recipes/test_metrics_port.py::test_a_port_in_use_is_one_sentence_before_the_run",
    "observe.metrics_host": "recipes/test_metrics_port.py::test_a_run_on_another_address_is_open_to_any_name",
    "observe.traces": "recipes/test_traces.py::test_spans_of_a_run_are_its_steps_requests_and_rewards",
    "cluster.cpus_per_rank": "cluster/test_rank_actors.py::test_run_that_needs_more_than_the_cluster_has_is_refused",
    "cluster.gpus_per_rank": "cluster/test_capacity.py::test_resource_needs_of_a_config",
    "cluster.cpus_per_worker": "cluster/test_capacity.py::test_resource_needs_of_a_config",
    "cluster.max_restarts": (
        "cluster/test_rank_actors.py::test_user_error_ends_run_immediately_and_lost_ranks_after_max_restarts"
    ),
    "environment.kind": MULTI_TURN,
    "environment.tag": "rollout/test_environments.py::test_reasoning_gym_prompt_requests_an_answer_tag",
    "environment.overlong": "recipes/test_bad_starts.py::test_invalid_start_gives_one_line_error_and_writes_nothing",
    "environment.workers": "rollout/test_rewards.py::test_worker_results_equal_local_results_in_order",
    "environment.timeout": "rollout/test_rewards.py::test_fault_affects_only_its_own_sample",
    **dict.fromkeys(
        (
            "environment.worker_limits",
            *(f"environment.worker_limits.{name}" for name in ("memory_gib", "file_gib", "processes", "reply_mib")),
        ),
        "rollout/test_worker_limits.py::test_what_exceeds_a_limit_fails_its_own_call",
    ),
    **dict.fromkeys(
        ("environment.worker_limits.secrets", "environment.worker_limits.secrets.*"),
        "rollout/test_worker_limits.py::test_workers_get_no_secrets_but_those_that_are_named",
    ),
    "environment.failed_reward": "rollout/test_rewards.py::test_fault_affects_only_its_own_sample",
    "environment.path": MULTI_TURN,
    "environment.prompt": MULTI_TURN,
    "environment.reply": MULTI_TURN,
    **{
        f"{within}.{name}": "recipes/test_rewards.py::test_evaluation_has_its_own_sampling_parameters"
        for within in ("evaluation", "sets.*")
        for name in ("max_new_tokens", *FILTERS)
    },
    "evaluation.at_start": "recipes/test_rewards.py::test_evaluation_at_the_start_may_be_left_out",
    "held_out.at_start": "recipes/test_rewards.py::test_evaluation_at_the_start_may_be_left_out",
    "environment.answer": "recipes/test_rewards.py::test_answers_may_be_in_another_column",
    "environment.max_turns": MULTI_TURN,
    "environment.unfinished_reward": MULTI_TURN,
    "environment.reward": "rollout/test_rewards.py::test_a_function_is_loaded_by_its_path",
    "environment.system": "data/test_chat_options.py::test_variables_and_system_message_apply_to_environment_prompts",
    "environment.chat": "rollout/test_environments.py::test_each_row_is_a_task",
    "environment.keep_reasoning": EPISODES,
    "environment.episode": EPISODES,
    "environment.address": EPISODES,
    "environment.episode_workers": "cluster/test_agent_actors.py::test_episodes_in_actors_equal_those_in_this_process",
    "environment.needed_share": "rollout/test_agent_ends.py::test_a_group_does_not_wait_for_those_it_does_not_need",
    "environment.stragglers": "recipes/test_stragglers.py::test_carried_episodes_join_a_later_step_or_end",
    "environment.task_columns": "rollout/test_agents.py::test_an_agent_gets_the_columns_that_it_may_see",
    "environment.command": "rollout/test_agents.py::test_a_program_is_trained_on_the_tokens_that_were_sampled",
    "environment.function": "rollout/test_agents.py::test_a_function_uses_the_clients_arguments",
    "environment.url": "rollout/test_agent_ends.py::test_a_service_gets_the_episode_and_replies_with_the_reward",
    "environment.branches": (
        "rollout/test_agents.py::test_a_rewritten_history_is_a_branch_and_branches_last_trains_the_last"
    ),
    "environment.sampling": "rollout/test_agents.py::test_sampling_parameters_are_the_runs_or_the_agents",
    "environment.concurrency": (
        "rollout/test_function_reward.py::test_coroutines_run_concurrently_up_to_the_limit_and_timeout"
    ),
    "environment.limits.seconds": (
        "rollout/test_hostile_agents.py::test_an_episode_that_takes_too_long_ends_with_its_calls"
    ),
    "environment.limits.concurrent_calls": (
        "rollout/test_hostile_agents.py::test_more_calls_at_a_time_than_allowed_are_told_to_retry"
    ),
    **{f"environment.limits.{name}": AGENT_LIMITS for name in ("model_calls", "tokens")},
    **{
        f"environment.limits.{name}": PROGRAM_LIMITS
        for name in ("memory_gib", "processes", "file_gib", "disk_gib", "output_mib")
    },
    **{
        f"environment.sandbox.{name}": "recipes/test_sandbox_settings.py::test_a_section_is_a_kind"
        for name in ("kind", "words", "image")
    },
    "environment.sandbox.mounts": "rollout/test_bubblewrap.py::test_files_of_the_command_line_and_mounts_can_be_read",
    "environment.sandbox.arguments": "rollout/test_containers.py::test_docker_and_podman",
    "environment.action": "rollout/test_async_environment.py::test_openenv_episodes",
    "environment.observation": "rollout/test_async_environment.py::test_openenv_episodes",
    "environment.tools": "rollout/test_tools.py::test_tools_are_configured_and_rendered_in_the_prompt",
    "environment.format": "data/test_tool_calls.py::test_format_is_that_in_which_the_template_writes_calls",
    "environment.weight": (
        "recipes/test_environment_mixture.py::test_environments_are_mixed_by_weight_with_their_own_rewards"
    ),
    "environment.model": SCORED,
    "environment.device": SCORED,
    "environment.trust_remote_code": REMOTE_CODE,
    "environment.budget": UNSCORED,
    **{
        f"environment.rewards.*.{name}": tests
        for name, tests in {
            "kind": SETS,
            "weight": SETS,
            "function": SETS,
            "group": SETS,
            "batch_size": REWARD_BATCHES,
            "concurrency": f"{REWARD_CALLS} {JUDGE_CALLS}",
            "timeout": f"{REWARD_CALLS} {JUDGE_CALLS}",
            "model": f"{SCORED} {JUDGED}",
            "device": SCORED,
            "budget": UNSCORED,
            "trust_remote_code": REMOTE_CODE,
            **dict.fromkeys(("url", "template", "system", "temperature", "max_new_tokens"), JUDGED),
            **dict.fromkeys(("key_variable", "extra"), JUDGED),
            **dict.fromkeys(("pattern", "scores", "lowest", "highest"), JUDGE_SCORE),
            "unparsable_reward": "rollout/test_judge.py::test_reply_without_a_score_fails_or_gets_the_default_score",
            "retries": "rollout/test_judge.py::test_a_request_to_a_busy_judge_is_retried_and_a_refusal_is_final",
        }.items()
    },
    **{f"sets.*.{name}": SETS for name in ("environment", "tasks", "samples_per_prompt", "temperature", "solved")},
    "evaluation.sets": SETS,
    "sets": "recipes/test_rewards.py::test_evaluation_command_supports_sets",
    "evaluation.split_by": "recipes/test_split.py::test_held_out_tasks_stay_held_out_whenever_they_are_evaluated",
    "split_by": "recipes/test_split.py::test_held_out_tasks_stay_held_out_whenever_they_are_evaluated",
    **{f"{within}.{name}": HUB for within in ("data", "environment") for name in ("config", "split")},
    "chat_template": "data/test_chat_options.py::test_template_file_replaces_the_tokenizers_template",
    "data.system": ("data/test_chat_options.py::test_variables_system_and_tools_reach_the_template_from_every_format"),
    "data.template_variables": (
        "data/test_chat_options.py::test_variables_system_and_tools_reach_the_template_from_every_format"
    ),
    "environment.template_variables": (
        "data/test_chat_options.py::test_variables_and_system_message_apply_to_environment_prompts"
    ),
    "data.weight": f"{MIXED_ROWS}test_every_prefix_follows_the_weights_within_one_row",
    "data.shuffle": f"{MIXED_ROWS}test_unshuffled_stream_equals_the_encoded_dataset",
    "data.streaming": f"{MIXED_ROWS}test_mixture_with_a_stream_is_the_same_in_every_layout_and_after_resuming",
    "data.shuffle_buffer": "data/test_streamed_rows.py::test_shuffle_buffer_permutes_consecutive_rows",
}
# Options of which no test is to be named, and why.
NEED_NO_TEST = {
    "model": "the model that the runs begin with is trained here",
    "run": "every run has its own",
    "data.path": "every test has rows of its own",
    "environment.rewards": "its keys have tests, above",
    **{f"environment.{name}": "grpo above has it" for name in ("task", "settings", "size", "template")},
}


def test_the_tests_that_are_named_exist() -> None:
    """Names are looked up in the source of the tests, so that none has to be imported."""
    tests = Path(__file__).parents[1]
    functions: dict[str, set[str]] = {}
    unknown = {}
    for option, names in TESTED_ELSEWHERE.items():
        assert names, f"{option} names no test"
        for name in names.split():
            file, _, function = name.partition("::")
            if file not in functions:
                nodes = ast.parse((tests / file).read_text()).body if (tests / file).is_file() else ()
                functions[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            if not function.startswith("test_") or function not in functions[file]:
                unknown[option] = name
    assert unknown == {}
    assert not TESTED_ELSEWHERE.keys() & NEED_NO_TEST.keys()


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
            and not {shared, f"{command} {path}"} & (TESTED_ELSEWHERE.keys() | NEED_NO_TEST.keys())
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
