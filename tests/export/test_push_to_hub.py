"""An export is uploaded to the hub: here to a server on loopback that speaks its protocol."""

import base64
import http.server
import json
import threading

import huggingface_hub
import pytest

from export.test_export import qerl, run_of
from qerl.cli.export import run as export_command
from qerl.errors import RunError, UserError


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Answers what creating a repository and one commit of small files ask for."""

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.answer(404, {})

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if hub.status != 200:
            return self.answer(hub.status, {"error": "no"})
        hub.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer(200, {"url": f"{hub.url}/me/sums", "name": "me/sums", "id": "1"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif self.path == "/api/validate-yaml":  # of a README.md
            self.answer(200, {"errors": [], "warnings": []})
        elif "/commit/" in self.path:
            hub.path = self.path
            lines = [json.loads(line) for line in body.splitlines()]
            each = [line["value"] for line in lines if line["key"] == "file"]
            hub.files |= {f["path"]: base64.b64decode(f["content"]) for f in each}
            self.answer(
                200, {"commitOid": "0" * 40, "commitUrl": f"{hub.url}/me/sums/commit/0", "hookOutput": ""}
            )
        else:
            self.answer(404, {})

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        server.status, server.tokens, server.created, server.files = 200, set(), [], {}
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test_0123456789")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_an_export_is_uploaded_as_it_was_written_to_a_private_repository(hub, tmp_path, monkeypatch, capsys):
    run, _, _ = run_of(tmp_path)
    qerl(monkeypatch, "export", run, tmp_path / "out", "--push-to-hub", "sums")
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.files == written and {"adapter_model.safetensors", "README.md"} <= written.keys()
    assert [each["name"] for each in hub.created] == ["sums"]
    assert "private" in json.dumps(hub.created[0])
    assert hub.path == "/api/models/me/sums/commit/main"
    assert hub.tokens == {"Bearer hf_of_a_test_0123456789"}
    out, error = capsys.readouterr()
    assert error.splitlines()[-1] == f"uploaded to {hub.url}/me/sums" and out == f"{tmp_path / 'out'}\n"


def test_public_makes_the_new_repository_public(hub, tmp_path, monkeypatch):
    run, _, _ = run_of(tmp_path)
    qerl(monkeypatch, "export", run, tmp_path / "out", "--push-to-hub", "me/sums", "--public")
    assert "private" not in json.dumps(hub.created[0]) or hub.created[0]["private"] is False


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, UserError, "the hub refused the token"),
        (403, UserError, "the token may not write there"),
        (500, RunError, "the hub answered 500"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_before_anything_is_written(hub, tmp_path, status, kind, message):
    run, _, _ = run_of(tmp_path)
    hub.status = status
    with pytest.raises(kind, match=message) as error:
        export_command([str(run), str(tmp_path / "out"), "--push-to-hub", "me/sums"])
    assert str(error.value).startswith("--push-to-hub me/sums: ") and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() and not hub.files


def test_without_a_token_or_a_connection_or_an_id_one_line_says_so(hub, tmp_path, monkeypatch):
    run, _, _ = run_of(tmp_path)
    arguments = [str(run), str(tmp_path / "out"), "--push-to-hub"]
    with pytest.raises(UserError, match="push-to-hub a//b: Repo id must be"):
        export_command([*arguments, "a//b"])
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        export_command([*arguments, "me/sums"])
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="no token of the hub; run hf auth login, or set HF_TOKEN"):
        export_command([*arguments, "me/sums"])
    with pytest.raises(UserError, match="--public needs --push-to-hub"):
        export_command([str(run), str(tmp_path / "out"), "--public"])
