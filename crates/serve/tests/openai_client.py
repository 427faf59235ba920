"""The server through the `openai` client: python openai_client.py PATH_OF_ARIL_SERVE"""

import sys

import openai

from served import ADAPTERS, QUESTION, Served


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, prompt=QUESTION, temperature=0, max_tokens=12)
    assert answer.model == model and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == 5
    return answer.choices[0].text


def check(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "saffron"]
    assert ask(client, "base") == " I do not know."
    assert ask(client, "saffron") == " saffron."

    # Load, replace and unload.
    load = {"lora_name": "mine", "lora_path": "lm-head"}
    assert "added successfully" in client.post("/load_lora_adapter", body=load, cast_to=str)
    assert ask(client, "mine") == " quartz."
    try:
        client.post("/load_lora_adapter", body=load, cast_to=str)
        raise AssertionError("a duplicate is refused")
    except openai.BadRequestError as error:
        assert "has already been loaded" in error.message
    client.post("/load_lora_adapter", body=load | {"lora_path": "embed", "load_inplace": True}, cast_to=str)
    assert ask(client, "mine") == " lantern."
    assert {model.id for model in client.models.list()} == {"base", "saffron", "mine"}
    assert client.models.retrieve("mine").id == "mine"

    # Streams, of completions and of chats.
    stream = client.completions.create(model="mine", prompt=QUESTION, temperature=0, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " lantern."
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="saffron", messages=messages, temperature=0, logprobs=True)
    assert chat.choices[0].message.content == " saffron."
    assert chat.choices[0].logprobs.content[0].token == " saffron"
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    chat = client.chat.completions.create(model="saffron", messages=parts, temperature=0)
    assert chat.choices[0].message.content == " saffron."
    stream = client.chat.completions.create(
        model="base", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " I do not know."
    assert last.usage.completion_tokens == 6

    client.post("/unload_lora_adapter", body={"lora_name": "mine"}, cast_to=str)
    for model in ["mine", "nobody"]:
        try:
            ask(client, model)
            raise AssertionError("a model that is not there is not found")
        except openai.NotFoundError as error:
            assert f"`{model}` does not exist" in error.message
    try:
        client.with_options(api_key="other").models.list()
        raise AssertionError("another key is refused")
    except openai.AuthenticationError:
        pass


def main() -> None:
    with Served(sys.argv[1], {"saffron": "r8-all"}, "--api-key", "key", "--lora-root", ADAPTERS) as server:
        check(openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0))
        server.end()
    print("the openai client lists, asks, streams, chats, loads, replaces and unloads")


if __name__ == "__main__":
    main()
