"""A value head: a linear layer on an output processor's hidden states, trained to predict each sequence's reward."""

import torch

from postlude import OutputInputs, load_model, pack

torch.manual_seed(0)
model = load_model("tiny-dense")
value_head = torch.nn.Linear(model.config.hidden_size, 1)
optimizer = torch.optim.AdamW([*model.parameters(), *value_head.parameters()], lr=1e-3)
sequences = [list(b"a good answer"), list(b"a bad answer"), list(b"another good one")]
microbatches = pack(sequences, budget=32, columns={"reward": [1.0, -1.0, 1.0]})


def value_loss(inputs: OutputInputs, head: torch.nn.Linear) -> torch.Tensor:
    values = inputs.gather(head(inputs.hidden))[:, 0]  # [tokens]
    errors = (values - inputs.microbatch.column("reward")).square() * (inputs.microbatch.targets >= 0)
    return errors.sum() / inputs.microbatch.batch_targets


losses = []
for _ in range(60):
    parts = [model(m, output_processor=value_loss, output_processor_context=value_head) for m in microbatches]
    torch.stack(parts).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(sum(part.item() for part in parts))
print(f"{losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.2 * losses[0]
