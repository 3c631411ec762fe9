"""The keywords of the recipe functions, for editors and type checkers.

Generated from the configs by `python -m tests.recipes.keyword_types`.
"""

# fmt: off
# ruff: noqa
# mypy: disable-error-code=misc
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, Unpack

from postlude.recipes.api import Config, OnStep, RunResult

Path = str | PathLike[str]
Rows = Path | Iterable[Any]  # a DataFrame is one, too
Code = str | Callable[..., Any]

class ForwardOptions(TypedDict, total=False):
    budget: int; seed: int
class Layout(TypedDict, total=False):
    pp: int; vpp: int; dp_replicate: int; dp_shard: int; cp: int; tp: int; ep: int
class AdamW(TypedDict, total=False):
    kind: Literal['adamw']; lr: float; betas: Sequence[float]; eps: float; weight_decay: float
    max_grad_norm: float | None; schedule: LRSchedule; moments: Literal['fp32', '8bit']; offload: bool
class LRSchedule(TypedDict, total=False):
    shape: Literal['constant', 'linear', 'cosine']; warmup: int; steps: int | None; floor: float
class SGD(TypedDict, total=False):
    kind: Literal['sgd']; lr: float; momentum: float; weight_decay: float; max_grad_norm: float | None
    schedule: LRSchedule
class LoRA(TypedDict, total=False):
    rank: int; alpha: float; rslora: bool; targets: str | Sequence[str]; experts: Literal['shared_outer', 'per_expert']
    ranks: Mapping[str, int]; alphas: Mapping[str, float]
class RouterLosses(TypedDict, total=False):
    balance_coefficient: float | None; z_coefficient: float | None; balance: Literal['sequence', 'batch'] | None
class HeadConfig(TypedDict, total=False):
    backend: Literal['auto', 'torch', 'triton', 'logits']; memory_budget: int | None
class WorkerLimits(TypedDict, total=False):
    memory_gib: float | None; file_gib: float; processes: int; reply_mib: float; secrets: Sequence[str]
class AgentLimits(TypedDict, total=False):
    seconds: float; model_calls: int; tokens: int; concurrent_calls: int; memory_gib: float | None; processes: int
    file_gib: float; disk_gib: float; output_mib: float
class Prefix(TypedDict, total=False):
    kind: Literal['prefix']; words: Sequence[str]
class Bubblewrap(TypedDict, total=False):
    kind: Literal['bubblewrap']; mounts: Sequence[str]; arguments: Sequence[str]
class PolicyGradient(TypedDict, total=False):
    kind: Literal['policy']; surrogate: Literal['clip', 'cispo', 'reinforce']
    ratio: Literal['token', 'sequence', 'on_policy']; clip_low: float; clip_high: float; dual_clip: float | None
    correction: RolloutCorrection | None; kl: ReferenceKL | None; entropy: float; positive_nll: float; over: str
    length: float | None
class RolloutCorrection(TypedDict, total=False):
    level: Literal['token', 'sequence']; truncate: Sequence[float] | None; mask: Sequence[float] | None
    sequence_mask: Sequence[float] | None
class ReferenceKL(TypedDict, total=False):
    coefficient: float; estimator: Literal['k1', 'k2', 'k3']
    gradient: Literal['expectation', 'importance', 'estimator']
class RewardKL(TypedDict, total=False):
    coefficient: float; estimator: Literal['k1', 'k2', 'k3']
class Settings(TypedDict, total=False):
    pass
class TrainingOptions(ForwardOptions, total=False):
    weights: Literal['fp32', 'split', 'rounded']; fp8: bool | str; selection_bias_rate: float | None
    router_losses: RouterLosses; head: HeadConfig; share_prefixes: Literal['auto', 'always', 'off']
    recompute: Literal['none', 'selective', 'full']; offload_activations: bool | str
    overlap: bool | Literal['zero_bubble']; gather_once: bool
class SFT(TypedDict, total=False):
    kind: Literal['sft']; over: str; z_loss: float
class Preference(TypedDict, total=False):
    kind: Literal['preference']; loss_type: Literal['sigmoid', 'ipo']; beta: float; label_smoothing: float
    length_normalised: bool; reference: bool; margin: float; margins: bool; nll: float; mask: str
class ORPO(TypedDict, total=False):
    kind: Literal['orpo']; beta: float; nll: float; mask: str
class KTO(TypedDict, total=False):
    kind: Literal['kto']; beta: float; desirable_weight: float; undesirable_weight: float; mask: str
class BradleyTerry(TypedDict, total=False):
    kind: Literal['bradley_terry']; margin: float; margins: bool; centring: float
class Container(TypedDict, total=False):
    image: str; mounts: Sequence[str]; arguments: Sequence[str]
