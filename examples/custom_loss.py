"""A loss of your own as an output processor: weighted log-likelihood with an entropy bonus, trained for a few steps."""

import torch

from postlude import OutputInputs, load_model, pack

model = load_model("tiny-dense")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sequences = [list(b"one two three four"), list(b"two four six eight ten"), list(b"one three five seven")]
microbatches = pack(sequences, budget=48, columns={"weight": [1.0, 0.5, 1.0]})


def weighted(inputs: OutputInputs, bonus: float) -> torch.Tensor:
    stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)
    loss = -inputs.microbatch.column("weight") * stats.logprob - bonus * stats.entropy
    return loss.sum() / inputs.microbatch.batch_targets


losses = []
for _ in range(12):
    parts = [model(m, output_processor=weighted, output_processor_context=0.01) for m in microbatches]
    torch.stack(parts).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(sum(part.item() for part in parts))
print(" ".join(f"{loss:.3f}" for loss in losses))
assert losses[-1] < 0.5 * losses[0]
