"""Several servers as one: what was asked for comes, whatever befalls a server, and by the weights that were sent."""

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
from postlude.rollout.conversations import combine_seeds
from postlude.serving.clients.api import ServerAPI
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.llama_cpp import LlamaCppAPI
from postlude.serving.clients.openai import OpenAIAPI
from postlude.serving.clients.remote_server import Weights
from postlude.serving.clients.sglang import SGLangAPI
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.errors import ServerError, ServerUnavailable
from tests.serving.fake_vllm import OLD, FakeVLLM, Refusal, foretold, slowly

PROMPTS = [[place, 2 * place + 1] for place in range(40)]
THREE = SamplingParams(max_new_tokens=3)
RELOAD = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


@pytest.fixture
def two() -> Iterator[tuple[FakeVLLM, FakeVLLM]]:
    with closing(FakeVLLM()) as one, closing(FakeVLLM()) as other:
        yield one, other


@pytest.fixture
def engines() -> Iterator[Callable[..., GenerationClient]]:
    with ExitStack() as held:

        def connect(*servers: FakeVLLM, **settings: Any) -> GenerationClient:
            settings = {"backoff": 0.01, "retries": 2, "concurrency": 4} | settings
            return held.enter_context(closing(GenerationClient([each.url for each in servers], **settings)))

        yield connect


def check(engine: GenerationClient) -> None:
    """Every answer is the one that its request alone decides: none is lost, doubled or swapped."""
    for place, (one,) in enumerate(engine.generate(PROMPTS, THREE)):
        seed = Request((), SamplingParams(seed=rng_key(0, place))).seed
        body = {"token_ids": PROMPTS[place], "sampling_params": {"seed": seed, "max_tokens": 3}}
        assert (one.tokens, one.logprobs) == foretold(body)


def sent(api: ServerAPI, request: Request) -> dict[str, Any]:
    """What a api sends for a request: how it is drawn."""
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
def test_every_sample_of_several_steps_has_a_seed_of_its_own(name: str) -> None:
    """Steps, groups, samples and later turns, as a run numbers them."""
    api, seeds = SERVER_APIS[name](), []
    for step in range(3):
        for group in range(8):
            sampling = SamplingParams(seed=combine_seeds(0, step, 0, group))
            for sample in range(8):
                later = SamplingParams(seed=combine_seeds(sampling.seed, sample, 1))
                for request in (Request((1,), sampling, first=sample), Request((1,), later)):
                    body = sent(api, request)
                    seeds.append(body.get("seed", body.get("sampling_seed")))
    assert len(set(seeds)) == len(seeds) == 3 * 8 * 8 * 2
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("name", SERVER_APIS)
def test_every_value_that_a_server_would_fill_in_is_sent(name: str) -> None:
    """Whatever the model's generation_config.json, or the server's own defaults, say."""
    body = sent(SERVER_APIS[name](), Request((1,), SamplingParams()))
    expected = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": False}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    match name:
        case "sglang":
            expected |= {"top_k": -1, "max_new_tokens": 128, "min_new_tokens": 0, **penalties}
        case "llama.cpp":
            others = {"mirostat": 0, "dynatemp_range": 0.0, "min_keep": 0, "repeat_penalty": 1.0, "logit_bias": []}
            expected |= {"top_k": 0, "n_predict": 128, "samplers": ["temperature", "top_k", "top_p", "min_p"], **others}
        case _:
            expected |= {"top_k": 0, "max_tokens": 128, "stop": [], "stop_token_ids": [], **penalties}
    assert expected.items() <= body.items()


def after(count: int, act: Callable[[], bytes | None]) -> Callable[[], bytes | None]:
    """Act from the `count`th time on."""
    left = iter(range(count))
    return lambda: act() if next(left, None) is None else None


def test_requests_of_a_killed_server_go_to_another(two, engines) -> None:
    doomed, other = two
    engine = engines(*two)
    engine.connect()  # both, so that both are asked
    doomed.before = after(5, doomed.kill)
    check(engine)
    assert doomed.answered == 5
    assert other.answered >= len(PROMPTS) - 5
    counts = engine.take_counts()
    assert counts.failed >= 1
    assert counts.retried >= 1


def test_one_that_hangs_is_timed_out(two, engines) -> None:
    hanging, other = two
    release = threading.Event()
    hanging.before = after(2, lambda: b"late" if release.wait(300) else None)
    engine = engines(*two, timeout=3.0, retries=0)
    check(engine)
    release.set()
    assert other.answered >= len(PROMPTS) - 3
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
def test_one_that_answers_garbage_is_named_and_left_out(two, engines, caplog, garbage: bytes, sentence: str) -> None:
    spoiled, _ = two
    spoiled.before = after(3, lambda: garbage)
    engine = engines(*two)
    with caplog.at_level(logging.WARNING, "postlude"):
        check(engine)
    asked = spoiled.calls.count("/inference/v1/generate")
    assert f"{spoiled.url} " in caplog.text
    assert sentence in caplog.text
    assert "It is excluded from now on." in caplog.text
    check(engine)
    assert spoiled.calls.count("/inference/v1/generate") == asked, "it was not asked again"