class Distill(TypedDict, total=False):
    kind: Literal['distill']; over: str; forward: float; outside: Literal['bucket', 'renormalise', 'ignore']; nll: float
    temperature: float
class ObserveSettings(Settings, total=False):
    metrics_port: int | None; metrics_host: str; traces: bool
class ClusterSettings(Settings, total=False):
    cpus_per_rank: int | None; gpus_per_rank: float; cpus_per_worker: float; max_restarts: int
class MTPSettings(Settings, total=False):
    weight: float; depths: int; layers: str | None; stop_trunk: bool; stop_head: bool; processor: Code | None
    context: Mapping[str, Any]
class RunLimits(Settings, total=False):
    failed_rewards: float; weight_growth: float; entropy: float; patience: int
class HeldOutSettings(Settings, total=False):
    every: int; at_start: bool; rows: int
class DatasetPath(Settings, total=False):
    path: Rows; config: str | None; split: str | None
class ChatOptions(Settings, total=False):
    system: str | None; template_variables: Mapping[str, Any]
class Mixture(Settings, total=False):
    pass
class ObjectiveFile(Settings, total=False):
    kind: Literal['file']; file: Code; settings: Mapping[str, Any]
class RewardSettings(Settings, total=False):
    weight: float | None; timeout: float; failed_reward: float | None; template_variables: Mapping[str, Any]
class WeightSettings(Settings, total=False):
    weight: float
class RewardModelFields(Settings, total=False):
    model: str; device: Literal['cpu', 'cuda'] | None; budget: int; trust_remote_code: bool
class DockerLike(Container, total=False):
    pass
class Apptainer(Container, total=False):
    kind: Literal['apptainer']
class EnvironmentMixture(Settings, total=False):
    kind: Literal['mixture']; environments: Sequence[Environments]
class SamplingSettings(Settings, total=False):
    max_new_tokens: int; temperature: float; top_k: int; top_p: float; min_p: float; stop: Sequence[str]
    stop_tokens: Sequence[int | str]; draft: Literal['mtp'] | None
class SharingSettings(Settings, total=False):
    share_gpu: bool
class ProbeSettings(Settings, total=False):
    probe_limit: float | None
class SyncSettings(Settings, total=False):
    sync: Literal['disk', 'network', 'ipc', 'delta'] | None; sync_timeout: float; checksum_every: int
class Asynchrony(Settings, total=False):
    max_staleness: int
class WarmStart(Settings, total=False):
    steps: int; batch_size: int; optimizer: AdamW | SGD | Literal['adamw', 'sgd']
class PassSettings(Settings, total=False):
    samples_per_prompt: int; temperature: float; max_new_tokens: int | None; top_k: int | None; top_p: float | None
    min_p: float | None; stop: Sequence[str] | None; solved: float
class CriticSettings(Settings, total=False):
    model: str | None; optimizer: AdamW | SGD | Literal['adamw', 'sgd']; coefficient: float; clip: float | None
    warmup: int
class OnPolicyData(Settings, total=False):
    kind: Literal['on_policy']; environment: Environments; sampling: SamplingSettings; rollout: Rollout
    samples_per_prompt: int; save_completions: bool
class RunConfig(Settings, ForwardOptions, total=False):
    model: str; chat_template: Path | None; trust_remote_code: bool; run: Path; context_length: int | None
    dtype: Literal['float32', 'bfloat16'] | None; loggers: Sequence[str]; observe: ObserveSettings
    cluster: ClusterSettings
class ExampleMixture(Mixture, total=False):
    kind: Literal['mixture']; datasets: Sequence[Examples]
class PairMixture(Mixture, total=False):
    kind: Literal['mixture']; datasets: Sequence[Pairs]
class LabelledMixture(Mixture, total=False):
    kind: Literal['mixture']; datasets: Sequence[LabelledExamples]
class RolloutLimits(RunLimits, total=False):
    rollout_kl: float | None; rollout_chi2: float | None
class ReasoningGymSettings(RewardSettings, total=False):
    kind: Literal['reasoning_gym']; task: str; settings: Mapping[str, Any]; size: int; template: str | None
    tag: str | None; system: str | None; workers: int; worker_limits: WorkerLimits
class ScoredSettings(RewardSettings, total=False):
    workers: int; worker_limits: WorkerLimits; reward: Code | None; rewards: Mapping[str, Rewards]
class FunctionRewardSettings(WeightSettings, total=False):
    kind: Literal['function']; function: Code; group: bool; batch_size: int; concurrency: int; timeout: float | None
class JudgeSettings(WeightSettings, total=False):
    kind: Literal['judge']; url: str; model: str; template: str; system: str | None; pattern: str
    scores: Mapping[str, float]; lowest: float | None; highest: float | None; unparsable_reward: float | None
    temperature: float; max_new_tokens: int; timeout: float; retries: int; concurrency: int; key_variable: str | None
    extra: Mapping[str, Any]
