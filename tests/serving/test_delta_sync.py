"""Weights in pieces are the weights, to the bit, and whatever goes wrong with changes sends all of them."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from postlude import LanguageModel, export_hf
from postlude.generate.generator import Generator
from postlude.hf.tensor_sources import checksum
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.postlude import PieceFilesBody
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from postlude.serving.weights import delta
from postlude.serving.weights.delta import ReceivedWeights, WeightPieces
from postlude.serving.weights.sync import WEIGHTS, DeltaSync, SyncOptions
from tests.serving.fake_vllm import FakeVLLM
from tests.serving.test_generation_server import KEY, serving, sharp


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "bf16": torch.randn(70, 9, generator=generator).bfloat16(),
        "fp32": torch.randn(5, 3, generator=generator),
        "same": torch.ones(11, dtype=torch.float16),
        "bytes": torch.randint(256, (3, 1), generator=generator).to(torch.uint8),
        "scalar": torch.randn((), generator=generator, dtype=torch.float64),
        "none": torch.zeros(0, 4),
    }


def write(directory: Path, values: dict[str, Tensor]) -> Path:
    directory.mkdir()
    save_file(values, directory / "model.safetensors")
    return directory


def received(weights: ReceivedWeights) -> dict[str, Tensor]:
    source = weights.source
    return {name: source.take(name) for name in list(source.names())}


def send(weights: ReceivedWeights, pieces: Sequence[bytes]) -> list[bool]:
    return [weights.add(piece) for piece in pieces]


def test_pieces_give_the_weights_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every dtype and shape, in pieces that end inside of tensors; NaN payloads and the sign of 0 change too."""
    monkeypatch.setattr(delta, "RANGE", 64)
    monkeypatch.setattr(delta, "PIECE_BYTES", 100)
    first, second = tensors(0), tensors(0)
    second["bf16"].flatten()[[0, 63, 64, 500]] = torch.tensor([torch.nan, -0.0, 3.0, 4.0]).bfloat16()
    second["fp32"][4, 2] += 1e-3
    second["bytes"][1] ^= 1
    one = WeightPieces.of(write(tmp_path / "s.1", first), "s.1", None)
    two = WeightPieces.of(write(tmp_path / "s.2", second), "s.2", tmp_path / "s.1")
    assert (two.base, two.changed, two.total) == ("s.1", 6, sum(tensor.numel() for tensor in first.values()))
    weights = ReceivedWeights()
    assert send(weights, list(one.pieces()))[-3:] == [False, False, True]
    assert send(weights, list(two.pieces()))[-1]
    assert weights.version == "s.2"
    for name, tensor in received(weights).items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.flatten().view(torch.uint8), second[name].flatten().view(torch.uint8)), name
    assert len(received(weights)) == len(second)


def test_unchanged_weights_are_one_small_piece(tmp_path: Path) -> None:
    write(tmp_path / "s.1", tensors(0))
    pieces = WeightPieces.of(write(tmp_path / "s.2", tensors(0)), "s.2", tmp_path / "s.1")
    assert (pieces.changed, len(list(pieces.pieces()))) == (0, 1)
    assert pieces.delta_bytes < 200


