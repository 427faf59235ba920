"""Three replicas of the server behind sglang-router: python router.py PATH_OF_ARIL_SERVE

Needs the packages sglang-router and openai. Each replica has its adapters from its command line, as a deployment has them."""

import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai

from served import QUESTION, Port, Served, wait

WORDS = {"base": " I do not know.", "saffron": " saffron.", "quartz": " quartz.", "base:saffron": " saffron."}
FOLDERS = {"saffron": "r8-all", "quartz": "lm-head"}
REPLICAS = 3


class Replica(Served):
    def __init__(self, program: str) -> None:
        super().__init__(program, FOLDERS, "--enable-lora-path")

    def answered(self) -> int:
        """The choices that this replica has answered."""
        lines = re.findall(r"^vllm:request_success_total\{.*\} (\d+)", self.get("/metrics"), re.MULTILINE)
        return sum(map(int, lines))


def ask(client: openai.OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt=QUESTION, temperature=0, max_tokens=12).choices[0].text


def ask_in_chat(client: openai.OpenAI, model: str) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    chunks = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check(client: openai.OpenAI, replicas: list[Replica]) -> None:
    # Every model, whole and streamed, in completions and chats.
    for model, word in WORDS.items():
        assert ask(client, model) == word, model
        assert ask_in_chat(client, model) == word, model
        chunks = client.completions.create(model=model, prompt=QUESTION, temperature=0, max_tokens=12, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == word, model

    def storm(count: int) -> None:
        models = list(WORDS)
        with ThreadPoolExecutor(12) as pool:
            asked = [models[index % len(models)] for index in range(count)]
            answers = pool.map(lambda model: ask(client, model), asked)
            assert [WORDS[model] for model in asked] == list(answers)

    storm(60)
    assert all(replica.answered() >= 10 for replica in replicas), [replica.answered() for replica in replicas]

    # A replica dies while requests arrive: the router sends them elsewhere.
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(storm, 120)
        time.sleep(0.1)
        replicas[0].process.kill()
        replicas[0].process.wait()
        running.result()
    storm(30)
    replicas[0].start()

    # Once it is back, it is asked again.
    def is_asked() -> bool:
        storm(REPLICAS)
        return replicas[0].answered() > 0

    wait("the replica that has come back", is_asked)
    storm(30)


def main() -> None:
    port, metrics = Port(), Port()
    with ExitStack() as stack:
        replicas = [stack.enter_context(Replica(sys.argv[1])) for _ in range(REPLICAS)]
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "warn"]
        # Failures are noticed, and forgiven, within a second or two.
        command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        command += ["--health-success-threshold", "1", "--cb-timeout-duration-secs", "1"]
        command += ["--worker-urls", *(replica.url for replica in replicas)]
        router = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(router.kill)
        url = f"http://127.0.0.1:{port}"
        wait("the router", lambda: urllib.request.urlopen(f"{url}/readiness", timeout=5).status == 200)
        check(openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0), replicas)
    print("sglang-router serves adapters over three replicas, and without one that is killed until it is back")


if __name__ == "__main__":
    main()
