"""Weights sent to vLLM by its three-phase endpoints, with gloo in place of NCCL."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import Engine, load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.weights.channel import UniqueId
from postlude.serving.weights.transfer import WeightTransfer
from tests.conftest import Ranks
from tests.serving.test_vllm import PROMPTS, trained, written
from tests.serving.vllm_server import PYTHON, vllm

pytestmark = pytest.mark.serving

TAKES = ("--weight-transfer-config", '{"backend": "gloo"}', "--worker-extension-cls", "gloo_engine.Extension")
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)


def sends(group: Any, url: str, source: str, directory: str) -> tuple[Any, Any, dict[str, str], dict[str, str]]:
    """Returns tokens before and after sending weights, and vLLM's weights then and after reading the same from disk."""
    engine = Engine(source, device="cpu")
    engine.export_hf(directory)
    with closing(GenerationClient(url)) as servers, closing(WeightTransfer(engine, send_bytes=100_000)) as transfer:
        before = [completion.tokens for (completion,) in servers.generate(PROMPTS, GREEDY)]
        sent = transfer.send(servers, WeightsVersion(None, "start.1"))
        print(f"{sent.bytes} bytes sent in {sent.seconds:.2f} s")
        assert sent.servers == 1
        answered = servers.generate(PROMPTS, GREEDY)
        assert {span.version for (completion,) in answered for span in completion.versions} == {"start.1"}
        received_digests = digests(url)
        servers.reload(WeightsVersion(directory, "start.2"))
        return before, [completion.tokens for (completion,) in answered], received_digests, digests(url)


def digests(url: str) -> dict[str, str]:
    request = urllib.request.Request(
        f"{url}/weight_checker", b'{"action": "checksum"}', {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        checksums: dict[str, str] = json.load(answer)["checksums"]
        return checksums


def test_vllm_has_the_weights_that_were_sent(ranks: Ranks, tmp_path: Path) -> None:
    old, new = (written("llama", tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    native = [
        [
            completion.tokens
            for (completion,) in Generator(load_model(model, dtype=torch.float32).eval()).generate(PROMPTS, GREEDY)
        ]
        for model in (old, new)
    ]
    with vllm(old, tmp_path, *TAKES, "--logprobs-mode", "processed_logprobs", path=Path(__file__).parent) as url:
        ((before, after, received_digests, read),) = ranks(1, sends, url, str(new), str(tmp_path / "disk"))
        assert (before, after) == (native[0], native[1])
        assert received_digests == read, "tensor by tensor what it reads from a disk"
        settings = (
            "--warm_start.steps=0",
            "--evaluation.every=0",
            "--save_every=0",
            "--export=false",
            "--prompts_per_step=2",
        )
        options = (f"--model={new}", "--rollout.kind=server", f"--rollout.urls=[{url}]", "--rollout.sync=network")
        moved = ("--optimizer.lr=1e-2", "--optimizer.weight_decay=5")  # by a twentieth a step, whatever the rewards
        (rows,) = ranks(1, trained, str(tmp_path), *settings, *options, *moved)
        print(
            [{name: row[name] for name in row if name.startswith("servers/") or name == "rollout_kl"} for row in rows]
        )
        assert all(0.0 <= row["rollout_kl"] < 1e-6 for row in rows)


def test_nccl_init_request_is_accepted_by_vllms_own_class() -> None:
    """vLLM's class refuses unknown fields and ids of another length."""
    messages: list[Any] = []

    async def send(method: str, path: str, body: Any = None) -> None:
        messages.append(body)

    info = {"nccl_unique_id_b64": base64.b64encode(bytes(UniqueId())).decode()}  # as NCCLRendezvous gives it
    asyncio.run(VLLMAPI().join_channel(send, info, 4))
    read = (
        "import json, sys\n"
        "from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo as Info\n"
        "info = Info(**json.load(sys.stdin)); print(info.world_size, info.rank_offset, info.packed)"
    )
    init_info = json.dumps(messages[-1]["init_info"])
    done = subprocess.run([PYTHON, "-c", read], input=init_info, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["5", "1", "True"]
