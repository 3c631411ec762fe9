"""The rollout engine of a recipe: the native generator in the ranks, running servers, or servers that it starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from postlude.checks import NonNegative, Positive
from postlude.options import Common, DeviceKind, KVCacheDtype, Quantization, SyncMethod
from postlude.recipes.config.schema import InputPath, Settings, TaggedUnion


def _check_gpu_fraction(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{gpus:g} GPUs are not a whole number; give one, or for a share of one GPU less than 1.")
    return gpus


GPUs: TypeAlias = Annotated[NonNegative, AfterValidator(_check_gpu_fraction)]


UserAPI: TypeAlias = Annotated[str, InputPath("code"), Field(pattern=r"\.py:\w+$")]


class SharingSettings(Settings):
    """Settings of a GPU that trainer and generator share."""

    share_gpu: bool = False
    """Move the trainer's weights, gradients and optimizer state to host memory while completions are generated, so that
    a generator on the same GPU can use the memory. It must not generate while the trainer trains. vLLM that the run
    starts without Ray then runs on the trainer's own GPUs, and frees their memory while the trainer trains."""


class ProbeSettings(Settings):
    """The comparison of trainer and generator after every weight update."""

    probe_limit: NonNegative | None = None
    """Largest difference of a few log-probs between trainer and generator after a weight update; none is 0.001 in
    float32 and 0.125 in bfloat16. A server with a larger one is not used, and a run without another generator ends. 0
    disables the comparison."""


class NativeRollout(SharingSettings, ProbeSettings):
    """The native generator in the trainer's own ranks, with a whole copy of the model on each."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """Storage of keys and values: in the model's dtype, or in fp8, which halves their memory and rounds them."""
    batch_invariant: bool = False
    """Compute every token with the same bits, whatever is generated or trained beside it: completions do not depend on
    their batch, and trainer and generator agree exactly (rollout_kl is 0). It is slower. For models of attention,
    MLP and experts, without tensor, context, pipeline or expert parallelism."""
    quantization: Quantization | None = None
    """fp8 generates with copies of the linear layers' weights in FP8, made again at every weight update. The generator
    then samples from another policy than is trained: use objective.correction, and see rollout_chi2."""


class ConnectionSettings(SharingSettings, ProbeSettings):
    """Settings of requests to servers, and of failed servers."""

    concurrency: PositiveInt = 64
    """Maximum number of unfinished completions at a server. A slow server gets fewer."""
    timeout: Positive = 600.0
    """Seconds to wait for a completion before it is requested from another server."""
    retries: NonNegativeInt = 5
    """Failures in a row that a server may have. After more it is not used, until new weights or no other is left."""
    backoff: NonNegative = 0.5
    """Seconds to wait after a server's failure; they double each time, up to 30."""
    outage_timeout: NonNegative = 600.0
    """Seconds to wait for a server when none responds. Then the run ends and can be resumed. Servers that the run
    started are restarted instead."""


class SyncSettings(Settings):
    """Settings of weight synchronisation with servers."""

    sync: SyncMethod | None = None
    """Transport of new weights: safetensors in the run directory, which the servers must see ("disk"); sent into their
    memory ("network": vLLM, over NCCL, with GPUs on both sides); shared with vLLM that the run starts on the same
    device ("ipc": by CUDA IPC, or between CPUs); or what changed ("delta": `postlude serve`), by HTTP to those that do
    not see it. None takes ipc for vLLM that shares the trainer's GPUs, else disk."""
    sync_timeout: Positive = 60.0
    """Seconds for a server to join, or to receive one gibibyte. Then it counts as failed."""
    checksum_every: NonNegativeInt = 20
    """Weight updates between comparisons of the servers' checksums, starting with the first; 0 disables them. vLLM
    hashes every weight for it, about a second per gigabyte."""


class RunningServers(ConnectionSettings, SyncSettings):
    """Servers that run already, each with the whole model: `postlude serve`, vLLM, SGLang, llama.cpp, or others with
    OpenAI's protocol that take and give token ids."""

    urls: Common[Annotated[tuple[Annotated[str, Field(pattern="^https?://.")], ...], Field(min_length=1)]]
    """URLs of the servers, such as http://localhost:8000."""
    api: Literal["auto", "postlude", "vllm", "sglang", "llama.cpp", "openai"] | UserAPI = "auto"
    """API of the servers; auto detects it for each. Your own class is path/to/file.py:name."""
    model: str | None = None
    """Name of the model at the servers; none takes the only one that a server has."""
    api_key: str | None = None
    """Name of the environment variable that holds the API key. The key itself does not belong in a config."""

    @classmethod
    def parse(cls, text: str) -> RunningServers:
        """Reads URLs separated by commas."""
        return cls(urls=tuple(url.strip() for url in text.split(",")))


class LaunchedServers(ConnectionSettings):
    """Servers that start and end with the run."""

    count: Common[PositiveInt] = 1
    """Number of servers, each with the whole model."""
    cpus: Positive = 1.0
    """CPU cores of each server, for placement on a cluster."""
    arguments: tuple[str, ...] = ()
    """More arguments of the command that starts a server, such as --max-sequences and 64."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers, besides the run's own. A run writes *** in place of their values."""
    start_timeout: Positive = 600.0
    """Seconds in which a server must be ready."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts of each server."""


class LaunchedGenerators(LaunchedServers):
    """Processes of `postlude serve` with the native generator, besides the trainer's ranks."""

    device: DeviceKind | None = None
    """Device of the servers; none takes the trainer's."""
    gpus: GPUs = 0.0
    """GPUs of each server; with 0 on cuda they share the trainer's. On Ray, less than 1 is a share of one GPU and 0 is
    none."""
    threads: PositiveInt = 1
    """CPU threads of each server."""


class LaunchedVLLM(LaunchedServers, SyncSettings):
    """vLLM servers, with the flags and variables that weight updates need."""

    python: Annotated[str, InputPath("path")] | None = None
    """Python interpreter that has vLLM; none takes the current one."""
    gpus: GPUs = 1.0
    """GPUs of each server, on Ray also a share of one; 0 for vLLM on the CPU, which gets 4 GiB for keys and values
    unless `env` sets VLLM_CPU_KVCACHE_SPACE."""

    @model_validator(mode="after")
    def _check_sync(self) -> Self:
        if self.sync == "delta":
            raise ValueError("rollout.sync is delta, but vLLM loads whole tensors only. Use disk or network.")
        return self


def sync_method(rollout: SyncSettings, *, ray: bool) -> SyncMethod:
    """Returns the transport of new weights."""
    if rollout.sync is not None:
        return rollout.sync
    return "ipc" if isinstance(rollout, LaunchedVLLM) and sleeps(rollout, ray=ray) else "disk"


def sleeps(rollout: LaunchedVLLM, *, ray: bool) -> bool:
    """Whether the servers run on the trainer's GPUs, and free their memory while it trains."""
    return rollout.share_gpu and rollout.gpus > 0 and not ray


Rollout: TypeAlias = NativeRollout | RunningServers | LaunchedGenerators | LaunchedVLLM
RolloutSettings: TypeAlias = Common[
    Annotated[
        Rollout,
        TaggedUnion(native=NativeRollout, server=RunningServers, generators=LaunchedGenerators, vllm=LaunchedVLLM),
    ]
]


def rollout_of(config: Any) -> Any:
    """Returns the rollout settings of a recipe's config, which some recipes have in `data`; None if it has none."""
    holder = config if hasattr(config, "environment") else getattr(config, "data", None)
    return getattr(holder, "rollout", None)
