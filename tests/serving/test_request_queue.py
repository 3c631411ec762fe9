"""RequestQueue: which server a request goes to, and what becomes of one that is cancelled."""

from __future__ import annotations

import asyncio

from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.request_queue import RequestQueue
from tests.conftest import PATIENCE


def remote_servers(count: int) -> list[RemoteServer]:
    servers = [
        RemoteServer(f"http://h:{1 + place}", lambda _: None, "m", headers={}, timeout=5) for place in range(count)
    ]
    for server in servers:
        server.state = "up"
    return servers


def test_a_request_goes_to_the_server_with_the_fewest_and_ties_take_turns() -> None:
    async def assigned(outstanding: list[int], requests: int) -> list[int]:
        servers = remote_servers(len(outstanding))
        for server, count in zip(servers, outstanding, strict=True):
            server.load.outstanding = count
        queue = RequestQueue(servers, lambda _: True, lambda: "")
        chosen = [servers.index(await queue.assign(set())) for _ in range(requests)]
        assert [server.load.outstanding for server in servers] == [
            count + chosen.count(place) for place, count in enumerate(outstanding)
        ]
        return chosen

    assert asyncio.run(assigned([5, 2, 9], 3)) == [1, 1, 1]
    assert sorted(asyncio.run(assigned([1, 1, 1], 3))) == [0, 1, 2]


async def test_a_request_that_is_cancelled_after_it_got_a_server_gives_its_place_to_the_next() -> None:
    (server,) = remote_servers(1)
    server.load.outstanding = 1
    queue = RequestQueue([server], lambda server: server.load.outstanding < 1, lambda: "")
    first, second = (asyncio.create_task(queue.assign(set())) for _ in range(2))
    await asyncio.sleep(0)  # both wait
    server.load.outstanding -= 1
    queue.dispatch()  # the first gets the server
    first.cancel()  # before it can use it
    assert await asyncio.wait_for(second, PATIENCE) is server
    assert (first.cancelled(), server.load.outstanding) == (True, 1)
