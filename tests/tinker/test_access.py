"""Access control: a key sees only its own models, names stay in the state directory, remote access needs a key."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from postlude.tinker.paths import TinkerPath
from postlude.tinker.server import check_key_file, read_keys
from postlude.tinker.state import StateDirectory

from .asgi_client import Client, request, running_server

SAMPLE = {"seq_id": 0, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}


async def test_request_without_valid_key_gets_401(tmp_path: Path) -> None:
    async with running_server(tmp_path, keys=["tml-one"]) as (app, _, _service):
        path = "/api/v1/get_server_capabilities"
        assert (await request(app, "GET", path)).status == 200
        assert (await request(app, "GET", path, key=None, headers={"authorization": "Bearer tml-one"})).status == 200
        for key in (None, "tml-two"):
            refused = await request(app, "GET", path, key=key)
            assert refused.status == 401
            assert "key" in refused.json["error"]
        assert (await request(app, "GET", "/api/v1/healthz", key=None)).status == 200


async def test_without_a_key_file_no_page_of_another_site_is_served(tmp_path: Path) -> None:
    path = "/api/v1/get_server_capabilities"
    async with running_server(tmp_path) as (app, _, _service):
        for headers in ({"host": "page.example"}, {"origin": "http://page.example"}):
            refused = await request(app, "GET", path, headers=headers)
            assert (refused.status, "--key-file" in refused.json["error"]) == (403, True)
        for kind in ("text/plain", ""):
            body = {"tags": []}
            assert (
                await request(app, "POST", "/api/v1/create_session", body, headers={"content-type": kind})
            ).status == 415
    async with running_server(tmp_path / "keys", keys=["tml-one"]) as (app, _, _service):
        assert (await request(app, "GET", path, headers={"host": "gpu-7"})).status == 200


async def test_key_cannot_access_models_of_another_key(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        first, second = await Client(app).open(), await Client(app, "tml-two").open()
        model = await first.create_model()
        step = await first.step(model, 1)
        path = (await first.call("save_weights", {"model_id": model, "path": "a", "seq_id": 2}))["path"]
        weights = (await first.call("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 3}))["path"]
        body = {"session_id": first.session, "sampling_session_seq_id": 0, "model_path": weights}
        sampler = (await first.post("create_sampling_session", body)).json["sampling_session_id"]
        refused = [
            await second.post("retrieve_future", {"request_id": step}),
            await second.post("cancel_future", {"request_id": step}),
            await second.post("optim_step", {"model_id": model, "seq_id": 4}),
            await second.post("get_info", {"model_id": model}),
            await second.post("weights_info", {"tinker_path": path}),
            await second.post("asample", SAMPLE | {"sampling_session_id": sampler}),
            await second.post("session_heartbeat", {"session_id": first.session}),
            await second.post("create_sampling_session", body),
            await second.post("create_sampling_session", body | {"session_id": second.session}),
            await second.post("load_weights", {"session_id": second.session, "model_seq_id": 0, "path": path}),
            await second.get(f"training_runs/{model}"),
            await second.get(f"training_runs/{model}/checkpoints"),
            await second.get(f"samplers/{sampler}"),
            await second.get(f"sessions/{first.session}"),
        ]
        assert [reply.status for reply in refused] == [404] * len(refused)
        assert (await second.get("training_runs")).json["training_runs"] == []
        assert (await second.get("checkpoints")).json["checkpoints"] == []
        assert (await second.get("sessions")).json["sessions"] == [second.session]

        inside = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
        assert (await request(app, "DELETE", inside, key="tml-two")).status == 404
        assert (await request(app, "POST", f"{inside}/publish")).status == 204
        assert (await second.post("weights_info", {"tinker_path": path})).status == 200
        assert (await request(app, "DELETE", inside, key="tml-two")).status == 403
        assert (await request(app, "DELETE", f"{inside}/publish")).status == 204
        assert (await second.post("weights_info", {"tinker_path": path})).status == 404
        assert (await request(app, "DELETE", inside)).status == 204
        assert (await first.post("weights_info", {"tinker_path": path})).status == 404


@pytest.mark.parametrize("name", ["../x", "..", "/etc/passwd", "a/b", ".hidden", "", "a\x00b", "x" * 300, "a\nb"])
async def test_checkpoint_name_outside_state_directory_is_refused(tmp_path: Path, name: str) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        for kind in ("weights", "sampler_weights", "external_weights"):
            with pytest.raises(ValueError, match=r"name|path"):
                TinkerPath.parse(f"tinker://{model}/{kind}/{name}")
            with pytest.raises(ValueError, match=r"run|path"):
                TinkerPath.parse(f"tinker://{name}/{kind}/a")
        if name:
            result = await client.call("save_weights", {"model_id": model, "path": name, "seq_id": 1})
            assert result["category"] == "user"
            assert "is not allowed" in result["error"]
        assert not [call for call in backend.calls if call[0] == "save_state"]
        loaded = await client.post("weights_info", {"tinker_path": f"tinker://{model}/weights/{name}"})
        assert loaded.status == 400


async def test_a_symbolic_link_in_the_state_directory_is_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "state"
    async with running_server(outside) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    async with running_server(inside) as (app, _, _service):
        await (await Client(app).open()).create_model()
    run_folder = next((inside / "runs").iterdir())
    (run_folder / "weights").mkdir()
    source = next((outside / "runs").iterdir()) / "weights" / "a"
    (run_folder / "weights" / "linked").symlink_to(source)
    state = StateDirectory(inside)
    state.open()
    assert not state.checkpoints
    with pytest.raises(ValueError, match="symbolic link"):
        state.directory_of(TinkerPath(run_folder.name, "weights", "linked"))
    state.close()


async def test_signed_download_links_work_without_key_and_reject_tampering(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        await client.call("save_weights_external", {"model_id": model, "path": "out", "seq_id": 1})
        await client.call("save_weights_for_sampler", {"model_id": model, "path": "out", "seq_id": 2})
        base = f"training_runs/{model}/checkpoints"
        urls = (await client.get(f"{base}/external_weights/out/external_weights_urls")).json["urls"]
        assert set(urls) == {"adapter_model.safetensors"}
        split = urlsplit(urls["adapter_model.safetensors"])
        assert split.netloc == "localhost"
        link = f"{split.path.replace('%3A', ':')}?{split.query}"
        assert (await request(app, "GET", link, key=None)).body == b"0.0"
        for wrong in (link.replace("adapter_model", "checkpoint"), link[:-1] + ("0" if link[-1] != "0" else "1")):
            assert (await request(app, "GET", wrong, key=None)).status == 403
        assert (await client.get(f"{base}/sampler_weights/out/external_weights_urls")).status == 400


def test_listening_on_other_interfaces_requires_key_file(tmp_path: Path) -> None:
    check_key_file("127.0.0.1", None)
    with pytest.raises(ValueError, match="--key-file FILE"):
        check_key_file("0.0.0.0", None)
    file = tmp_path / "keys"
    check_key_file("0.0.0.0", file)
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no key"):
        read_keys(file)
    file.write_text("secret-key-that-is-long-enough\n")
    with pytest.raises(ValueError, match="the client refuses"):
        read_keys(file)
    file.write_text("tml-0123456789abcdef  # alice\n\ntml-fedcba9876543210\n")
    assert read_keys(file) == ["tml-0123456789abcdef", "tml-fedcba9876543210"]
