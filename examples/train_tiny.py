"""Train the small built-in model to add, through the seam: `make demo`."""

import argparse
import random
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from postlude import LanguageModel, OutputInputs, load_model, load_tokenizer, pack


def problems(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Sums of two numbers below 20, as (question, answer)."""
    pairs = [(rng.randrange(20), rng.randrange(20)) for _ in range(count)]
    return [(f"{a}+{b}=", f"{a + b}") for a, b in pairs]


def answer_loss(inputs: OutputInputs, context: None) -> torch.Tensor:
    """Negative log-prob of the answer's tokens, summed."""
    microbatch = inputs.microbatch
    targets = microbatch.targets.where(microbatch.column("answer"), -100)
    return -inputs.head.logprobs(inputs.hidden, targets).logprob.sum()


def encode(tokenizer, batch: list[tuple[str, str]], budget: int):
    sequences, masks = [], []
    for question, answer in batch:
        before, after = tokenizer(question)["input_ids"], tokenizer(answer + "<|end|>")["input_ids"]
        sequences.append(before + after)
        masks.append([False] * len(before) + [True] * len(after))
    return pack(sequences, budget=budget, columns={"answer": masks}), sum(map(sum, masks))


@torch.no_grad()
def accuracy(model: LanguageModel, tokenizer, batch: list[tuple[str, str]]) -> float:
    """Share of answers whose every token is the likeliest one."""

    def hits(inputs: OutputInputs, context: None) -> torch.Tensor:
        microbatch = inputs.microbatch
        stats = inputs.head.logprobs(inputs.hidden, microbatch.targets, hit=True)
        return microbatch.sequence_sum(~stats.hit & microbatch.column("answer")) == 0

    microbatches, _ = encode(tokenizer, batch, budget=2048)
    right = torch.cat([model(microbatch, output_processor=hits) for microbatch in microbatches])
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-dense", help="tiny-dense or tiny-moe")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    console, rng = Console(), random.Random(options.seed)
    model, tokenizer = load_model(options.model, seed=options.seed), load_tokenizer(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=options.steps)
    questions = problems(256, random.Random(-1))
    console.print(
        f"{options.model}: {model.config.pattern}, two numbers below 20 to add, {options.steps} steps", markup=False
    )
    console.print(f"accuracy before: {accuracy(model, tokenizer, questions):.0%}")

    losses, started = [], time.perf_counter()
    columns = (TextColumn("step {task.completed}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("train", total=options.steps, loss=float("nan"))
        for step in range(options.steps):
            microbatches, answers = encode(tokenizer, problems(96, rng), budget=512)
            loss = 0.0
            for microbatch in microbatches:
                part = model(microbatch, output_processor=answer_loss) / answers
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss)
            progress.update(task, advance=1, loss=loss)
            if step % (options.steps // 10) == 0:
                progress.console.print(f"step {step:4d}  loss {loss:.3f}  {'█' * round(20 * loss / losses[0])}")

    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    console.print(f"loss {first:.3f} -> {last:.3f} in {time.perf_counter() - started:.0f} s")
    console.print(f"accuracy after: {accuracy(model, tokenizer, questions):.0%} of 256 sums")
    if not last < 0.5 * first:
        raise SystemExit("the loss did not fall by half; something is broken.")


if __name__ == "__main__":
    main()
