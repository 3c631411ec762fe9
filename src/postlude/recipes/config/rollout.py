"""Who draws a recipe's answers: the generator in the ranks, servers that run, or servers that are started."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from postlude.recipes.config.schema import InputPath, NonNegative, Positive, Settings, TaggedUnion


def _whole_or_share(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{gpus:g} GPUs are no whole number; give one, or for a share of one GPU less than 1.")
    return gpus


GPUs: TypeAlias = Annotated[NonNegative, AfterValidator(_whole_or_share)]


class NativeRollout(Settings):
    """The generator in the trainer's own ranks: a whole copy of the model on each."""


class ConnectionSettings(Settings):
    """How servers are asked, and when one is given up."""

    concurrency: PositiveInt = 64
    """The most answers that are outstanding at a server. A slow one gets fewer by itself."""
    timeout: Positive = 600.0
    """Seconds after which an answer counts as not coming, and is asked for elsewhere."""
    retries: NonNegativeInt = 5
    """Times in a row that a server may fail before it is given up, until there are new weights or no other is left."""
    backoff: NonNegative = 0.5
    """Seconds that a server that failed is left alone for; they double each time, up to 30."""
    outage_timeout: NonNegative = 600.0
    """Seconds that the run waits for a server when none answers, as while one is started again; then it ends, and can
    go on later. Servers that the run started are started again instead."""


class SyncSettings(Settings):
    """How new weights reach servers that have more than one way."""

    sync: Literal["disk", "network"] = "disk"
    """How new weights reach them: by safetensors in the run's directory, which they must see, or sent into their memory
    (vLLM, over NCCL, where the trainer and they have GPUs)."""
    sync_timeout: Positive = 60.0
    """Seconds that a server may take to join, or to take one gibibyte of what is sent; then it counts as failed."""
    checksum_every: NonNegativeInt = 20
    """How many times servers get new weights from one comparison of their checksums to the next, beginning with the
    first; 0 compares none. vLLM hashes every weight for it, about a second a gigabyte."""


class RunningServers(ConnectionSettings, SyncSettings):
    """Servers that are running already, each with the whole model: `postlude serve`, vLLM, SGLang, llama.cpp, or others
    of OpenAI's protocol that take and give token ids."""

    urls: Annotated[tuple[Annotated[str, Field(pattern="^https?://.")], ...], Field(min_length=1)]
    """Their addresses, such as http://localhost:8000."""
    api: Literal["auto", "postlude", "vllm", "sglang", "llama.cpp", "openai"] = "auto"
    """How they are spoken to; auto asks each what it is."""
    model: str | None = None
    """What they call the model; none takes the only one that a server has."""
    api_key: str | None = None
    """The name of the environment variable that holds their key; the key itself has no place in a config."""

    @classmethod
    def parse(cls, text: str) -> RunningServers:
        """From text alone: addresses with commas between them."""
        return cls(urls=tuple(each.strip() for each in text.split(",")))


class LaunchedServers(ConnectionSettings):
    """Servers that are started with the run, kept running, and end with it."""

    count: PositiveInt = 1
    """How many, each with the whole model."""
    cpus: Positive = 1.0
    """Cores that each needs. Who starts servers on several machines goes by it."""
    arguments: tuple[str, ...] = ()
    """More words for the command that starts one, such as --max-sequences and 64."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables that it gets besides the run's own. A run writes *** in place of their values."""
    start_timeout: Positive = 600.0
    """Seconds in which a server must be ready to answer."""
    max_restarts: NonNegativeInt = 3
    """Times that each is started again when it ends."""


class LaunchedGenerators(LaunchedServers):
    """Processes of `postlude serve`, the native generator, which draw answers beside the trainer's ranks."""

    device: Literal["cpu", "cuda"] | None = None
    """What they compute on; none is as the trainer."""
    gpus: GPUs = 0.0
    """GPUs that each has for itself; with 0 and cuda they share the trainer's. On Ray less than 1 is a share of one,
    and 0 is none."""
    threads: PositiveInt = 1
    """Threads that each computes with on a CPU."""


class LaunchedVLLM(LaunchedServers, SyncSettings):
    """vLLM servers, with the words and variables that they need to take new weights."""

    python: Annotated[str, InputPath("path")] | None = None
    """The interpreter that has vLLM; none is the one that runs this."""
    gpus: GPUs = 1.0
    """GPUs that each has for itself, on Ray also a share of one; 0 for a vLLM of the CPU, whose keys and values get 4
    GiB: another number is yours to say, as VLLM_CPU_KVCACHE_SPACE in `env`."""


RolloutSettings: TypeAlias = Annotated[
    NativeRollout | RunningServers | LaunchedGenerators | LaunchedVLLM,
    TaggedUnion(native=NativeRollout, server=RunningServers, generators=LaunchedGenerators, vllm=LaunchedVLLM),
]
Rollout: TypeAlias = NativeRollout | RunningServers | LaunchedGenerators | LaunchedVLLM
