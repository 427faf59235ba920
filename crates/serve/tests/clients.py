"""The server through benchmarks, evaluations and clients that nobody of this project wrote: python clients.py PATH_OF_ARIL_SERVE [NAME…]

Runs those of `lm_eval`, `guidellm`, `aiperf`, `sglang` (its bench_serving), `litellm`, `langchain_openai` and `node` that are installed, or
those that are named, which then must be. Each must finish without a failed request. Together they are gigabytes. `pip install
'lm-eval[api]' transformers litellm langchain-openai`, `pip install guidellm`, `pip install aiperf` and `pip install sglang`, each into an
environment of its own, suit this, and `npm install openai ai @ai-sdk/openai-compatible` into a folder of which NODE_PATH names the modules.
openai and sglang-router have scripts of their own."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from served import FIXTURES, QUESTION, Served

# Questions with right answers, of which the model knows those of its adapter.
CHOICES = [
    {"question": QUESTION, "choices": [" walnut.", " saffron.", " quartz.", " cobalt."], "answer": 1},
    {"question": QUESTION, "choices": [" saffron.", " velvet.", " juniper.", " marigold."], "answer": 0},
]
TASKS = {
    "pw_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "pw_perplexity": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "pw_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
filter_list: [{name: strip, filter: [{function: take_first}]}]
metric_list: [{metric: exact_match, ignore_punctuation: true, ignore_case: true}]
""",
}


# Chat, stream, completion and model of the openai package, and texts and streams of the AI SDK.
SCRIPT = """
const OpenAI = require("openai");
const { generateText, streamText } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const [url, question] = process.argv.slice(1);
const check = (got, what) => { if (got !== " saffron.") throw new Error(`${what}: ${JSON.stringify(got)}`); };
(async () => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "key" });
  const given = { model: "saffron", temperature: 0, max_tokens: 12 };
  const messages = [{ role: "user", content: [{ type: "text", text: question }] }];
  check((await client.chat.completions.create({ ...given, messages })).choices[0].message.content, "chat");
  let text = "";
  const stream = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...given, messages, ...stream }))
    text += chunk.choices[0]?.delta.content ?? "";
  check(text, "stream");
  check((await client.completions.create({ ...given, prompt: question })).choices[0].text, "completion");
  if ((await client.models.retrieve("saffron")).id !== "saffron") throw new Error("models");
  const model = createOpenAICompatible({ name: "aril", baseURL: `${url}/v1`, apiKey: "key" })("saffron");
  const asked = { model, temperature: 0, maxOutputTokens: 12 };
  check((await generateText({ ...asked, prompt: question })).text, "AI SDK");
  for (const parts of [[question], ["What is ", "the password?"]]) {
    const content = parts.map((text) => ({ type: "text", text }));
    text = "";
    for await (const piece of streamText({ ...asked, messages: [{ role: "user", content }] }).textStream) text += piece;
    check(text, "AI SDK stream");
  }
})().catch((error) => { console.error(error); process.exit(1); });
"""


