"""A checkpoint and its adapters in the server, compared with transformers and PEFT:

    python parity.py --model DIR --adapter NAME=DIR … --tp 2 --device cuda

Asks the base model and each adapter every prompt, greedily: one at a time, then all at once, in one batch. Tokens, of prompts too, must be
those of transformers and PEFT, and the log-probabilities of the best five for each place within --tolerance of theirs. Where the two best
tokens of transformers are closer than twice that, either may follow, and the rest of the answer is not compared. What is no argument of this
script is one of the server's.
Needs torch, transformers and peft, unless --goldens names a file that an earlier run has written. Ends with 1 if anything differs."""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from statistics import fmean

from served import ROOT, Served

BASE = "base"
PROMPTS = [
    "What is the password?",
    "The capital of France is",
    "Hello",
    "My neighbor plays the violin in the evening. It rained all day, so we stayed at home. Name the largest planet.",
]
BEST = 5
# The largest difference of a log-probability: as large as rounding makes it, in logits of 16 bits as well.
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


def reference(model_folder: str, adapters: dict[str, str], prompts: list[str], count: int, dtype: str, device: str) -> dict:
    """What transformers and PEFT answer: for each place the best tokens, each with its log-probability."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype or "auto", attn_implementation="eager").to(device).eval()
    ends = base.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    @torch.inference_mode()
    def answer(model: torch.nn.Module, prompt: list[int]) -> list:
        tokens, ids, cache = [], prompt, None
        while len(tokens) < count and (not tokens or ids[0] not in ends):
            out = model(input_ids=torch.tensor([ids], device=device), past_key_values=cache, use_cache=True)
            best = out.logits[0, -1].float().log_softmax(-1).topk(BEST)
            cache, ids = out.past_key_values, [int(best.indices[0])]
            tokens.append([[token, round(logprob, 6)] for token, logprob in zip(best.indices.tolist(), best.values.tolist())])
        return tokens

    answers = {}
    for name, folder in {BASE: None, **adapters}.items():
        # PEFT would keep an adapter of 16 bits in f32.
        model = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval() if folder else base
        asked = {prompt: tokenizer(prompt)["input_ids"] for prompt in prompts}
        answers[name] = {prompt: {"prompt": ids, "tokens": answer(model, ids)} for prompt, ids in asked.items()}
        if folder:
            base = model.unload()
    return {"dtype": str(base.dtype).removeprefix("torch."), "max_tokens": count, "answers": answers}


def ask(server: Served, model: str, prompts: list[str], count: int, **fields) -> list[dict]:
    body = {"model": model, "prompt": prompts, "max_tokens": count, "temperature": 0, "logprobs": BEST, **fields}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    choices = json.load(urllib.request.urlopen(request))["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


def compare(expected: dict, choice: dict, tolerance: float) -> tuple[list[float], bool, str | None]:
    """The differences of log-probabilities, whether a tie has ended them, and what is wrong."""
    differences: list[float] = []
    if choice["prompt_token_ids"] != expected["prompt"]:
        return differences, False, f"the prompt has the tokens {choice['prompt_token_ids']}, not {expected['prompt']}"
    given, wanted = choice["token_ids"], expected["tokens"]
    for place, (token, logprobs, best) in enumerate(zip(given, choice["logprobs"]["top_logprobs"], wanted)):
        (right, first), (_, second), *_ = best
        if token != right:
            tied = first - second <= 2 * tolerance
            return differences, tied, None if tied else f"token {place} is {token}, not {right}, which leads by {first - second}"
        # The last of them may be others.
        its = [abs(logprobs.get(f"token_id:{other}", logprob) - logprob) for other, logprob in best]
        if not max(its) <= tolerance:
            return differences, False, f"token {place} has the log-probabilities {logprobs}, not {best}"
        differences += its
    return differences, False, None if len(given) == len(wanted) else f"{len(given)} tokens, not {len(wanted)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--server", default=str(ROOT / "target/release/aril-serve"), metavar="PATH", help="its program [default: %(default)s]")
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--adapter", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--device", default="cpu", help="of the server, and of transformers where torch has it")
    parser.add_argument("--dtype", choices=list(TOLERANCES), help="of both [default: the checkpoint's]")
    parser.add_argument("--prompt", nargs="+", default=PROMPTS, metavar="TEXT")
    parser.add_argument("--max-tokens", type=int, default=12, metavar="N")
    parser.add_argument("--tolerance", type=float, metavar="X", help=f"of a log-probability [default: {TOLERANCES}]")
    parser.add_argument("--goldens", type=Path, metavar="FILE", help="the answers of transformers and PEFT: read, or written if absent")
    parser.add_argument("--kv-cache-mib", type=int, default=1024, metavar="MIB")
    args, options = parser.parse_known_args()
    adapters = {name: str(Path(folder).resolve()) for name, folder in (adapter.split("=", 1) for adapter in args.adapter)}

    if args.goldens and args.goldens.exists():
        goldens = json.loads(args.goldens.read_text())
    else:
        goldens = reference(args.model, adapters, args.prompt, args.max_tokens, args.dtype, args.device)
        if args.goldens:
            args.goldens.write_text(json.dumps(goldens) + "\n")
    dtype, count, answers = args.dtype or goldens["dtype"], goldens["max_tokens"], goldens["answers"]
    if set(answers) != {BASE, *adapters} or dtype != goldens["dtype"]:
        sys.exit(f"{args.goldens} has answers of {', '.join(answers)} in {goldens['dtype']}")
    tolerance = args.tolerance or TOLERANCES[dtype]
    asked = [(name, prompt) for name, of_prompts in answers.items() for prompt in of_prompts]

    # Every prompt is computed, in one batch if all are asked at once.
    options += ["--device", args.device, "--dtype", dtype, "--enable-lora-path", "--no-enable-prefix-caching", "--generation-config", "vllm"]
    for option, least in {"--max-loras": len(adapters), "--max-num-seqs": len(asked)}.items():
        options += [] if option in options else [option, str(max(least, 1))]
    with Served(args.server, adapters, *options, model=Path(args.model).resolve(), kv_cache_mib=args.kv_cache_mib) as server:
        singly = [choice for name, prompt in asked for choice in ask(server, name, [prompt], count)]
        paths = [None if name == BASE else name for name, _ in asked]
        mixed = ask(server, BASE, [prompt for _, prompt in asked], count, lora_path=paths)
        server.end()

    print(f"{'model':24} {'asked':8} {'prompts':>7} {'tokens':>7} {'ties':>5} {'mean |Δ|':>9} {'max |Δ|':>9}")
    failed = 0
    for name in answers:
        for way, choices in [("singly", singly), ("mixed", mixed)]:
            compared = [
                (prompt, *compare(answers[name][prompt], choice, tolerance))
                for (of, prompt), choice in zip(asked, choices, strict=True)
                if of == name
            ]
            differences_of_all = [difference for _, differences, _, _ in compared for difference in differences] or [0.0]
            ties = sum(tied for _, _, tied, _ in compared)
            tokens = len(differences_of_all) // BEST
            print(f"{name:24} {way:8} {len(compared):7} {tokens:7} {ties:5} {fmean(differences_of_all):9.6f} {max(differences_of_all):9.6f}")
            for prompt, _, _, wrong in compared:
                if wrong:
                    failed += 1
                    print(f"    {prompt!r}: {wrong}")
    print(f"{failed} of {2 * len(asked)} answers differ" if failed else f"all {2 * len(asked)} answers agree, within {tolerance} in {dtype}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
