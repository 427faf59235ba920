"""PEFT trains an adapter of a small model beside the server, and pushes each step to it:

    python trainer.py --steps 20 --tp 2

After each step, the adapter is saved and loaded in place. The log-probabilities of the server for a prompt must be those of the trainer, within
--tolerance, by the adapter's name and by the number of its version. Meanwhile others ask without a pause: each of their answers must be that of
one step, whole, and never that of an earlier step than the last one that was loaded before they asked. What is no argument of this script is one
of the server's. Needs torch, transformers and peft. Ends with 1 if anything differs."""

import argparse
import json
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from served import ROOT, Served

NAME = "trained"
KEPT = 4


def post(server: Served, path: str, body: dict) -> bytes:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request).read()


def of_server(server: Served, model: str, prompt: list[int]) -> list[float]:
    """The log-probability of each token of a prompt behind the first."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    return json.loads(post(server, "/v1/completions", body))["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)]


def largest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--server", default=str(ROOT / "target/release/aril-serve"), metavar="PATH", help="its program [default: %(default)s]")
    parser.add_argument("--model", default=str(ROOT / "tests/fixtures/qwen3"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=10, metavar="N")
    parser.add_argument("--askers", type=int, default=3, metavar="N")
    parser.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="of a log-probability, in float32 [default: %(default)s]")
    args, options = parser.parse_known_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    texts = torch.randint(model.config.vocab_size, (4, 24))
    prompt = texts[0].tolist()

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()

    @torch.inference_mode()
    def of_trainer() -> list[float]:
        logprobs = model(input_ids=texts[:1]).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(-1, texts[0, 1:, None])[:, 0].tolist()

    # What the trainer expects of each step, before the server has it, and the last step that the server has.
    expected, served, wrong, asked = [], 0, [], 0
    is_over = threading.Event()

    def ask_on() -> None:
        nonlocal asked
        while not is_over.is_set():
            first = served
            answer = of_server(server, NAME, prompt)
            asked += 1
            if not any(largest(answer, step) <= args.tolerance for step in expected[first:]):
                wrong.append(f"an answer is of no step from {first} on: {answer}")

    with tempfile.TemporaryDirectory() as root:
        lora = ["--lora-root", root, "--lora-versions", str(KEPT), "--dtype", "float32", "--no-enable-prefix-caching"]
        with Served(args.server, {}, *lora, *options, model=Path(args.model).resolve()) as server:
            askers, apart = [], 0.0
            for number in range(args.steps):
                step()
                model.save_pretrained(f"{root}/{number}")
                expected.append(of_trainer())
                body = {"lora_name": NAME, "lora_path": str(number), "load_inplace": True}
                post(server, "/v1/load_lora_adapter", body)
                served = number
                models = json.load(urllib.request.urlopen(f"{server.url}/v1/models"))["data"]
                versions = next(model["versions"] for model in models if model["id"] == NAME)
                for name, of in [(NAME, number)] + [(f"{NAME}@{version}", number - back) for back, version in enumerate(versions)]:
                    difference = largest(of_server(server, name, prompt), expected[of])
                    apart = max(apart, difference)
                    if not difference <= args.tolerance:
                        wrong.append(f"step {number}, {name}: {difference}")
                if not askers:
                    askers = [threading.Thread(target=ask_on) for _ in range(args.askers)]
                    for asker in askers:
                        asker.start()
            is_over.set()
            for asker in askers:
                asker.join()
            server.end()
    moved = largest(expected[0], expected[-1])
    if not moved > 10 * args.tolerance:
        wrong.append(f"the steps differ by {moved} alone")
    print("\n".join(wrong[:20]))
    print(f"{args.steps} steps, whose first and last differ by {moved:.3f}; {asked} answers beside them; at most {apart:.6f} from the trainer")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
