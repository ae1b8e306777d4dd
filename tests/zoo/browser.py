"""A headless Chromium, driven by its DevTools protocol over a pipe: chromedevtools.github.io/devtools-protocol."""

import base64
import itertools
import json
import os
import pathlib
import shutil
import subprocess
from typing import Any


COMMAND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# As root, as in containers, Chromium has no sandbox. It opens pages of the tests' own server only.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Browser:
    """A browser with one page. `folder` keeps its files."""

    def __init__(self, folder: pathlib.Path):
        theirs, ours = os.pipe(), os.pipe()
        # It reads commands from the file 3, and writes to 4.
        shell = f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}'
        command = [str(COMMAND), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(theirs[0], ours[1]), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs[0])
        os.close(ours[1])
        self._to, self._from = os.fdopen(theirs[1], "wb"), os.fdopen(ours[0], "rb")
        self._numbers, self._session, self._held = itertools.count(1), {}, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self._to.close()
        self._from.close()
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            while b"\0" not in self._held:
                data = os.read(self._from.fileno(), 2**16)
                assert data, "The browser has ended."
                self._held += data
            line, self._held = self._held.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.enable")
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Runs a script in the page, and returns its value; if that is a promise, its result."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true in the page, which asks ten times a second."""
        self.run(f"""new Promise(done => {{
            const look = () => {{ try {{ if ({condition}) return done(true); }} catch {{}} setTimeout(look, 100); }};
            look();
        }})""")

    def picture(self, file: pathlib.Path) -> None:
        """Writes what the page shows into a .png file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
