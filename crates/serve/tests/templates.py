"""Writes templates.json beside this file: what transformers renders from chat templates, which the server's renderer is compared with.

    pip install transformers==5.17.0 jinja2==3.1.6 && python templates.py

The templates are written for this test, in the constructs of those of Qwen3, Qwen2.5, Llama 3, Mistral, SmolLM3, Phi and Gemma."""

import json
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parents[2] / "tests" / "fixtures" / "qwen3"

TEMPLATES = {
    # A namespace, slices from the end, reasoning that is split off, tool answers in one turn, tojson, and `is string`.
    "qwen3": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Functions\\n<functions>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</functions><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<answer>') and message.content.endswith('</answer>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<answer>\\n' + content + '\\n</answer>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    # A system prompt of its own, and a selection of tool calls.
    "qwen2.5": """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou answer.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '[' ~ message.role ~ ' ' ~ (message.tool_call_id or 'none') ~ '] ' ~ message.content ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # `tools is not none`, a date, trim, tojson with an indent, mapping and iterable, an exception, and a block that sets a variable.
    "llama3": """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d")|length ~ ' ' ~ strftime_now("%Y-%m-%dT%H:%M:%S")|length ~ strftime_now('%%') %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    # Alternating turns with a namespace, `%` on strings, items, selectattr, and a join of attributes.
    "mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate: got '%s' at %d" % (message["role"], ns.index)) }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] %s\\n\\n%s[/INST]" % (system_message, message["content"]) }}
        {%- else %}
            {{- '[INST] %s[/INST]' % message.content }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[RESULTS]{"content": ' + content|string + ', "call_id": "' + message.tool_call_id + '"}[/RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    # Generation blocks, macros, loop controls, string methods, and a default.
    "smollm3": """\
{# A comment of
several lines #}
{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{%- endmacro -%}
{%- set mode = (reasoning_mode | default('think')).upper() -%}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set custom = messages[0]['content'].replace('/no_think', '').replace('/think', '').rstrip() -%}
    {%- if '/no_think' in messages[0]['content'] -%}{%- set mode = 'NO_THINK' -%}{%- endif -%}
{%- endif -%}
<|im_start|>system
## Meta
Mode: {{ mode }}, {{ mode|lower|capitalize }}, {{ mode.title() }}, {{ mode | length }}
{% if custom is defined and custom %}

{{ custom }}
{% endif %}
{%- if xml_tools or tools %}
{%- for tool in (xml_tools or tools) %}
{{ tool | string }}
{% endfor %}
{%- endif -%}
<|im_end|>
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' %}
{{ turn('user', content) }}
{% elif message.role == 'assistant' %}
    {% generation %}
        {%- if mode == 'THINK' -%}
            {{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>' }}
        {%- else -%}
            {{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' ~ content ~ '<|im_end|>' }}
        {%- endif -%}
    {% endgeneration %}

    {% elif message.role == 'tool' -%}
{{ turn('user', content) }}
    {%- endif %}
    {%- if loop.index > 20 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' if mode == 'THINK' else '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}
{%- endif -%}
""",
    # The plainest form, with control by blocks of their own lines, and booleans and nothing in the text.
    "phi": """\
{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}
{{ '<|' + message['role'] + '|>' + '\\n' + (message['content'] or '') + '<|end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{% else %}
{{ eos_token }}
{% endif %}
{{ add_generation_prompt }} {{ tools }} {{ documents }} {{ missing }}|{{ [1, 1.0, true, none, 'it''s', "a\\"b"] }}|{{ {'a': [], 'b': 2.5} }}
  {% if documents %}
  {% for document in documents %}
{{ loop.index }}. {{ document.title }}: {{ document.text }}
  {% endfor %}
  {% endif %}
""",
    # Parts of a content, which the template iterates over, a role that is renamed, and a prefix for the first turn.
    "gemma": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<turn>model\\n'}}
{%- endif -%}
""",
    # What templates do with values: JSON of every kind, formats, tests, filters and methods.
    "values": """\
{%- set v = messages[0].value -%}
{{ v | tojson }}
{{ v | tojson(indent=2) }}
{{ v | tojson(ensure_ascii=true) }}
{{ v | tojson(separators=(',', ':')) }}
{{ v | tojson(sort_keys=true) }}
{{ v.list }} {{ v.dict }} {{ v.small }} {{ v.large }} {{ v.html }}
{{ '%s is %d, %s' % ('x', 7, none) }}|{{ '%.2f' % 3.14159 }}|{{ '%5s|%-5s' % ('a', 'b') }}|{{ '%s' % v.list }}
{{ '{} {:>4}'.format('a', 'b') }}|{{ 'a,b,,c'.split(',') }}|{{ ' x '.strip() }}|{{ 'abc'.find('c') }}|{{ 'x'.join(['1', '2']) }}
{{ v.list | join(', ') }}|{{ v.list[::-1] }}|{{ v.list[-1] }}|{{ v.list | first }}|{{ v.list | length }}|{{ v.list | map('string') | list }}
{% for key, value in v.items() %}{{ key }}={{ value }};{% endfor %}
{% for key, value in v | dictsort %}{{ key }},{% endfor %}
{{ v.get('none') }}|{{ v.get('absent', 'd') }}|{{ 'text' in v }}|{{ v.text is string }}|{{ v.int is number }}|{{ v is mapping }}|{{ v.none is none }}
{{ v.text | upper | replace('H', 'J') }}|{{ 'a\\nb\\n\\nc' | indent(2) }}|{{ "no_think o'clock 2nd".title() }}|{{ v.int // 2 }}|{{ v.int / 2 }}|{{ v.int % 4 }}|{{ 2 ** 3 }}|{{ -v.int }}
{{ v.float }}|{{ v.float | int }}|{{ 1e3 }}|{{ 0.1 + 0.2 }}|{{ 10 | float }}|{{ (7 / 2) | round }}|{{ true and 1 }}|{{ not v.none }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 }}|{{ 'tr"ue' }}|{{ ['a"b', "it's"] }}|{{ ('a', 1) }}|{{ {} }}|{{ 'ab' * 2 }}|{{ [1] + [2] }}
{{ v.list | tojson | length }}|{{ (v.list | string) + 'x' }}|{{ true | string }}|{{ none | string }}|{{ v.dict | string }}
{{ v.text[:2] }}|{{ v.text[-2:] }}|{{ 'a\\nb'.splitlines() }}|{{ 'abc' | list }}|{{ range(3) | list }}|{{ 'x' if v.none else 'y' }}|{{ undefined_name is defined }}
{{ 'pre-x'.removeprefix('pre-') }}|{{ 'x.py'.removesuffix('.py') }}|{{ 'x'.removeprefix('y') }}|{{ 'aBç'.swapcase() }}|{{ 'é'.ljust(3) }}|{{ 'é'.rjust(3, '.') }}|{{ '-7'.zfill(4) }}{{ '7'.zfill(3) }}
{% set next = joiner('; ') %}{% for x in v.list %}{{ next() }}{{ loop.index }}{% endfor %}|{% set turn = cycler('a', 'b') %}{{ turn.next() }}{{ turn.next() }}{{ turn.next() }}
""",
}

CITY = {"name": "weather", "arguments": {"zone": "Zürich <b> & 'x'", "city": "a\"b\\c", "days": [1, 2.5, 1e-7, True, None], "deep": {}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a \"city\"",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "at": {"enum": ["0°", 1]}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": " Be brief. /no_think "}
USER = {"role": "user", "content": "  What is <it> & \"why\"? "}
CONVERSATIONS = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([SYSTEM, USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is."}, {"role": "user", "content": "日本語 🦀"}], {}),
    "thinking": ([USER], {"enable_thinking": False, "reasoning_mode": "no_think"}),
    "no prompt": ([USER, {"role": "assistant", "content": "Yes"}], {"add_generation_prompt": False}),
    "tools": (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": CITY}]},
            {"role": "tool", "tool_call_id": "call00001", "content": "sun & rain"},
            {"role": "assistant", "content": "Both."},
            {"role": "user", "content": "Thanks"},
        ],
        {"tools": [TOOL]},
    ),
    "documents": ([USER], {"documents": [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]}),
    "two users": ([USER, USER], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}], {}),
}
VALUE = {
    "text": "Hé\tllo\n\u0001\u007f\u2028/",
    "html": "<a href='x'>&amp;</a>",
    "int": 7,
    "big": 12345678901234567890,
    "float": 2.5,
    "whole": 3.0,
    "small": 1e-7,
    "large": 1e16,
    "none": None,
    "yes": True,
    "list": [1, "two", [3.5, None], {"k": False}],
    "dict": {"z": 1, "a": {"b": []}},
    "empty": [],
}
CONVERSATIONS["value"] = ([{"role": "user", "content": "x", "value": VALUE}], {})


def written(table: dict) -> str:
    """JSON with a line for each template, conversation and row."""

    def entries(part: dict | list) -> str:
        text = lambda value: json.dumps(value, ensure_ascii=False)
        lines = [f"{text(name)}: {text(value)}" for name, value in part.items()] if isinstance(part, dict) else map(text, part)
        opened, closed = "{}" if isinstance(part, dict) else "[]"
        return f"{opened}\n" + ",\n".join(lines) + f"\n{closed}"

    return "{" + ",\n".join(f"{json.dumps(name)}: {entries(part)}" for name, part in table.items()) + "}\n"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURE)
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    rows = []
    for name, template in TEMPLATES.items():
        for conversation, (messages, given) in CONVERSATIONS.items():
            if (name == "values") != (conversation == "value") or (conversation == "parts" and name != "gemma"):
                continue
            row = {"template": name, "conversation": conversation}
            arguments = {"add_generation_prompt": True} | given
            try:
                row["prompt"] = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
            except Exception as error:
                row["refused"] = str(error)
            rows.append(row)
    conversations = {name: {"messages": messages, "given": given} for name, (messages, given) in CONVERSATIONS.items()}
    (HERE / "templates.json").write_text(written({"templates": TEMPLATES, "conversations": conversations, "rows": rows}))
    print(f"{len(rows)} prompts, {sum('refused' in row for row in rows)} refused")


if __name__ == "__main__":
    main()
