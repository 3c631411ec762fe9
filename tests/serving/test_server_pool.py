"""ServerPool: every request gets its completion with the sent weights, whichever server fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from postlude.generate.counter_rng import rng_key
from postlude.generate.protocol import Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.model_calls import combine_seeds
from postlude.serving.clients.api import ServerAPI
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.llama_cpp import LlamaCppAPI
from postlude.serving.clients.openai import OpenAIAPI
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.clients.sglang import SGLangAPI
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.errors import InvalidResponse, ServerError, ServerUnavailable
from tests.serving.fake_vllm import OLD, FakeVLLM, Refusal, deterministic_completion

PROMPTS = [[index, 2 * index + 1] for index in range(40)]
THREE = SamplingParams(max_new_tokens=3)
RELOAD = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


@pytest.fixture
def two() -> Iterator[tuple[FakeVLLM, FakeVLLM]]:
    with closing(FakeVLLM()) as first, closing(FakeVLLM()) as second:
        yield first, second


@pytest.fixture
def engines() -> Iterator[Callable[..., GenerationClient]]:
    with ExitStack() as clients:

        def connect(*servers: FakeVLLM, **settings: Any) -> GenerationClient:
            settings = {"backoff": 0.01, "retries": 2, "concurrency": 4} | settings
            return clients.enter_context(closing(GenerationClient([server.url for server in servers], **settings)))

        yield connect


def check(engine: GenerationClient) -> None:
    """Checks that every completion is that of its own request: none is lost, repeated or swapped."""
    for index, (completion,) in enumerate(engine.generate(PROMPTS, THREE)):
        seed = Request((), SamplingParams(seed=rng_key(0, index))).seed
        body = {"token_ids": PROMPTS[index], "sampling_params": {"seed": seed, "max_tokens": 3}}
        assert (completion.tokens, completion.logprobs) == deterministic_completion(body)


def sent(api: ServerAPI, request: Request) -> dict[str, Any]:
    """Returns the sampling parameters that an API sends for a request."""
    bodies = []

    async def send(method: str, path: str, body: Any = None) -> Any:
        bodies.append(body)
        raise ServerUnavailable("is not there")

    with pytest.raises(ServerUnavailable):
        asyncio.run(api.generate(send, "tiny", request))
    (body,) = bodies
    return body.get("sampling_params", body)


def by_tokens() -> VLLMAPI:
    api = VLLMAPI()
    api.has_generate = True
    return api


SERVER_APIS = {
    "vllm": VLLMAPI,
    "vllm tokens": by_tokens,
    "openai": OpenAIAPI,
    "sglang": SGLangAPI,
    "llama.cpp": LlamaCppAPI,
}


@pytest.mark.parametrize("name", SERVER_APIS)
def test_every_completion_of_several_steps_has_a_different_seed(name: str) -> None:
    """Steps, groups, samples and later turns are numbered as in a run."""
    api, seeds = SERVER_APIS[name](), []
    for step in range(3):
        for group in range(8):
            sampling = SamplingParams(seed=combine_seeds(0, step, 0, group))
            for sample in range(8):
                later = SamplingParams(seed=combine_seeds(sampling.seed, sample, 1))
                for request in (Request((1,), sampling, first_index=sample), Request((1,), later)):
                    body = sent(api, request)
                    seeds.append(body.get("seed", body.get("sampling_seed")))
    assert len(set(seeds)) == len(seeds) == 3 * 8 * 8 * 2
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("name", SERVER_APIS)
def test_every_sampling_parameter_with_a_server_default_is_sent(name: str) -> None:
    """So neither generation_config.json nor the server's defaults change the sampling."""
    body = sent(SERVER_APIS[name](), Request((1,), SamplingParams()))
    expected = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": False}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    match name:
        case "sglang":
            expected |= {"top_k": -1, "max_new_tokens": 128, "min_new_tokens": 0, **penalties}
        case "llama.cpp":
            neutral = {"mirostat": 0, "dynatemp_range": 0.0, "min_keep": 0, "repeat_penalty": 1.0, "logit_bias": []}
            expected |= {
                "top_k": 0,
                "n_predict": 128,
                "samplers": ["temperature", "top_k", "top_p", "min_p"],
                **neutral,
            }
        case _:
            expected |= {"top_k": 0, "max_tokens": 128, "stop": [], "stop_token_ids": [], **penalties}
    assert expected.items() <= body.items()


