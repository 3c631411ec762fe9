"""Runs in the environment of the real client: `python client_script.py PART`, with TINKER_BASE_URL. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

import numpy as np

import tinker
from tinker import types


def datum(tokens: list[int]) -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
        "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


DATA = [datum(list(text)) for text in (b"the cat sat on the mat", b"two and two are four", b"over the hills")]
ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints(list(b"the cat"))


def loop(service: tinker.ServiceClient, base: str) -> dict[str, Any]:
    """Trains, saves, loads and samples, as a supervised and an RL loop do."""
    training = service.create_lora_training_client(base, rank=4, seed=1)
    losses, futures = [], []
    for _ in range(4):
        futures.append((training.forward_backward(DATA * 350, "cross_entropy"), training.optim_step(ADAM)))
    for passed, step in futures:
        result = passed.result()
        assert len(result.loss_fn_outputs) == len(DATA) * 350
        losses.append(result.metrics["loss:sum"])
        step.result()
    state = training.save_state("middle").result().path
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    sampled = sampler.sample(PROMPT, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    sequence = sampled.sequences[0]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])).result()
    named = training.save_weights_for_sampler("named").result().path
    resampled = service.create_sampling_client(model_path=named).sample(PROMPT, 3, params).result()

    restored = service.create_training_client_from_state_with_optimizer(state)
    before = restored.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    after = training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    custom = training.forward_backward_custom(DATA, custom_loss).result().metrics
    refused = ""
    try:
        training.forward_backward(DATA, "no_such_loss").result()
    except tinker.RequestFailedError as error:
        refused = str(error)
    return {
        "losses": losses,
        "sequences": [list(sampled_sequence.tokens) for sampled_sequence in sampled.sequences],
        "named_sequences": [list(sampled_sequence.tokens) for sampled_sequence in resampled.sequences],
        "logprobs": list(sequence.logprobs),
        "scored": scored[-len(sequence.tokens) :],
        "before": before,
        "after": after,
        "custom": custom,
        "refused": refused,
        "state": state,
        "named": named,
        "version": tinker.__version__,
    }


def custom_loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    """Returns minus the sum of the log-probs, which is the cross-entropy."""
    return -sum(tensor.sum() for tensor in logprobs), {"mine": 1.0}


def train_across_restart(service: tinker.ServiceClient, base: str) -> dict[str, Any]:
    """Trains and samples, waits while the server is killed and restarted, and continues."""
    training = service.create_lora_training_client(base, rank=4)
    training.forward_backward(DATA, "cross_entropy").result()
    training.optim_step(ADAM).result()
    state = training.save_state("kept").result().path
    expected = training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    named = training.save_weights_for_sampler("kept").result().path
    sampler = service.create_sampling_client(model_path=named)
    params = types.SamplingParams(max_tokens=5, seed=3)
    first = sampler.sample(PROMPT, 1, params).result().sequences[0].tokens
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    second = sampler.sample(PROMPT, 1, params).result().sequences[0].tokens
    sentence = ""
    try:
        training.forward_backward(DATA, "cross_entropy").result()
    except tinker.TinkerError as error:
        sentence = str(error)
    restored = service.create_training_client_from_state_with_optimizer(state)
    loss = restored.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    return {"same": list(first) == list(second), "sentence": sentence, "state": state, "loss": [expected, loss]}


def post(path: str, body: dict[str, Any], **headers: str) -> Any:
    """Sends a request for which the client has no method."""
    sent = {"Content-Type": "application/json", "X-API-Key": os.environ["TINKER_API_KEY"]} | headers
    request = urllib.request.Request(f"{os.environ['TINKER_BASE_URL']}/{path}", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def create_full(service: tinker.ServiceClient, base: str) -> tinker.TrainingClient:
    """Creates a model without lora_config, which the protocol allows but the client has no method for."""
    number = service.holder.get_training_client_id()
    body = {"session_id": service.holder.get_session_id(), "model_seq_id": number, "base_model": base}
    created = post("api/v1/retrieve_future", post("api/v1/create_model", body))
    return tinker.TrainingClient(service.holder, model_seq_id=number, model_id=created["model_id"])


def train_full_model(service: tinker.ServiceClient, base: str) -> dict[str, Any]:
    """Trains all weights next to an adapter; saves, samples and loads them."""
    training, adapter = create_full(service, base), service.create_lora_training_client(base, rank=4, seed=1)
    before = adapter.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    losses = []
    for _ in range(4):
        losses.append(training.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        training.optim_step(ADAM).result()
    after = adapter.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    state = training.save_state("state").result().path
    snapshot = training.save_weights_and_get_sampling_client()
    named = training.save_weights_for_sampler("named").result().path
    expected = training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    params = types.SamplingParams(max_tokens=5, seed=3)
    sampled = [
        list(sampler.sample(PROMPT, 1, params).result().sequences[0].tokens)
        for sampler in (snapshot, service.create_sampling_client(model_path=named))
    ]
    training.optim_step(ADAM).result()
    training.load_state_with_optimizer(state).result()
    loaded = training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]
    info = training.get_info()
    results = {"losses": losses, "adapter": [before, after], "sampled": sampled, "loaded": [expected, loaded]}
    return results | {"is_lora": info.is_lora, "named": named}


def messages() -> dict[str, Any]:
    """Returns the client's protobuf messages: number, type and label of each field."""
    from tinker.proto import tinker_public_pb2 as proto

    return {
        name: {field.name: [field.number, field.type, field.is_repeated] for field in message.fields}
        for name, message in proto.DESCRIPTOR.message_types_by_name.items()
    }


def complete(model: str) -> Any:
    """Returns the reply of the OpenAI completions route."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return post("oai/api/v1/chat/completions", body, Authorization=f"Bearer {os.environ['TINKER_API_KEY']}")


if __name__ == "__main__":
    if sys.argv[1] == "messages":
        outcome = messages()
    elif sys.argv[1] == "openai":
        outcome = complete(sys.argv[2])
    else:
        client = tinker.ServiceClient()
        models = client.get_server_capabilities().supported_models
        outcome = {"loop": loop, "killed": train_across_restart, "full": train_full_model}[sys.argv[1]](
            client, models[0].model_name
        )
    print(json.dumps(outcome), flush=True)
