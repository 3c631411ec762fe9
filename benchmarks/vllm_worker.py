"""vLLM with random weights, in a process of its own that `vllm_process.py` starts with an interpreter that has vLLM.

The first argument is JSON of `Settings`. Each line of standard input is JSON of one call of `LLM.generate`; each line
of standard output answers one. The first says that the model is ready. vLLM's own output goes to standard error.
"""

import importlib.util
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output too

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    settings = json.loads(sys.argv[1])
    began = time.perf_counter()
    if importlib.util.find_spec("flashinfer") is None:
        # vLLM 0.26 takes FlashInfer on Hopper for both of these without looking whether it is installed.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if settings["gated_delta"]:
            settings["options"].setdefault("gdn_prefill_backend", "triton")
    import vllm  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(
        settings["config"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=settings["max_length"],
        max_num_seqs=settings["rows"],
        kv_cache_memory_bytes=settings["cache_bytes"],
        gpu_memory_utilization=0.05,  # with the size of the cache given, only what must be free at the start
        **settings["options"],
    )
    answer(ready=vllm.__version__, seconds=round(time.perf_counter() - began, 1))
    for line in sys.stdin:
        call = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in call["prompts"]]
        sampling = [
            vllm.SamplingParams(
                n=call["group"],
                max_tokens=length,
                ignore_eos=True,
                temperature=1.0,
                logprobs=call["logprobs"],
                detokenize=False,
                **call["filters"],
            )
            for length in call["lengths"]
        ]
        engine.reset_prefix_cache()  # each call prefills its prompts, as the native generator does
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [[len(completion.token_ids) for completion in output.outputs] for output in outputs]
        answer(seconds=seconds, lengths=lengths)


if __name__ == "__main__":
    main()