def after(count: int, action: Callable[[], bytes | None]) -> Callable[[], bytes | None]:
    """Returns a function that calls `action` from the `count`th call on."""
    remaining = iter(range(count))
    return lambda: action() if next(remaining, None) is None else None


def test_requests_of_a_killed_server_go_to_another(two, engines) -> None:
    doomed, healthy = two
    engine = engines(*two)
    engine.connect()  # both, so that both get requests
    killed = threading.Event()

    def kill() -> None:
        while doomed.answered < 5:
            time.sleep(0.01)
        doomed.kill()
        killed.set()

    doomed.before = after(5, kill)
    healthy.before = lambda: None if killed.wait(300) else b"too late"
    check(engine)
    assert doomed.answered == 5
    assert healthy.answered >= len(PROMPTS) - 5
    counts = engine.take_counts()
    assert counts.failed >= 1
    assert counts.retried >= 1


def test_a_server_that_hangs_is_timed_out(two, engines) -> None:
    hanging, healthy = two
    release = threading.Event()
    hanging.before = after(2, lambda: b"late" if release.wait(300) else None)
    engine = engines(*two, retries=0)
    engine.connect()  # both, so that both get requests
    server = engine.pool.servers[0]
    server._send = server._sender(3.0)  # the other one has as long as it needs
    check(engine)
    release.set()
    assert healthy.answered >= len(PROMPTS) - 3
    assert "gave no reply within 3 s" in engine.pool.servers[0].problem


@pytest.mark.parametrize(
    ("garbage", "sentence"),
    [
        (b"<html>", "replied with something that is not JSON"),
        (b'{"choices": []}', "gave 0 choices where one was requested"),
        (b'{"choices": [{"token_ids": [1], "finish_reason": "stop"}]}', "without token ids or log-probs"),
        (b'{"choices": [{"token_ids": [], "logprobs": {"content": []}, "finish_reason": {}}]}', "cannot be read"),
        (
            b'{"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": NaN}]}, "finish_reason": "stop"}]}',
            "log-probs that are not finite",
        ),
    ],
)
def test_a_server_with_an_invalid_response_is_named_and_excluded(
    two, engines, caplog, garbage: bytes, sentence: str
) -> None:
    spoiled, _ = two
    spoiled.before = after(3, lambda: garbage)
    engine = engines(*two)
    engine.connect()  # both, so that both get requests
    with caplog.at_level(logging.WARNING, "postlude"):
        check(engine)
    request_count = spoiled.calls.count("/inference/v1/generate")
    assert f"{spoiled.url} " in caplog.text
    assert sentence in caplog.text
    assert "It is excluded from now on." in caplog.text
    check(engine)
    assert spoiled.calls.count("/inference/v1/generate") == request_count, "it gets no more requests"


def test_a_completion_of_a_server_that_was_excluded_meanwhile_is_requested_again(two, engines) -> None:
    spoiled, healthy = two
    engine = engines(*two)
    engine.connect()
    started, release = threading.Event(), threading.Event()
    spoiled.before = healthy.before = lambda: started.set() or (release.wait(10) and None)
    request_id = engine.submit(Request((1, 2), THREE))
    assert started.wait(300)
    (server_in_use,) = [server for server in engine.pool.servers if server.load.outstanding]
    server_in_use.state, server_in_use.problem = "excluded", "has other weights than most"
    release.set()
    (finished,) = engine.poll(10.0)
    assert (finished.request_id, finished.completion is not None) == (request_id, True)
    assert [spoiled.answered, healthy.answered] == [1, 1], "by the other server: an excluded one may have other weights"
    assert engine.take_counts().retried == 1


def test_close_cancels_running_requests(caplog) -> None:
    with closing(FakeVLLM()) as server:
        started, release = threading.Event(), threading.Event()
        server.before = lambda: started.set() or (release.wait(10) and None)
        engine = GenerationClient([server.url])
        engine.submit(Request((1, 2), THREE, n=3))
        assert started.wait(300)
        engine.close()
        assert engine._thread.is_alive() is False
        del engine
        gc.collect()
        release.set()
    assert caplog.text == "", "no pending task is destroyed"