def test_what_one_answers_after_it_was_left_out_is_asked_of_another(two, engines) -> None:
    spoiled, other = two
    engine = engines(*two)
    engine.connect()
    came, release = threading.Event(), threading.Event()
    spoiled.before = other.before = lambda: came.set() or (release.wait(10) and None)
    asked = engine.submit(Request((1, 2), THREE))
    assert came.wait(10)
    (own,) = [server for server in engine.pool.servers if server.outstanding]
    own.state, own.problem = "excluded", "has other weights than most"
    release.set()
    (found,) = engine.poll(10.0)
    assert (found.request_id, found.completion is not None) == (asked, True)
    assert [spoiled.answered, other.answered] == [1, 1], "by the other, as whoever is left out may have other weights"
    assert engine.take_counts().retried == 1


def test_who_is_closed_lets_go_of_what_is_under_way(caplog) -> None:
    with closing(FakeVLLM()) as server:
        came, release = threading.Event(), threading.Event()
        server.before = lambda: came.set() or (release.wait(10) and None)
        engine = GenerationClient([server.url])
        engine.submit(Request((1, 2), THREE, n=3))
        assert came.wait(10)
        engine.close()
        assert engine._thread.is_alive() is False
        del engine
        gc.collect()
        release.set()
    assert caplog.text == "", "nothing is left to be destroyed while it waits"


def test_a_slow_one_gets_less(two, engines) -> None:
    slow, fast = two
    slow.before, fast.before = slowly(0.1), slowly(0.005)
    check(engines(*two))
    assert slow.answered < fast.answered / 2


def test_when_all_are_lost_each_is_named_with_its_reason(two, engines) -> None:
    killed, spoiled = two
    killed.before, spoiled.before = after(2, killed.kill), after(2, lambda: b"nonsense")
    with pytest.raises(ServerError) as raised:
        check(engines(*two))
    said = str(raised.value)
    assert said.startswith("none of the 2 servers can be used any more: ")
    assert f"{killed.url} cannot be reached: Connection refused" in said
    assert f"{spoiled.url} replied with something that is not JSON" in said


def test_a_request_that_fells_whoever_reads_it_is_bounded(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)

        def fell(body: Any) -> Any:
            engine.pool.servers[0].failures = 0  # as if it had answered others since the last time
            raise ConnectionError

        server.answer = fell
        with pytest.raises(
            ServerError, match=r"was not completed in 4 attempts; the last error: .* closed the connection"
        ):
            engine.generate([[1]], THREE)


