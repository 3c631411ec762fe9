"""Tokens per second through a Tinker server, beside those of the engine and the generator alone, on one machine.

    python benchmarks/tinker_engine.py --model MODEL --json OUT.json

Training: passes of `--sequences` sequences of `--length` tokens and an optimizer step, rank 32. The client sends the
next pass before the last one is done, as the real client does. Sampling: `--sequences` prompts at once. The client is
that of tinker_load.py, so the real one need not be installed. Without --model a model of 0.6B with random weights is
made. Figures are medians of the blocks of steps and of the rounds of samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tinker_load import HTTPClient

from postlude.generate.sampling_params import SamplingParams
from postlude.tinker.backend import AdamParams, Datum, LoRAConfig, ModelSpec, OptimStep, PassRequest, SampleRequest
from postlude.tinker.engine_backend import EngineBackend
from postlude.tinker.limits import Limits
from postlude.tinker.server import run_server, serve
from postlude.tinker.settings import WorkerSettings
from postlude.tinker.state import StateDirectory
from postlude.tinker.wire import ForwardBackwardRequest

NAME, RANK = "base", 32
BLOCK = 6  # steps of the engine, then of the server: in turns, since the speed of a host that others use changes


def make_model(directory: str) -> str:
    """Writes a model of 0.6B, in the shape of Qwen3-0.6B, with random weights and a tokenizer of bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from postlude.hf.load import load_tokenizer

    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    path = Path(directory, "0.6b")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    load_tokenizer("tiny-dense").save_pretrained(path)
    return str(path)


