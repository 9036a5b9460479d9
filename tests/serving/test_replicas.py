"""The same application on two replicas of Ray Serve, started as a user would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import tad
from tad.models import LM

pytest.importorskip("ray", reason="the extra `ray` is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

KEY = "replica-key"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_two_replicas_answer_as_one_server(plain: LM, checkpoint: Path) -> None:
    port = free_port()
    command = [
        sys.executable, "-m", "tad", "serve", str(checkpoint), "--backend", "ray", "--replicas", "2",
        "--port", str(port), "--device", "cpu",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TAD_API_KEY": KEY}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line == f"serving at http://127.0.0.1:{port}\n", line + str(process.communicate(timeout=5))
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        for number in range(12):
            chat = [{"role": "user", "content": f"question {number}"}]
            call = {"model": "tiny-llada", "messages": chat, "max_tokens": 32}
            wanted = tad.generate(plain, chat, gen_length=32).text
            assert client.chat.completions.create(**call).choices[0].message.content == wanted
            chunks = client.chat.completions.create(**call, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
        metrics = [ask_metrics(url) for _ in range(30)]
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
        assert len(set(metrics)) >= 2  # two engines, each with its own totals
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "stopped"


def ask_metrics(url: str) -> str:
    """The totals of the replica that happens to answer."""
    time.sleep(0.02)
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}, trust_env=False).text
    return next(line for line in text.splitlines() if line.startswith("process_start_time_seconds "))