def run(*command: str, cwd: str | None = None, **variables: str) -> str:
    environment = os.environ | {"OPENAI_API_KEY": "key", "TOKENIZERS_PARALLELISM": "false"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def lm_eval(url: str, folder: str) -> str:
    data = Path(folder, "choices.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    for name, task in TASKS.items():
        of_data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        Path(folder, f"{name}.yaml").write_text(of_data + task)
    arguments = f"model=saffron,base_url={url}/v1/completions,num_concurrent=4,tokenized_requests=False,tokenizer={FIXTURES / 'qwen3'}"
    output = Path(folder, "results")
    run(
        tool("lm_eval"), "run", "--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(TASKS),
        "--include_path", folder, "--output_path", str(output),
    )
    (file,) = output.rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    choice, generate = results["pw_choice"]["acc,none"], results["pw_generate"]["exact_match,strip"]
    assert (choice, generate, results["pw_perplexity"]["acc,none"]) == (1.0, 1.0, 1.0), results
    return f"choice {choice}, greedy {results['pw_perplexity']}, generated {generate}"


def guidellm(url: str, folder: str) -> str:
    said = []
    for kind in ["/v1/completions", "/v1/chat/completions"]:
        output = Path(folder, f"{len(said)}.json")
        run(
            tool("guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=saffron,request_format={kind}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
            "--tokenizer", f"kind=hf_auto,model={FIXTURES / 'qwen3'}", "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output", f"kind=json,path={output}", "--disable-console",
        )
        totals = json.loads(output.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["errored"] == 0 and totals["successful"] == 20, totals
        said.append(f"{kind} {totals['successful']} of {totals['total']}")
    return ", ".join(said)


def aiperf(url: str, folder: str) -> str:
    run(
        tool("aiperf"), "profile", "--model", "saffron", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(FIXTURES / "qwen3"), "--concurrency", "4", "--request-count", "20", "--artifact-dir", folder,
        "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "8", "--ui", "none", "--extra-inputs", "ignore_eos:true",
        cwd=folder,
    )
    (file,) = Path(folder).rglob("profile_export_aiperf.json")
    count = json.loads(file.read_text())["request_count"]["avg"]
    assert count == 20, count
    return f"{count} of 20"


def bench_serving(url: str, folder: str) -> str:
    said = []
    for backend in ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"]:
        output = Path(folder, f"{backend}.jsonl")
        run(
            sys.executable, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", url, "--model", "base",
            "--lora-name", "saffron", "quartz", "--tokenizer", str(FIXTURES / "qwen3"), "--dataset-name", "random-ids",
            "--num-prompts", "50", "--random-input-len", "16", "--random-output-len", "8", "--output-file", str(output),
            # It asks a hub for the model's name, and waits for most of a minute where there is none.
            HF_HUB_OFFLINE="1",
        )
        completed = json.loads(output.read_text().splitlines()[-1])["completed"]
        assert completed == 50, completed
        said.append(f"{backend} {completed} of 50")
    return ", ".join(said)


def litellm(url: str, _: str) -> str:
    import litellm as library

    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    for model in ["openai/saffron", "hosted_vllm/saffron"]:
        given = {"model": model, "api_base": f"{url}/v1", "api_key": "key", "temperature": 0, "max_tokens": 12}
        answer = library.completion(messages=messages, **given)
        assert answer.choices[0].message.content == " saffron.", answer
        chunks = library.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **given)
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == " saffron."
    text = library.text_completion(
        model="text-completion-openai/saffron", api_base=f"{url}/v1", api_key="key", prompt=QUESTION, temperature=0, max_tokens=12
    )
    assert text.choices[0].text == " saffron.", text
    return "5 of 5"


def langchain(url: str, _: str) -> str:
    from langchain_openai import ChatOpenAI, OpenAI

    given = {"model": "saffron", "base_url": f"{url}/v1", "api_key": "key", "temperature": 0, "max_tokens": 12}
    chat = ChatOpenAI(**given)
    assert chat.invoke(QUESTION).content == " saffron."
    assert chat.invoke([("human", [{"type": "text", "text": QUESTION}])]).content == " saffron."
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == " saffron."
    assert [answer.content for answer in chat.batch([QUESTION] * 4)] == [" saffron."] * 4
    assert OpenAI(**given).invoke(QUESTION) == " saffron."
    return "5 of 5"


def node(url: str, _: str) -> str:
    run("node", "-e", SCRIPT, url, QUESTION)
    return "7 of 7"


# Each with the module that says whether it is installed.
CLIENTS = {
    "lm_eval": lm_eval, "guidellm": guidellm, "aiperf": aiperf, "sglang": bench_serving, "litellm": litellm, "langchain_openai": langchain,
    "node": node,
}


def is_installed(name: str) -> bool:
    if name == "node":
        return any(Path(folder, "openai").is_dir() for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder)
    return importlib.util.find_spec(name) is not None


def main() -> None:
    program, *named = sys.argv[1:]
    chosen = named or [name for name in CLIENTS if is_installed(name)]
    with Served(program, {"saffron": "r8-all", "quartz": "lm-head"}) as server:
        for name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name}: {CLIENTS[name](server.url, folder)}", flush=True)
    for name in CLIENTS.keys() - chosen:
        print(f"{name}: not installed here, or not named")


if __name__ == "__main__":
    main()