class Docker(DockerLike, total=False):
    kind: Literal['docker']
class Podman(DockerLike, total=False):
    kind: Literal['podman']
class EvaluationSettings(PassSettings, total=False):
    every: int; at_start: bool; tasks: int | None; split_by: Literal['prompt', 'row']
    sets: Mapping[str, EvaluationSetSettings]
class EvaluationSetSettings(PassSettings, total=False):
    environment: Environments; tasks: int
class TrainingDataset(DatasetPath, ChatOptions, total=False):
    weight: float | None; shuffle: bool; streaming: bool; shuffle_buffer: int
class PromptSettings(DatasetPath, RewardSettings, total=False):
    prompt: str; answer: str; chat: bool; system: str | None; overlong: Literal['refuse', 'drop']
class ModelRewardSettings(WeightSettings, RewardModelFields, total=False):
    kind: Literal['reward_model']
class TurnSettings(ScoredSettings, total=False):
    max_turns: int; unfinished_reward: float; keep_reasoning: bool
class EpisodeRunSettings(ScoredSettings, total=False):
    sampling: Literal['config', 'agent']; branches: Literal['all', 'last']; keep_reasoning: bool
    unfinished_reward: float; concurrency: int; episode_workers: int; stragglers: Literal['wait', 'drop', 'carry']
    needed_share: float; limits: AgentLimits
class NativeRollout(SharingSettings, ProbeSettings, total=False):
    kind: Literal['native']; kv_cache_dtype: Literal['auto', 'fp8']; batch_invariant: bool
    quantization: Literal['fp8'] | None
class ConnectionSettings(SharingSettings, ProbeSettings, total=False):
    concurrency: int; timeout: float; retries: int; backoff: float; outage_timeout: float
class EvalConfig(RunConfig, total=False):
    environment: Environments; tasks: int; split_by: Literal['prompt', 'row']; samples_per_prompt: int; solved: float
    sets: Mapping[str, EvaluationSetSettings]; save_completions: bool; sampling: SamplingSettings; rollout: Rollout
class TrainingConfig(RunConfig, TrainingOptions, total=False):
    layout: Layout | str; optimizer: AdamW | SGD | Literal['adamw', 'sgd']; lora: LoRA | None; mtp: MTPSettings | None
    save_every: int; keep_checkpoints: int; max_skipped_steps: int; file_changes: Literal['refuse', 'allow']
    export: bool | Literal['best']; push_to_hub: str | None
class Examples(TrainingDataset, total=False):
    kind: Literal['examples']; format: Literal['messages', 'sharegpt', 'completion', 'alpaca', 'text'] | None
    messages: str; prompt: str; completion: str; text: str; tools: str; turns: Literal['all', 'last']
    overlong: Literal['refuse', 'drop', 'cut']
class Pairs(TrainingDataset, total=False):
    prompt: str; chosen: str; rejected: str; margin: str | None; tools: str; overlong: Literal['refuse', 'drop', 'cut']
class OpenEnvSettings(TurnSettings, total=False):
    kind: Literal['openenv']; address: str; action: str; observation: str | None; size: int; chat: bool
    system: str | None
class VerifiersSettings(EpisodeRunSettings, total=False):
    kind: Literal['verifiers']; settings: Mapping[str, Any]; size: int
class LaunchedServers(ConnectionSettings, total=False):
    count: int; cpus: float; arguments: Sequence[str]; env: Mapping[str, str]; start_timeout: float; max_restarts: int
class SupervisedConfig(TrainingConfig, total=False):
    limits: RunLimits; batch_size: int; epochs: float | None; steps: int | None; held_out: HeldOutSettings
class LabelledExamples(Examples, total=False):
    label: str
class PolicyConfig(TrainingConfig, total=False):
    limits: RolloutLimits; environment: Environment; steps: int | None; epochs: float | None; prompts_per_step: int
    samples_per_prompt: int; sampling: SamplingSettings; rollout: Rollout; asynchrony: Asynchrony
    objective: PolicyGradient | ObjectiveFile | Code | Literal['policy', 'file']; reference: bool
    reference_model: str | None; reference_every: int; reward_kl: RewardKL | None; minibatches: int; rollout_epochs: int
    old_logprobs: Literal['rollout', 'recompute']; replay_routing: bool; sampling_mask: bool; dynamic_sampling: int
    overlong: Literal['learn', 'mask']; overlong_penalty: float; overlong_buffer: int; save_completions: bool
    warm_start: WarmStart; evaluation: EvaluationSettings
class DatasetSettings(PromptSettings, ScoredSettings, total=False):
    kind: Literal['dataset']