def data(options: argparse.Namespace) -> list[Datum]:
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (options.sequences, options.length + 1))
    weights = np.ones(options.length, np.float32)
    return [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": weights}) for row in rows]


def pass_body(model_id: str, seq_id: int, rows: list[Datum]) -> bytes:
    message = ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for row in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = row.tokens.astype("<i4").tobytes()
        for name, kind, dtype in (("target_tokens", 2, "<i8"), ("weights", 1, "<f4")):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = row.loss_fn_inputs[name].astype(dtype).tobytes(), kind
            tensor.shape.append(len(row.tokens))
    return bytes(message.SerializeToString())


def alone(options: argparse.Namespace, pipe: Any) -> None:
    """Runs the same passes and samples by the engine and the generator, in this process, when it is told so."""
    import torch

    from postlude.hf.load import load_tokenizer
    from postlude.tinker.datums import read_pass
    from postlude.tinker.rank_models import RankModels
    from postlude.tinker.rank_sampler import RankSampler, SampleCall, SamplerWeights
    from postlude.world.launcher import ranks

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with ranks(device=options.device):
        settings = WorkerSettings(name=NAME, source=options.model, device=options.device, budget=options.budget)
        tokenizer = load_tokenizer(options.model)
        models = RankModels(settings, tokenizer)
        models.create_model("one", ModelSpec(NAME, LoRAConfig(RANK, seed=1)))
        vocabulary = models.engine.config.vocab_size
        pass_request = PassRequest(data(options), "cross_entropy", {}, forward_only=False)
        request = read_pass(pass_request, vocab_size=vocabulary, max_context_length=1 << 20)
        sampler = RankSampler(models.engine, tokenizer, settings)
        models.engine.copy_weights(sampler.generator.model)

        def train(steps: int) -> None:
            for _ in range(steps):
                models.run_pass("one", request)
                models.run(OptimStep("one", AdamParams()))
            synchronize()

        def sample() -> None:
            sampler.add(
                [
                    SampleCall(
                        number,
                        SamplerWeights(),
                        sample_request,
                        streamed=False,
                        rank=0,
                    )
                    for number, sample_request in enumerate(requests(options))
                ]
            )
            while sampler.busy:
                sampler.step()

        pipe.send("ready")
        while (steps := pipe.recv()) is not None:
            began = time.perf_counter()
            train(steps) if steps else sample()
            pipe.send(time.perf_counter() - began)


def requests(options: argparse.Namespace) -> list[SampleRequest]:
    params = SamplingParams(max_new_tokens=options.new_tokens, seed=1, ignore_eos=True)
    return [SampleRequest(row.tokens[: options.prompt], params) for row in data(options)]


def start_server(options: argparse.Namespace, state: str, pipe: Any) -> None:
    backend = EngineBackend([f"{NAME}={options.model}"], device=options.device, budget=options.budget)
    directory, limits = StateDirectory(Path(state)), Limits()
    run_server(serve(backend, directory, host="127.0.0.1", port=0, keys=None, limits=limits, ready=pipe.send))


async def measure(url: str, engine: Any, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of a step and of a round of samples, of the engine (or generator) and the server in turns."""
    http = HTTPClient(url, "tml-benchmark")
    session = json.loads((await http.post("create_session", {"sdk_version": "benchmark"}))[1])["session_id"]
    body: Any = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    sampler = json.loads((await http.post("create_sampling_session", body))[1])["sampling_session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": RANK, "seed": 1}}
    model = json.loads(await http.call("create_model", body))["model_id"]
    rows, seq, samples = data(options), 0, 0

    async def train(steps: int) -> float:
        nonlocal seq
        began, waiting = time.perf_counter(), list[Any]()
        for _ in range(steps):
            seq += 2
            waiting.append(asyncio.create_task(http.call("forward_backward", pass_body(model, seq - 1, rows))))
            step = {"model_id": model, "seq_id": seq, "adam_params": {}}
            waiting.append(asyncio.create_task(http.call("optim_step", step)))
            while len(waiting) > 4:
                await waiting.pop(0)
        await asyncio.gather(*waiting)
        return time.perf_counter() - began

    async def sample() -> float:
        nonlocal samples
        bodies = [
            {
                "sampling_session_id": sampler,
                "seq_id": samples + number,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": sample_request.prompt.tolist()}]},
                "sampling_params": {"max_tokens": options.new_tokens, "seed": 1, "stop": []},
                "num_samples": 1,
            }
            for number, sample_request in enumerate(requests(options))
        ]
        samples += options.sequences
        began = time.perf_counter()
        await asyncio.gather(*(http.call("asample", sample_request) for sample_request in bodies))
        return time.perf_counter() - began

    async def alone(steps: int) -> float:
        engine.send(steps)
        seconds: float = await asyncio.to_thread(engine.recv)
        return seconds

    await asyncio.gather(train(options.warmup), alone(options.warmup))
    seconds: dict[str, list[float]] = {"engine": [], "server": [], "generator": [], "samples": []}
    for _ in range(options.steps // BLOCK):
        seconds["engine"].append(await alone(BLOCK) / BLOCK)
        seconds["server"].append(await train(BLOCK) / BLOCK)
        print(f"a step: {seconds['engine'][-1]:.3f} s alone, {seconds['server'][-1]:.3f} s by the server", flush=True)
    for number in range(options.warmup + options.rounds):
        times = await alone(0), await sample()
        if number >= options.warmup:
            seconds["generator"].append(times[0])
            seconds["samples"].append(times[1])
            print(f"samples: {times[0]:.3f} s alone, {times[1]:.3f} s by the server", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; by default one of 0.6B with random weights is made")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of training, in blocks of 6")
    parser.add_argument("--rounds", type=int, default=8, help="of samples")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        options.model = options.model or make_model(directory)
        engine, engine_end = context.Pipe()
        server, server_end = context.Pipe()
        processes: list[Any] = [
            context.Process(target=alone, args=(options, engine_end)),
            context.Process(target=start_server, args=(options, f"{directory}/state", server_end)),
        ]
        for process in processes:
            process.start()
        engine.recv()
        seconds = asyncio.run(measure(server.recv(), engine, options))
        engine.send(None)
        processes[1].terminate()
        for process in processes:
            process.join()
    trained, sampled = options.sequences * options.length, options.sequences * options.new_tokens
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    results = {
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "seconds": seconds,
        "training": {"engine": trained / median["engine"], "server": trained / median["server"]},
        "sampling": {"generator": sampled / median["generator"], "server": sampled / median["samples"]},
        "training_share": median["engine"] / median["server"],
        "sampling_share": median["generator"] / median["samples"],
    }
    print(json.dumps(results, indent=2, default=str))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str))


if __name__ == "__main__":
    main()