def test_weights_are_read_while_requests_are_kept_and_the_version_is_seen_to(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    for step in (1, 2):
        engine.reload(Weights(f"/weights/{step}", f"start.{step}"))
        for server in two:
            assert (server.directory, server.version) == (f"/weights/{step}", f"start.{step}")
        ((one,),) = engine.generate(PROMPTS[:1], THREE)
        assert one.versions == (VersionSpan(f"start.{step}", 0, 3),)
    assert [call for call in two[0].calls if call in RELOAD] == RELOAD * 2
    two[0].say = lambda path, body: {"weight_version": "another"} if path == "/weight_info" else {}
    engine.reload(Weights("/weights/3", "start.3"))
    assert engine.pool.servers[0].state == "excluded"
    assert engine.pool.servers[0].problem == "says that its weights are 'another' after it was given 'start.3'"
    check(engine)


def test_weights_are_read_beside_the_caller_and_before_what_it_asks_next(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    release = threading.Event()
    for server in two:
        server.read = lambda directory: release.wait(300)
    engine.reload(Weights("/weights/2", "start.2"), wait=False)  # which returns while they read
    assert engine.directories_in_use() == {"/weights/2"}
    engine.reload(Weights("/weights/3", "start.3"), wait=False)  # before any has the last ones
    release.set()
    found = engine.generate([[1, 2], [3]] * 4, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert {span.version for each in found for one in each for span in one.versions} == {"start.3"}
    engine.wait_for_reload()
    assert [server.version for server in two] == ["start.3"] * 2
    two[0].kill()
    two[1].kill()
    engine.reload(Weights("/weights/4", "start.4"), wait=False)
    with pytest.raises(ServerError, match="none of the 2 servers replies any more"):
        engine.wait_for_reload()


def test_a_server_that_comes_late_or_anew_gets_the_newest_weights_first(engines) -> None:
    with closing(FakeVLLM()) as old, closing(FakeVLLM()) as other:
        engine = engines(old, other, retries=0)
        engine.connect()
        engine.reload(Weights("/weights/1", "start.1"))
        old.kill()
        check(engine)
        assert engine.pool.servers[0].state == "unavailable"
        with closing(FakeVLLM(port=old.port)) as new:
            assert new.version == OLD
            engine.reload(Weights("/weights/2", "start.2"))
            while engine.pool.servers[0].state != "up":
                time.sleep(0.01)
            check(engine)
            assert new.answered > 0
            first = next(place for place, call in enumerate(new.calls) if call == "/collective_rpc")
            in_earnest = [place for place, call in enumerate(new.calls) if call == "/inference/v1/generate"][1]
            assert (new.version, first < in_earnest) == ("start.2", True)


def test_answers_of_weights_that_were_never_sent_are_asked_for_again(two, engines) -> None:
    """A server that was started anew between two requests tells its old weights, and gets the new ones."""
    engine = engines(*two)
    engine.connect()  # both are there: else an update does not wait for who comes later
    engine.reload(Weights("/weights/1", "start.1"))
    two[0].version = OLD
    for (one,) in engine.generate(PROMPTS, THREE):
        assert one.versions == (VersionSpan("start.1", 0, 3),)
    assert engine.take_counts().retried >= 1


def failing(server: FakeVLLM, path: str, status: int, times: int) -> None:
    """Have a server refuse what it is asked at a path, so many times."""
    known, left = server.say, iter(range(times))

    def say(asked: str, body: Any) -> Any:
        if asked == path and next(left, None) is not None:
            raise Refusal(status, "no")
        return known(asked, body)

    server.say = say


@pytest.mark.parametrize("path", ["/collective_rpc", "/resume"])
def test_one_that_failed_to_take_weights_is_not_told_to_go_on_before_it_has_read_them_again(
    two, engines, path: str
) -> None:
    engine = engines(*two)
    engine.connect()
    failing(two[0], path, 500, 1)
    engine.reload(Weights("/weights/1", "start.1"))
    check(engine)
    until = time.monotonic() + 300
    while engine.pool.count_up() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    failed = RELOAD[: RELOAD.index(path) + 1]
    assert [call for call in two[0].calls if call in RELOAD] == failed + RELOAD


def test_one_that_cannot_read_weights_stays_paused_and_what_it_was_asked_goes_to_others(two, engines) -> None:
    engine = engines(*two)
    engine.connect()
    came, release = threading.Event(), threading.Event()
    two[0].before = two[1].before = lambda: came.set() or (release.wait(10) and None)
    request_id = engine.submit(Request((1, 2), THREE))
    assert came.wait(10)
    asked, other = sorted(two, key=lambda each: each.calls.count("/inference/v1/generate"), reverse=True)
    other.before = lambda: None
    failing(asked, "/collective_rpc", 400, 1)
    engine.reload(Weights("/weights/1", "start.1"))
    (found,) = engine.poll(5.0)
    release.set()
    assert (found.request_id, found.completion is not None, other.answered) == (request_id, True, 1)
    assert [server.state for server in engine.pool.servers if server.url == asked.url] == ["excluded"]
    assert "/resume" not in asked.calls


def test_one_that_reads_weights_at_the_end_is_waited_for_and_one_that_was_left_paused_is_refused(engines) -> None:
    with closing(FakeVLLM()) as server:
        with closing(GenerationClient([server.url])) as engine:
            engine.connect()
            server.read = lambda directory: time.sleep(0.2)
            engine.reload(Weights("/weights/1", "start.1"), wait=False)
        assert [call for call in server.calls if call in RELOAD] == RELOAD
        known = server.say
        server.say = lambda path, body: {"is_paused": True} if path == "/is_paused" else known(path, body)
        with pytest.raises(ServerError, match="is paused, probably by a weight update that was interrupted"):
            engines(server).connect()


def test_weights_that_cannot_be_compared_with_their_files_are_given_again_and_newer_ones_too(engines) -> None:
    with closing(FakeVLLM()) as server:
        engine = engines(server)
        (met,) = engine.connect()
        met.api.reports_checksum = True
        engine.reload(Weights("/nowhere", "start.1"), wait=False)
        deadline = time.monotonic() + 300
        while met.state == "up" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "/nowhere" in met.problem
        met.api.reports_checksum = False
        engine.reload(Weights("/weights/2", "start.2"), wait=False)
        ((one,),) = engine.generate(PROMPTS[:1], THREE)
        assert one.versions == (VersionSpan("start.2", 0, 3),)


def test_a_directory_is_kept_while_a_server_that_came_late_reads_it(engines) -> None:
    with closing(FakeVLLM()) as one, closing(FakeVLLM()) as late:
        engine = engines(one)
        engine.reload(Weights("/weights/1", "start.1"))
        reading, release = threading.Event(), threading.Event()
        late.read = lambda directory: (reading.set(), release.wait(300))
        engine.add_server(late.url)
        assert reading.wait(300)
        engine.reload(Weights("/weights/2", "start.2"))
        assert engine.directories_in_use() == {"/weights/1", "/weights/2"}
        release.set()
        deadline = time.monotonic() + 300
        while engine.pool.count_up() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (late.directory, late.version, engine.pool.count_up()) == ("/weights/2", "start.2", 2)
        assert engine.directories_in_use() == {"/weights/2"}
