"""A headless Chromium, controlled over its debugging pipe: JSON messages, each ended by a zero byte."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")

# The browser reads from descriptor 3 and writes to 4; either number may be taken by the other pipe's end.
_WRAPPER = """
import os, sys
r, w = (os.dup(os.dup(os.dup(int(fd)))) for fd in sys.argv[1:3])
os.dup2(r, 3)
os.dup2(w, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextlib.contextmanager
def browser(folder, width=1280, height=900):
    to_read, to_write = os.pipe(), os.pipe()
    command = [PATH, *OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-ISc", _WRAPPER, str(to_read[0]), str(to_write[1]), *command],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    with open(to_read[1], "wb", buffering=0) as requests, open(to_write[0], "rb", buffering=0) as replies:
        try:
            yield Tab(requests, replies, width, height)
        finally:
            process.kill()
            process.wait()


class Tab:
    """One page; `errors` are what it logged as errors and what its script threw."""

    def __init__(self, requests, replies, width, height):
        self._requests, self._replies, self._rest = requests, replies, b""
        self._num_sent, self._session = 0, None
        self.errors = []
        (target,) = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method, **parameters):
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = self._received()
            if reply.get("id") == self._num_sent:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            if reply.get("method") == "Runtime.exceptionThrown":
                details = reply["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            if reply.get("method") == "Log.entryAdded" and reply["params"]["entry"]["level"] == "error":
                self.errors.append(reply["params"]["entry"]["text"])

    def _received(self):
        while b"\0" not in self._rest:
            more = self._replies.read(1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, address):
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, timeout_s=60.0):
        """The expression's value as soon as it is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never: {expression}; errors: {self.errors}"
            time.sleep(0.05)
        return value

    def resize(self, width, height):
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, is_dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def point_at(self, x, y):
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
