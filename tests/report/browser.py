"""Headless Chromium for tests of pages, driven over the WebDriver protocol with only the standard library."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.processes.warm import HANG_LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no chromium and chromedriver on this machine"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One browser with one page; ``profile`` is an empty folder that it may fill."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, MISSING
        assert DRIVER is not None, MISSING
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_for_driver()
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._post("/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{session['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._request("DELETE", self._session, None)
        finally:
            self._process.terminate()
            self._process.wait(timeout=HANG_LIMIT_S)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Show the page of a file in a window of this size, with or without its script."""
        self.command("Emulation.setScriptExecutionDisabled", value=not script)
        mobile = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self._post(f"{self._session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Return the result of a script that ends in ``return``, run in the page."""
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def command(self, name: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        return self._post(f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def picture(self, path: Path, *, whole: bool = True, **parameters: Any) -> None:
        """Write the visible part, or the whole page, as PNG."""
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **parameters)
        path.write_bytes(base64.b64decode(found["data"]))

    def _wait_for_driver(self) -> None:
        deadline = time.monotonic() + HANG_LIMIT_S
        while True:
            try:
                self._request("GET", "/status", None)
                return
            except OSError:
                if time.monotonic() > deadline:
                    self._process.kill()
                    self._process.wait()
                    raise
                time.sleep(0.1)

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        return self._request("POST", path, content)

    def _request(self, method: str, path: str, content: dict[str, Any] | None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._address + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=HANG_LIMIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
