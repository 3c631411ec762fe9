"""Log-probs of the next tokens in an output processor: equal to the logits path, without a [tokens, vocab] tensor."""

import torch

from postlude import OutputInputs, load_model, pack, unpack

model = load_model("tiny-dense")
batch = [[72, 101, 108, 108, 111], [72, 105, 33]]
(microbatch,) = pack(batch, budget=16)


def selected(inputs: OutputInputs, context: None) -> torch.Tensor:
    return inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob


fused = model(microbatch, output_processor=selected)

logits = model(microbatch).float().log_softmax(-1)
dense = logits.gather(-1, microbatch.targets.clamp_min(0)[:, None])[:, 0] * (microbatch.targets >= 0)
torch.testing.assert_close(fused, dense, rtol=1e-5, atol=1e-6)

for tokens, logprobs in zip(batch, unpack([microbatch], [fused]), strict=True):  # entry i belongs to token i
    print([(token, round(value, 3)) for token, value in zip(tokens, logprobs.tolist(), strict=True)])
