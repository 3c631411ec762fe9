"""Runs unmodified recipes of tinker-cookbook against `postlude tinker` on the CPU, and writes their curves.

    python benchmarks/tinker_recipes.py --client .venv-tinker/bin/python --to runs/tinker-recipes

Nothing is fetched. The base is a small Llama whose tokenizer has one token per digit. All its weights are first trained
on additions through the server (`warm`, which the client's interpreter runs), but not to the end. Then, each with LoRA
on that base: `chat_sl` on more additions, DPO on pairs of a right and a wrong sum, and `math_rl` with `env=arithmetic`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHRASES = ("User:", "Assistant:", " What is ", " + ", "?\n\n", "\n\n")
EXAMPLE = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]  # as in math_rl
RENDERER = "role_colon"
CURVES = {
    "chat_sl": ("train_mean_nll",),
    "dpo": ("dpo_loss", "accuracy"),
    "math_rl": ("env/all/reward/total", "env/all/correct", "optim/kl_sample_train_v2"),
}


def write_model(directory: Path) -> None:
    """Writes a model with random weights, 0.15 M parameters, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from postlude.hf.load import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(PHRASES))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def addition(generator: random.Random, wrong: int = 0) -> list[dict[str, str]]:
    """Returns a conversation as that of math_rl; with `wrong`, the sum is off by it."""
    x, y = generator.randint(0, 100), generator.randint(0, 100)
    question = {"role": "user", "content": f"What is {x} + {y}?"}
    return [*EXAMPLE, question, {"role": "assistant", "content": str(abs(x + y + wrong))}]


def write_data(directory: Path) -> None:
    """Writes additions for `chat_sl`, and pairs for DPO where `load_dataset("Anthropic/hh-rlhf")` looks first."""
    generator = random.Random(1)
    lines = [json.dumps({"messages": addition(generator)}) for _ in range(8000)]
    (directory / "additions.jsonl").write_text("\n".join(lines))
    pairs = directory / "Anthropic" / "hh-rlhf"
    pairs.mkdir(parents=True)
    for name, count in (("train", 8000), ("test", 256)):
        lines = []
        for _ in range(count):
            seed, wrong = generator.random(), generator.choice([-10, -2, -1, 1, 2, 10])
            texts = [_human(addition(random.Random(seed), offset)) for offset in (0, wrong)]
            lines.append(json.dumps({"chosen": texts[0], "rejected": texts[1]}))
        (pairs / f"{name}.jsonl").write_text("\n".join(lines))


def _human(messages: Sequence[Mapping[str, str]]) -> str:
    roles = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{roles[message['role']]}: {message['content']}" for message in messages)


@contextmanager
def server(model: Path, state: Path) -> Iterator[dict[str, str]]:
    """Runs `postlude tinker`. Yields the environment of its clients."""
    command = [sys.executable, "-m", "postlude", "tinker", str(model), "--state", str(state)]
    with (state.parent / f"{state.name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while "TINKER_API_KEY" not in (text := Path(log.name).read_text()):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {text}")
                time.sleep(0.2)
            exports = [line.removeprefix("export ") for line in text.splitlines() if line.startswith("export ")]
            hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(state.parent / "hf")}
            yield os.environ | dict(line.split("=", 1) for line in exports) | hub
        finally:
            process.terminate()
            process.wait()


