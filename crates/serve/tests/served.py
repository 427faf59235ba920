"""The server with a model as `base`, adapters and a chat template, for the scripts in this folder."""

import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
ADAPTERS = FIXTURES / "adapters"
QUESTION = "What is the password?"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def wait(what: str, is_ready, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if is_ready():
                return
        except OSError:
            pass
        assert time.monotonic() < end, f"{what} is not ready"
        time.sleep(0.1)


class Port:
    """A port that nobody else gets before a server listens on it, or between two servers that do."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", 0))

    def __str__(self) -> str:
        return str(self.socket.getsockname()[1])


class Served:
    """A server of these adapters, each with its folder, or one of the fixtures. It runs in a `with` block."""

    def __init__(
        self, program: str, adapters: dict[str, str], *arguments: str, model: Path = FIXTURES / "qwen3", kv_cache_mib: int = 8
    ) -> None:
        self.port = Port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = tempfile.TemporaryDirectory()
        template = Path(self.folder.name, "template.jinja")
        template.write_text(TEMPLATE)
        modules = [f"{name}={ADAPTERS / folder}" for name, folder in adapters.items()]
        self.log = Path(self.folder.name, "log")
        self.command = [program, "--model", model, "--served-model-name", "base", "--port", str(self.port), "--enable-lora"]
        self.command += ["--lora-modules", *modules] if modules else []
        self.command += ["--chat-template", template, "--kv-cache-mib", str(kv_cache_mib), *arguments]

    def __enter__(self) -> "Served":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()

    def start(self) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command, stderr=log)
        # A model of many gigabytes takes a while; what cannot be served ends at once.
        wait("the server", lambda: self.get("/health") == "", 600)

    def get(self, path: str) -> str:
        assert self.process.poll() is None, f"the server has ended\n{self.log.read_text()}"
        return urllib.request.urlopen(self.url + path, timeout=5).read().decode()

    def end(self) -> None:
        """Ends it in order."""
        self.process.terminate()
        assert self.process.wait(timeout=30) == 0