def test_a_slow_server_gets_fewer_requests(two, engines) -> None:
    slow, fast = two
    release = threading.Event()
    slow.before = lambda: None if release.wait(300) else b"too late"
    fast.before = after(30, release.set)
    engine = engines(*two)
    engine.connect()  # both, so that both get requests
    check(engine)
    assert slow.answered < fast.answered / 2


def test_when_all_servers_are_lost_the_error_names_each_with_its_reason(two, engines) -> None:
    killed, spoiled = two
    killed.before, spoiled.before = after(2, killed.kill), after(2, lambda: b"nonsense")
    with pytest.raises(ServerError) as raised:
        check(engines(*two))
    message = str(raised.value)
    assert message.startswith("none of the 2 servers can be used any more: ")
    assert f"{killed.url} cannot be reached: Connection refused" in message
    assert f"{spoiled.url} replied with something that is not JSON" in message


def test_a_request_that_crashes_every_server_fails_after_a_limit(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)

        def fail(body: Any) -> Any:
            engine.pool.servers[0].failures = 0  # as if it had completed other requests since
            raise ConnectionError

        server.answer = fail
        with pytest.raises(
            ServerError, match=r"was not completed in 4 attempts; the last error: .* closed the connection"
        ):
            engine.generate([[1]], THREE)