class RewardModelSettings(PromptSettings, RewardModelFields, total=False):
    kind: Literal['reward_model']
class AgentSettings(DatasetPath, EpisodeRunSettings, total=False):
    kind: Literal['agent']; prompt: str; answer: str; task_columns: Sequence[str]; command: Sequence[Path]
    function: Code | None; url: str | None; sandbox: Sandbox | None
class RunningServers(ConnectionSettings, SyncSettings, total=False):
    kind: Literal['server']; urls: Sequence[str]
    api: Literal['auto', 'postlude', 'vllm', 'sglang', 'llama.cpp', 'openai'] | Code; model: str | None
    api_key: str | None
class LaunchedGenerators(LaunchedServers, total=False):
    kind: Literal['generators']; device: Literal['cpu', 'cuda'] | None; gpus: float; threads: int
class SFTConfig(SupervisedConfig, total=False):
    data: Examples | ExampleMixture | Rows | Sequence[Examples] | Literal['mixture']
    objective: SFT | ObjectiveFile | Code | Literal['sft', 'file']
class PairConfig(SupervisedConfig, total=False):
    data: Pairs | PairMixture | Rows | Sequence[Pairs] | Literal['mixture']
class KTOConfig(SupervisedConfig, total=False):
    data: LabelledExamples | LabelledMixture | Rows | Sequence[LabelledExamples] | Literal['mixture']
    objective: KTO | ObjectiveFile | Code | Literal['kto', 'file']
class GRPOConfig(PolicyConfig, total=False):
    advantages: Literal['grpo', 'grpo_loo', 'dr_grpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline']
class MultiTurnSettings(PromptSettings, TurnSettings, total=False):
    pass
class EpisodeSettings(PromptSettings, TurnSettings, total=False):
    kind: Literal['episodes']; episode: Code; settings: Mapping[str, Any]
class LaunchedVLLM(LaunchedServers, SyncSettings, total=False):
    kind: Literal['vllm']; python: Path | None; gpus: float
class PPOConfig(PolicyConfig, total=False):
    critic: CriticSettings; gamma: float; gae_lambda: float; whiten_advantages: bool
class DistillConfig(SupervisedConfig, total=False):
    data: Data; teacher: str; top_k: int; objective: Distill | ObjectiveFile | Code | Literal['distill', 'file']
class DPOConfig(PairConfig, total=False):
    objective: Preference | ORPO | ObjectiveFile | Code | Literal['preference', 'orpo', 'file']
class RMConfig(PairConfig, total=False):
    objective: BradleyTerry | ObjectiveFile | Code | Literal['bradley_terry', 'file']
class ConversationSettings(MultiTurnSettings, total=False):
    kind: Literal['conversation']; reply: Code
class ToolSettings(MultiTurnSettings, total=False):
    kind: Literal['tools']; tools: Sequence[Code]; format: Code
Rewards = FunctionRewardSettings | ModelRewardSettings | JudgeSettings | Code | Literal['function', 'reward_model', 'judge']
Sandbox = Prefix | Bubblewrap | Docker | Podman | Apptainer | Literal['prefix', 'bubblewrap', 'docker', 'podman', 'apptainer']
Environments = ReasoningGymSettings | DatasetSettings | RewardModelSettings | ConversationSettings | ToolSettings | EpisodeSettings | OpenEnvSettings | AgentSettings | VerifiersSettings | Literal['reasoning_gym', 'dataset', 'reward_model', 'conversation', 'tools', 'episodes', 'openenv', 'agent', 'verifiers']
Environment = ReasoningGymSettings | DatasetSettings | RewardModelSettings | ConversationSettings | ToolSettings | EpisodeSettings | OpenEnvSettings | AgentSettings | VerifiersSettings | EnvironmentMixture | Sequence[Environments] | Literal['reasoning_gym', 'dataset', 'reward_model', 'conversation', 'tools', 'episodes', 'openenv', 'agent', 'verifiers', 'mixture']
Rollout = NativeRollout | RunningServers | LaunchedGenerators | LaunchedVLLM | str | Literal['native', 'server', 'generators', 'vllm']
Data = Examples | OnPolicyData | ExampleMixture | Rows | Sequence[Examples] | Literal['examples', 'on_policy', 'mixture']
class DistillFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[DistillConfig],
    ) -> RunResult: ...
class DPOFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[DPOConfig],
    ) -> RunResult: ...
class EvalFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[EvalConfig],
    ) -> RunResult: ...
class GRPOFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[GRPOConfig],
    ) -> RunResult: ...
class KTOFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[KTOConfig],
    ) -> RunResult: ...
class PPOFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[PPOConfig],
    ) -> RunResult: ...
class RMFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[RMConfig],
    ) -> RunResult: ...
class SFTFunction(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[SFTConfig],
    ) -> RunResult: ...
