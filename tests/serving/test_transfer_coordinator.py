"""TransferCoordinator: a server takes no requests while it is sent weights, and is asked for all of them again after a
transfer that did not end."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.weights.transfer import TransferCoordinator
from tests.serving.fake_vllm import FakeVLLM


class Receiver(FakeVLLM):
    """Reports one worker, and names its weights as it is told at the end of an update."""

    def reply(self, path: str, body: Any) -> Any:
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        return super().reply(path, body)


def test_a_server_is_used_again_only_after_a_whole_transfer() -> None:
    first, second = WeightsVersion(None, "start.1"), WeightsVersion(None, "start.2")
    with closing(Receiver()) as fake, closing(GenerationClient([fake.url], api="vllm")) as client:
        client.connect()
        client.run(client.pool.connect())
        (server,) = client.pool.servers

        def begin(weights: WeightsVersion) -> TransferCoordinator:
            transfer = TransferCoordinator(client, weights)
            assert [target.url for target in transfer.targets()[0]] == [fake.url]
            assert transfer.begin({}) == [fake.url]
            assert server.state == "needs_weights"
            return transfer

        assert begin(first).finish({}) == [fake.url]
        assert (server.state, server.has_weights(first)) == ("up", True)
        begin(second)  # which never ends: the server may hold some of these weights
        assert begin(first).finish({}) == [fake.url], "it is sent all of them again"
        assert (server.state, server.has_weights(first)) == ("up", True)


def test_a_server_whose_reply_cannot_be_read_does_not_affect_the_others() -> None:
    weights = WeightsVersion(None, "start.1")
    with (
        closing(Receiver()) as broken,
        closing(Receiver()) as healthy,
        closing(GenerationClient([broken.url, healthy.url], api="vllm")) as client,
    ):
        client.connect()
        transfer = TransferCoordinator(client, weights)
        assert len(transfer.targets()[0]) == 2
        server, _ = client.pool.servers

        async def finish_update(*_: Any) -> None:
            raise KeyError("success")

        server.api.finish_update = finish_update  # type: ignore[method-assign] # such as that of a user's own API
        assert len(transfer.begin({})) == 2
        assert transfer.finish({}) == [healthy.url]
        assert (server.state, server.problem) == ("excluded", "cannot be used: KeyError('success')")