def test_reload_pauses_and_resumes_a_server_and_checks_its_version(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    for step in (1, 2):
        engine.reload(WeightsVersion(f"/weights/{step}", f"start.{step}"))
        for server in two:
            assert (server.directory, server.version) == (f"/weights/{step}", f"start.{step}")
        ((completion,),) = engine.generate(PROMPTS[:1], THREE)
        assert completion.versions == (VersionSpan(f"start.{step}", 0, 3),)
    assert [call for call in two[0].calls if call in RELOAD] == RELOAD * 2
    two[0].reply = lambda path, body: {"weight_version": "another"} if path == "/weight_info" else {}
    engine.reload(WeightsVersion("/weights/3", "start.3"))
    assert engine.pool.servers[0].state == "excluded"
    assert engine.pool.servers[0].problem == "reports weights 'another' after it was given 'start.3'"
    check(engine)


def test_reload_in_the_background_finishes_before_the_next_request(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    release = threading.Event()
    for server in two:
        server.read = lambda directory: release.wait(300)
    engine.reload(WeightsVersion("/weights/2", "start.2"), wait=False)  # which returns while they read
    assert engine.directories_in_use() == {"/weights/2"}
    engine.reload(WeightsVersion("/weights/3", "start.3"), wait=False)  # before any has the last ones
    release.set()
    completions = engine.generate([[1, 2], [3]] * 4, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert {span.version for samples in completions for completion in samples for span in completion.versions} == {
        "start.3"
    }
    engine.wait_for_reload()
    assert [server.version for server in two] == ["start.3"] * 2
    two[0].kill()
    two[1].kill()
    engine.reload(WeightsVersion("/weights/4", "start.4"), wait=False)
    with pytest.raises(ServerError, match="none of the 2 servers replies any more"):
        engine.wait_for_reload()


def test_weights_that_are_not_the_newest_any_more_are_not_read(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)
        engine.connect()
        began, release, directories = threading.Event(), threading.Event(), list[str]()

        def read(directory: str) -> None:
            directories.append(directory)
            began.set()
            release.wait(60)

        server.read = read
        engine.reload(WeightsVersion("/weights/1", "start.1"), wait=False)
        assert began.wait(60)
        for step in (2, 3):
            engine.reload(WeightsVersion(f"/weights/{step}", f"start.{step}"), wait=False)
        release.set()
        engine.wait_for_reload()
        assert (directories, server.version) == (["/weights/1", "/weights/3"], "start.3")


def test_a_restarted_server_gets_the_newest_weights_before_its_first_request(engines) -> None:
    with closing(FakeVLLM()) as old, closing(FakeVLLM()) as healthy:
        engine = engines(old, healthy, retries=0)
        engine.connect()
        engine.reload(WeightsVersion("/weights/1", "start.1"))
        old.kill()
        check(engine)
        assert engine.pool.servers[0].state == "unavailable"
        with closing(FakeVLLM(port=old.port)) as new:
            assert new.version == OLD
            engine.reload(WeightsVersion("/weights/2", "start.2"))
            while engine.pool.servers[0].state != "up":
                time.sleep(0.01)
            check(engine)
            assert new.answered > 0
            first = next(index for index, call in enumerate(new.calls) if call == "/collective_rpc")
            in_earnest = [index for index, call in enumerate(new.calls) if call == "/inference/v1/generate"][1]
            assert (new.version, first < in_earnest) == ("start.2", True)


def test_completions_of_unknown_weights_are_requested_again(two, engines) -> None:
    """A server that was restarted between two requests reports its old weights, and gets the new ones."""
    engine = engines(*two)
    engine.connect()  # both: a reload does not wait for servers that connect later
    engine.reload(WeightsVersion("/weights/1", "start.1"))
    two[0].version = OLD
    for (completion,) in engine.generate(PROMPTS, THREE):
        assert completion.versions == (VersionSpan("start.1", 0, 3),)
    assert engine.take_counts().retried >= 1


def failing(server: FakeVLLM, path: str, status: int, times: int) -> None:
    """Makes a server refuse requests to a path, `times` times."""
    usual_reply, remaining = server.reply, iter(range(times))

    def reply(requested_path: str, body: Any) -> Any:
        if requested_path == path and next(remaining, None) is not None:
            raise Refusal(status, "no")
        return usual_reply(requested_path, body)

    server.reply = reply


@pytest.mark.parametrize("path", ["/collective_rpc", "/resume"])
def test_a_server_whose_reload_failed_is_resumed_only_after_a_complete_reload(two, engines, path: str) -> None:
    engine = engines(*two)
    engine.connect()
    failing(two[0], path, 500, 1)
    engine.reload(WeightsVersion("/weights/1", "start.1"))
    check(engine)
    until = time.monotonic() + 300
    while engine.pool.count_up() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    failed = RELOAD[: RELOAD.index(path) + 1]
    assert [call for call in two[0].calls if call in RELOAD] == failed + RELOAD


def test_a_server_that_cannot_read_weights_stays_paused_and_its_requests_go_to_others(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    started, release = threading.Event(), threading.Event()
    two[0].before = two[1].before = lambda: started.set() or (release.wait(300) and None)
    request_id = engine.submit(Request((1, 2), THREE))
    assert started.wait(300)
    busy, free = sorted(two, key=lambda candidate: candidate.calls.count("/inference/v1/generate"), reverse=True)
    free.before = lambda: None
    failing(busy, "/collective_rpc", 400, 1)
    engine.reload(WeightsVersion("/weights/1", "start.1"))
    (finished,) = engine.poll(300.0)
    release.set()
    assert (finished.request_id, finished.completion is not None, free.answered) == (request_id, True, 1)
    assert [server.state for server in engine.pool.servers if server.url == busy.url] == ["excluded"]
    assert "/resume" not in busy.calls


def test_close_waits_for_a_reload_and_a_paused_server_is_refused(engines) -> None:
    with closing(FakeVLLM()) as server:
        with closing(GenerationClient([server.url])) as engine:
            engine.connect()
            server.read = lambda directory: time.sleep(0.2)
            engine.reload(WeightsVersion("/weights/1", "start.1"), wait=False)
        assert [call for call in server.calls if call in RELOAD] == RELOAD
        usual_reply = server.reply
        server.reply = lambda path, body: {"is_paused": True} if path == "/is_paused" else usual_reply(path, body)
        with pytest.raises(ServerError, match="is paused, probably by a weight update that was interrupted"):
            engines(server).connect()


def test_a_server_whose_checksum_cannot_be_compared_still_gets_newer_weights(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)
        (remote,) = engine.connect()
        remote.api.reports_checksum = True
        engine.reload(WeightsVersion("/nowhere", "start.1"), wait=False)
        deadline = time.monotonic() + 300
        while remote.state == "up" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "/nowhere" in remote.problem
        remote.api.reports_checksum = False
        engine.reload(WeightsVersion("/weights/2", "start.2"), wait=False)
        ((completion,),) = engine.generate(PROMPTS[:1], THREE)
        assert completion.versions == (VersionSpan("start.2", 0, 3),)


def test_a_directory_is_in_use_while_a_late_server_reads_it(engines) -> None:
    with closing(FakeVLLM()) as server, closing(FakeVLLM()) as late:
        engine = engines(server)
        engine.reload(WeightsVersion("/weights/1", "start.1"))
        reading, release = threading.Event(), threading.Event()
        late.read = lambda directory: (reading.set(), release.wait(300))
        engine.add_server(late.url)
        assert reading.wait(300)
        engine.reload(WeightsVersion("/weights/2", "start.2"))
        assert engine.directories_in_use() == {"/weights/1", "/weights/2"}
        release.set()
        deadline = time.monotonic() + 300
        while engine.pool.count_up() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (late.directory, late.version, engine.pool.count_up()) == ("/weights/2", "start.2", 2)
        assert engine.directories_in_use() == {"/weights/2"}


def test_servers_are_tried_with_a_pause_during_an_outage(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt counts once, and there are at most as many as the time has pauses."""
    attempts, connect = 0, RemoteServer.connect

    async def counted(server: RemoteServer, weights: WeightsVersion | None) -> None:
        nonlocal attempts
        attempts += 1
        await connect(server, weights)

    monkeypatch.setattr(RemoteServer, "connect", counted)
    with closing(FakeVLLM()) as server:
        server.kill()
        engine = engines(server, retries=0, backoff=0.1, outage_timeout=1.0)
        with pytest.raises(ServerError, match="The run waited for 1 s"):
            engine.generate(PROMPTS[:1], THREE)
    assert 1 < attempts <= 12
    assert engine.take_counts().failed == attempts


@pytest.mark.parametrize("event", ["removed", "excluded"])
def test_a_server_that_is_given_up_while_it_connects_is_not_used_again(two, engines, event: str) -> None:
    healthy, late = two
    engine = engines(healthy)
    engine.connect()
    reached, release, usual_reply = threading.Event(), threading.Event(), late.reply

    def reply(path: str, body: Any) -> Any:
        if path == "/version" and not reached.is_set():
            reached.set()
            release.wait(300)
        return usual_reply(path, body)

    late.reply = reply
    engine.add_server(late.url)
    remote = engine.pool.servers[1]
    assert reached.wait(300)

    async def exclude() -> None:
        engine.pool.fail(remote, InvalidResponse("gave a token of another vocabulary"))

    if event == "removed":
        engine.remove_server(late.url, "hangs")
    else:
        engine.run(exclude())
    release.set()
    engine.run(engine.pool.connect())  # returns when no server connects any more
    assert (remote.state, late.calls.count("/version")) == ("excluded", 1)
    assert engine.take_counts().failed == 1
    check(engine)


def test_a_server_whose_reply_cannot_be_read_is_excluded_and_not_waited_for(engines) -> None:
    with closing(FakeVLLM()) as server:
        server.release = f"{'9' * 5000}.1"  # more digits than Python reads
        with pytest.raises(ServerError, match=r"http://127.0.0.1:\d+ cannot be used: ValueError\('Exceeds the limit"):
            engines(server).generate(PROMPTS[:1], THREE)


def test_a_server_whose_update_raises_gets_no_requests(two, engines) -> None:
    engine = engines(*two)
    broken, _ = engine.connect()

    async def reload(*_: Any) -> None:
        raise KeyError("weight_version")

    broken.api.reload = reload  # type: ignore[method-assign] # such as that of a user's own API
    engine.reload(WeightsVersion("/weights/1", "start.1"), wait=False)
    check(engine)
    assert (broken.state, broken.problem) == ("excluded", "cannot be used: KeyError('weight_version')")
    assert two[0].answered == 0


def test_a_server_that_was_restarted_while_it_was_idle_gets_the_frozen_model_with_its_adapter(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)
        engine.connect()
        read = list[str]()
        server.read = read.append
        for step, restarted in enumerate([False, False, True]):
            if restarted:
                server.version = OLD
            adapter = {"adapter_directory": f"/adapters/{step}", "adapter_name": "policy"}
            engine.reload(WeightsVersion("/weights/base", f"start.{step}", **adapter))
            assert server.version == f"start.{step}"
        assert read == ["/weights/base"] * 2
