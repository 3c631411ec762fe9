"""Config keys of TRL, transformers, verl and NeMo RL, and the keys here that do the same. Error messages name them."""

from __future__ import annotations

from collections.abc import Collection

# Of several keys the first that the recipe has is named. The pages docs/from-*.md explain the differences.
PEER_KEYS: dict[str, tuple[str, ...]] = {
    "model_name_or_path model_name model_id pretrained_model_name_or_path": ("model",),
    "teacher_model_name_or_path": ("teacher",),
    "output_dir default_local_dir checkpoint_dir": ("run",),
    "learning_rate actor_learning_rate": ("optimizer.lr",),
    "optim optimizer_type": ("optimizer.kind",),
    "lr_scheduler_type lr_decay_style": ("optimizer.schedule.shape",),
    "warmup_steps lr_warmup_steps num_warmup_steps": ("optimizer.schedule.warmup",),
    "adam_beta1 adam_beta2": ("optimizer.betas",),
    "adam_epsilon": ("optimizer.eps",),
    "grad_clip clip_grad max_norm gradient_clip_val": ("optimizer.max_grad_norm",),
    "optimizer_offload cpu_offload": ("optimizer.offload",),
    "max_steps total_training_steps max_num_steps num_steps": ("steps",),
    "per_device_train_batch_size train_batch_size global_batch_size num_prompts_per_step": (
        "batch_size",
        "prompts_per_step",
    ),
    "gradient_accumulation_steps": ("batch_size", "budget"),
    "num_generations n_samples_per_prompt num_generations_per_prompt rollout_n": ("samples_per_prompt",),
    "num_generations_eval": ("evaluation.samples_per_prompt",),
    "eval_on_start val_before_train val_at_start": ("held_out.at_start", "evaluation.at_start"),
    "steps_per_generation ppo_mini_batch_size": ("minibatches",),
    "num_iterations num_ppo_epochs ppo_epochs": ("epochs",),
    "max_completion_length max_response_length response_length": ("sampling.max_new_tokens",),
    "max_length max_seq_length max_seq_len max_total_sequence_length cutoff_len": ("context_length",),
    "max_prompt_length "
    "ppo_max_token_len_per_gpu per_device_eval_batch_size train_micro_batch_size ppo_micro_batch_size_per_gpu": (
        "budget",
    ),
    "beta": ("objective.beta", "objective.kl.coefficient"),
    "kl_loss_coef reference_policy_kl_penalty": ("objective.kl.coefficient",),
    "kl_ctrl kl_coef init_kl_coef use_kl_in_reward": ("reward_kl.coefficient",),
    "kl_loss_type kl_estimator": ("objective.kl.estimator",),
    "epsilon clip_ratio clip_ratio_low cliprange ratio_clip_min": ("objective.clip_low",),
    "epsilon_high clip_ratio_high ratio_clip_max": ("objective.clip_high",),
    "delta clip_ratio_c ratio_clip_c": ("objective.dual_clip",),
    "entropy_coeff entropy_coef ent_coef": ("objective.entropy",),
    "loss_agg_mode": ("objective.over",),
    "loss_type": ("objective.loss_type", "objective.over"),
    "rpo_alpha": ("objective.nll",),
    "importance_sampling_level": ("objective.ratio",),
    "vllm_importance_sampling_correction": ("objective.correction",),
    "scale_rewards adv_estimator norm_adv_by_std_in_grpo": ("advantages",),
    "sync_ref_model ref_model_sync_steps": ("reference_every",),
    "mask_truncated_completions overlong_filtering": ("overlong",),
    "filter_groups use_dynamic_sampling": ("dynamic_sampling",),
    "lam gamma_lambda": ("gae_lambda",),
    "vf_coef": ("critic.coefficient",),
    "cliprange_value": ("critic.clip",),
    "use_vllm vllm_mode": ("rollout.kind",),
    "vllm_server_base_url vllm_server_host vllm_server_port": ("rollout.urls",),
    "router_aux_loss_coef": ("router_losses.balance_coefficient",),
    "vllm_enable_sleep_mode": ("rollout.share_gpu",),
    "reward_funcs reward_fn reward_function custom_reward_function": ("environment.reward",),
    "reward_weights": ("environment.rewards",),
    "train_dataset train_files dataset_name dataset_path train_data_path": ("data.path", "environment.path"),
    "prompt_key input_key": ("data.prompt", "environment.prompt"),
    "dataset_text_field": ("data.text",),
    "chat_template_path": ("chat_template",),
    "chat_template_kwargs apply_chat_template_kwargs": (
        "data.template_variables",
        "environment.template_variables",
    ),
    "assistant_only_loss": ("data.turns",),
    "filter_overlong_prompts": ("data.overlong", "environment.overlong"),
    "eval_steps eval_strategy test_freq val_period": ("held_out.every", "evaluation.every"),
    "max_val_samples": ("held_out.rows", "evaluation.tasks"),
    "save_steps save_freq save_period": ("save_every",),
    "save_total_limit max_actor_ckpt_to_keep keep_top_k": ("keep_checkpoints",),
    "report_to logger": ("loggers",),
    "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing": ("recompute",),
    "activation_offloading activation_cpu_offloading": ("offload_activations",),
    "bf16 fp16 torch_dtype precision": ("dtype",),
    "use_liger_kernel use_fused_kernels": ("head.backend",),
    "peft_config lora_r lora_rank": ("lora.rank",),
    "lora_alpha": ("lora.alpha",),
    "lora_target_modules target_modules": ("lora.targets",),
    "tensor_model_parallel_size tensor_parallel_size": ("layout.tp",),
    "pipeline_model_parallel_size pipeline_parallel_size": ("layout.pp",),
    "virtual_pipeline_model_parallel_size": ("layout.vpp",),
    "context_parallel_size ulysses_sequence_parallel_size": ("layout.cp",),
    "expert_model_parallel_size expert_parallel_size": ("layout.ep",),
    "fsdp_size": ("layout.dp_shard",),
    "router_replay": ("replay_routing",),
    "staleness_threshold max_trajectory_age_steps": ("asynchrony.max_staleness",),
}


def equivalent(name: str, known: Collection[str]) -> str | None:
    """Returns the key of `known` that does what a key of that name does in another framework, or None."""
    candidates = (keys for names, keys in PEER_KEYS.items() if name in names.split())
    return next((key for keys in candidates for key in keys if key in known), None)