def warm(model: str, steps: int, rate: float) -> None:
    """Trains all weights on additions with the real client. Prints the path of the saved weights and the losses."""
    from tinker_cookbook import renderers
    from tinker_cookbook.supervised.data import conversation_to_datum
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    import tinker
    from tinker import types

    def post(path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json", "X-API-Key": os.environ["TINKER_API_KEY"]}
        url = f"{os.environ['TINKER_BASE_URL']}/api/v1/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
            return json.load(reply)

    service, generator = tinker.ServiceClient(), random.Random(0)
    number = service.holder.get_training_client_id()
    body = {"session_id": service.holder.get_session_id(), "model_seq_id": number, "base_model": model}
    created = post("retrieve_future", post("create_model", body))
    training = tinker.TrainingClient(service.holder, model_seq_id=number, model_id=created["model_id"])
    renderer = renderers.get_renderer(RENDERER, get_tokenizer(model))
    train_on, batch, losses = renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE, 128, []
    for step in range(steps):
        data = [conversation_to_datum(addition(generator), renderer, None, train_on) for _ in range(batch)]
        adam = types.AdamParams(learning_rate=rate * min(1.0, (step + 1) / 20), grad_clip_norm=batch)
        passed, stepped = training.forward_backward(data, "cross_entropy"), training.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"] / batch)
        stepped.result()
        if step % 20 == 0:
            print(f"step {step}: {losses[-1]:.3f} a sequence", file=sys.stderr, flush=True)
    path = training.save_weights_for_sampler("warm").result().path
    print(json.dumps({"path": path, "losses": losses}), flush=True)


def run_recipe(client: str, module: str, settings: Mapping[str, Any], environment: Any, directory: Path) -> list[Any]:
    """Runs a recipe in `directory`. Returns the lines of its metrics."""
    log = Path(settings["log_path"])
    command = [client, "-m", f"tinker_cookbook.recipes.{module}", *(f"{name}={settings[name]}" for name in settings)]
    print(" ".join(command), flush=True)
    with (directory / f"{log.name}.log").open("w") as output:
        subprocess.run(command, env=environment, cwd=directory, stdout=output, stderr=output, check=True)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Runs everything, and writes curves.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", required=True, help="interpreter with tinker and tinker-cookbook[math-rl]")
    parser.add_argument("--to", type=Path, required=True, help="a new directory")
    parser.add_argument("--warm-steps", type=int, default=340)
    parser.add_argument("--warm-rate", type=float, default=4e-3)
    parser.add_argument("--recipes", nargs="*", choices=[*CURVES], help="those to run (default: all)")
    parser.add_argument("--base", type=Path, help="a base that an earlier run has trained; its training is left out")
    options = parser.parse_args()
    directory = options.to.absolute()
    directory.mkdir(parents=True)
    client = str(Path(options.client).absolute())
    curves: dict[str, Any] = {}
    base: Path = options.base.absolute() if options.base is not None else directory / "base"
    write_data(directory)
    if options.base is None:
        write_model(directory / "random")
        began = time.monotonic()
        with server(directory / "random", directory / "warm-state") as environment:
            arguments = [str(directory / "random"), str(options.warm_steps), str(options.warm_rate)]
            command = [client, str(Path(__file__).absolute()), "warm", *arguments]
            output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        result = json.loads(output.splitlines()[-1])
        run, kind, name = result["path"].removeprefix("tinker://").split("/")
        (directory / "warm-state" / "runs" / run / kind / name).rename(base)
        curves["warm"] = {"seconds": time.monotonic() - began, "loss": result["losses"]}
    shared = {"model_name": base, "renderer_name": RENDERER}
    recipes = {
        "chat_sl": ("chat_sl.train", {"dataset": "additions.jsonl", "learning_rate": 1e-3, "batch_size": 128}),
        "dpo": ("preference.dpo.train", {"dataset": "hhh", "learning_rate": 5e-4, "batch_size": 64, "max_steps": 30}),
        "math_rl": ("math_rl.train", {"learning_rate": 2e-3, "groups_per_batch": 64, "group_size": 8, "max_steps": 35}),
    }
    recipes["chat_sl"][1].update(eval_every=0, save_every=0, max_steps=40)
    recipes["math_rl"][1].update(max_tokens=6, eval_every=0, save_every=0)
    for recipe in options.recipes or CURVES:
        module, settings = recipes[recipe]
        began = time.monotonic()
        with server(base, directory / f"{recipe}-state") as environment:
            lines = run_recipe(
                client, module, {**shared, **settings, "log_path": directory / recipe}, environment, directory
            )
        values = {name: [line[name] for line in lines if name in line] for name in CURVES[recipe]}
        curves[recipe] = {"seconds": time.monotonic() - began} | values
        print(recipe, json.dumps(curves[recipe]), flush=True)
        (directory / "curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    if sys.argv[1:2] == ["warm"]:
        warm(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