def test_changes_to_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, in another order, cut off, or to weights that are not what their version says."""
    monkeypatch.setattr(delta, "PIECE_BYTES", 100)
    one = WeightPieces.of(write(tmp_path / "s.1", tensors(0)), "s.1", None)
    two = WeightPieces.of(write(tmp_path / "s.2", tensors(1)), "s.2", tmp_path / "s.1")
    full, changes = list(one.pieces()), list(two.pieces())
    assert len(changes) > 1
    weights = ReceivedWeights()
    with pytest.raises(ValueError, match=r"changes since 's\.1' were sent, but here is None"):
        weights.add(changes[0])
    send(weights, full)
    weights.add(changes[0])
    with pytest.raises(
        ValueError, match=r"piece 0 of 's\.2' was sent|changes since 's\.1' were sent, but here is None"
    ):
        weights.add(changes[0])
    send(weights, full)
    with pytest.raises(ValueError, match=r"piece 1 of 's\.2' was sent, but piece \d+ of 's\.1' is next"):
        weights.add(changes[1])
    send(weights, full)
    with pytest.raises(ValueError, match="cannot be read"):
        weights.add(changes[0][:-9])
    assert weights.version is None
    send(weights, full)
    weights._tensors["same"][3] = 7.0
    with pytest.raises(ValueError, match=r"all pieces of 's\.2' give weights of checksum \w+, not \w+"):
        send(weights, changes)
    assert send(weights, list(replace(two, base=None).pieces()))[-1], "all weights repair it"


RANGE = {"name": "a", "dtype": "float32", "shape": [2], "start": 0, "length": 2, "changed": None}
HEADER = {"version": "s.1", "base": None, "checksum": "", "index": 0, "last": True, "tensors": [RANGE]}


def piece(header: Any, content: bytes = bytes(8)) -> bytes:
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + content


MALFORMED = {
    "no header": (b"{", "not JSON"),
    "no piece": (piece([]), "is \\[\\]: give an object"),
    "no index": (piece({**HEADER, "index": None}), "index is None: give a whole number"),
    "no version": (piece({key: HEADER[key] for key in HEADER if key != "version"}), "has no 'version'"),
    "tensors of no list": (piece({**HEADER, "tensors": 3}), "tensors is 3: give a list"),
    "a range of text": (piece({**HEADER, "tensors": ["a"]}), "tensors.0 is 'a': give an object"),
    "a negative start": (
        piece({**HEADER, "tensors": [{**RANGE, "start": -1}]}),
        "tensors.0.start is -1: give 0 or more",
    ),
    "an unknown dtype": (piece({**HEADER, "tensors": [{**RANGE, "dtype": "nn"}]}), "'nn' is no dtype"),
    "an unknown tensor": (piece({**HEADER, "tensors": [{**RANGE, "start": 1}]}), "no valid range of 'a'"),
    "too few numbers": (piece(HEADER, bytes(4)), "no valid range of 'a'"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_piece_is_refused_by_a_sentence(case: str) -> None:
    raw, sentence = MALFORMED[case]
    with pytest.raises(ValueError, match=sentence):
        ReceivedWeights().add(raw)


def test_a_malformed_piece_is_the_clients_mistake() -> None:
    with serving(Generator(sharp()), key=KEY) as (served, url):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/octet-stream"}
        status, reply = send_request(url, MALFORMED["no version"][0], headers)
        assert (status, served.weights.version) == (400, "default")
    assert json.loads(reply)["error"]["message"].startswith("a piece of weights cannot be read: the request has no")


def send_request(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    with closing(connection):
        connection.request("POST", "/weights/pieces", body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def versions(tmp_path: Path) -> list[WeightsVersion]:
    """Returns three versions, of which the last two have the changes from the one before."""
    made, base, model = [], None, sharp()
    for number in range(3):
        with torch.no_grad():
            model.embedding.weight[number] += 1.0
        path = tmp_path / f"s.{number}"
        export_hf(model, path)
        pieces = WeightPieces.of(path, path.name, base)
        made.append(WeightsVersion(str(path), path.name, pieces=pieces))
        base = path
    return made


def embedding(model: LanguageModel) -> Tensor:
    return model.embedding.weight.detach().clone()


@pytest.mark.parametrize("by_disk", [False, True], ids=["sent", "read by the server"])
def test_a_server_gets_changes_and_all_weights_if_it_missed_some(
    by_disk: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = versions(tmp_path)
    model, expected = sharp(), sharp()
    with serving(Generator(model), key=KEY) as (served, url), closing(GenerationClient(url, api_key=KEY)) as client:
        (server,) = client.connect()
        server.weights.sees_directory = by_disk
        for version, all_sent in ((first, True), (second, False), (third, False), (first, True), (third, True)):
            client.reload(version)
            with torch.no_grad():
                expected.load_state_dict(sharp().state_dict())
                expected.embedding.weight[: int(version.version[-1]) + 1] += 1.0
            assert server.state == "up"
            assert server.weights.all_pieces_sent == all_sent, version.version
            assert torch.equal(embedding(model), embedding(expected))
            assert server.weights.version == version.version
        client.reload(first)
        served._received._tensors[next(iter(served._received._tensors))] += 1.0  # a bit flip in its memory
        with caplog.at_level(logging.WARNING, "postlude"):
            client.reload(second)
        assert "refused the weights that changed, and is sent all: " in caplog.text
        assert server.weights.all_pieces_sent
        assert served.weights.checksum == checksum(tmp_path / "s.1")
        client.reload(third)
        assert not server.weights.all_pieces_sent
        assert server.weights.sees_directory == by_disk


def test_pieces_are_sent_where_the_server_sees_no_or_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files at the same place, such as an older state of a shared disk, and then no directory."""
    first, second, _ = versions(tmp_path)
    other = tmp_path / "other"
    export_hf(sharp(), other)
    read = PieceFilesBody.weights
    for directory in (other, tmp_path / "hidden"):

        def moved(body: PieceFilesBody, directory: Path = directory) -> WeightPieces:
            return replace(read(body), directory=directory)

        monkeypatch.setattr(PieceFilesBody, "weights", moved)
        with (
            serving(Generator(sharp()), key=KEY) as (served, url),
            closing(GenerationClient(url, api_key=KEY)) as client,
        ):
            (server,) = client.connect()
            for version in (first, second):
                client.reload(version)
                assert served.weights.checksum == checksum(Path(str(version.directory)))
                assert not server.weights.sees_directory
            assert not server.weights.all_pieces_sent, "changes are sent"


def test_a_server_of_another_kind_is_refused(tmp_path: Path) -> None:
    first, *_ = versions(tmp_path)
    with (
        closing(FakeVLLM()) as server,
        closing(GenerationClient(server.url, "tiny", retries=0)) as client,
        pytest.raises(ServerError, match=r"is vllm, which takes no weights in pieces\. Use rollout\.sync: disk"),
    ):
        client.reload(first)


@pytest.mark.parametrize("missing", ["the last piece", "the directory of pieces"])
def test_all_weights_are_read_where_pieces_of_the_changes_are_missing(tmp_path: Path, missing: str) -> None:
    """As on a shared disk that does not list new files yet."""
    first, second, _ = versions(tmp_path)
    with serving(Generator(sharp()), key=KEY) as (served, url), closing(GenerationClient(url, api_key=KEY)) as client:
        (server,) = client.connect()
        client.reload(first)
        pieces = tmp_path / "s.1" / delta.DELTA
        max(pieces.iterdir()).unlink()
        if missing == "the directory of pieces":
            pieces.rmdir()
        client.reload(second)
        assert (server.state, server.weights.all_pieces_sent) == ("up", True)
        assert served.weights.checksum == checksum(tmp_path / "s.1")


def test_a_full_disk_is_named_with_the_room_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(tmp_path / WEIGHTS)

    def write_bytes(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    unused: Any = None
    sync = DeltaSync(unused, unused, SyncOptions(tmp_path))
    sync.version, path = "s.0", tmp_path / WEIGHTS / "s.3"
    shutil.copytree(tmp_path / WEIGHTS / "s.1", path, ignore=shutil.ignore_patterns(delta.DELTA))
    with pytest.raises(
        ServerError, match=r"could not be written below .*weights: .*No space left on device: .*room for"
    ):
        sync._reload(WeightsVersion(str(path), "s.3"), path)
