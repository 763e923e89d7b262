"""Our rendering against transformers' own, on templates in the manner of well-known models."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import ModelError, RequestError, UnprocessableError
from engine.text.chat_template import ChatOptions, ChatTemplate
from engine.text.special_tokens import SpecialTokens
from tests.engine.text.harmony_template import HARMONY
from tests.engine.text.small_tokenizers import byte_level

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = SpecialTokens(NAMED, (), ())

# Headers around each message, content trimmed, a date and the tools in the first turn.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|start|>system<|end|>

Today is {{ date_string }}.
{%- if tools is not none %}
    {{- "\\nYou may call:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}<|eot|>
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("One tool-call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

# One line per message, tools in the system message, results of tools gathered in one turn.
IM_BLOCKS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.reasoning_content %}
            {{- '\\n<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>{"name": "' }}{{- tool_call.name }}
            {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

# Strictly alternating turns, no system role, the assistant called "model", parts of content.
TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Content read by a macro, as Qwen 3.5 has it.
MACRO = """\
{%- macro read(content, mark) -%}
    {%- if content is string -%}
        {{ mark + content }}
    {%- else -%}
        {%- for item in content -%}{{ mark + item.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}{{ read(message.content, '-') }}{%- endfor -%}
"""

# Block tags on lines of their own, loop controls, the assistant's tokens marked for training.
LINES = """\
{% set state = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% set state.count = state.count + 1 %}
[{{ state.count }}] {{ message.role }}:
    {% generation %}
{% set inner = message.content %}
{{ inner }}{% endgeneration %} {{ inner is defined }} {{ dict(a=1) | tojson }}
{% endfor %}
{% for document in documents or [] %}
<doc title={{ document.title | tojson }}>{{ document.text }}</doc>
{% endfor %}
"""

TEMPLATES = {
    **{"headers": HEADERS, "im_blocks": IM_BLOCKS, "turns": TURNS},
    **{"macro": MACRO, "lines": LINES},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  What is <b> & 'c' in Köln? "}],
    "several": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello. \n"},
        {"role": "user", "content": "And now?\n\n日本"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now> – 'everywhere'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "yes"},
]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED)


def ours(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL, "here")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers(
    oracle: PreTrainedTokenizerFast, template: str, chat: str, prompt: bool, tools: Any
) -> None:
    source = TEMPLATES[template]
    tools = tools if "tools" in source else None  # else refused, see below
    options = ChatOptions(tools=tools, add_generation_prompt=prompt)
    if template == "turns" and chat == "system":
        with pytest.raises(RequestError, match="messages: .*System role not supported"):
            ours(source).render(CHATS[chat], options)
        return
    expected = oracle.apply_chat_template(
        CHATS[chat],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        tokenize=False,
    )
    assert ours(source).render(CHATS[chat], options) == expected


@pytest.mark.parametrize("template", ["headers", "im_blocks"])
def test_tool_calls_as_transformers(oracle: PreTrainedTokenizerFast, template: str) -> None:
    source = TEMPLATES[template]
    expected = oracle.apply_chat_template(
        TOOL_CHAT, tools=TOOLS, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    # Clients send arguments as they got them: JSON in a string.
    chat = json.loads(json.dumps(TOOL_CHAT))
    chat[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    assert ours(source).render(chat, ChatOptions(tools=TOOLS)) == expected


@pytest.mark.parametrize(
    "look",
    [
        "{% set said = m.content %}{{ 'assistant' + said }}",
        "{% if m.content is not string %}{{ m.content | tojson }}{% endif %}",
    ],
)
@pytest.mark.parametrize("said", [{"content": None}, {}])
def test_templates_may_look_into_what_a_caller_of_tools_says(
    look: str, said: dict[str, Any]
) -> None:
    """Nothing, which the API itself says by null: templates put it behind other texts."""
    source = "{% for m in messages %}" + look + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    silent = {"role": "assistant", "content": "", "tool_calls": [call]}
    quiet = {"role": "assistant", "tool_calls": [call], **said}
    assert ours(source).render([quiet]) == ours(source).render([silent])


@pytest.mark.parametrize("template", ["headers", "im_blocks", "turns"])
@pytest.mark.parametrize("text", ["I think", " I think  ", "that\n"])
def test_continues_the_last_message_as_transformers(
    oracle: PreTrainedTokenizerFast, template: str, text: str
) -> None:
    chat = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": text}]
    expected = oracle.apply_chat_template(
        chat, chat_template=TEMPLATES[template], continue_final_message=True, tokenize=False
    )
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert ours(TEMPLATES[template]).render(chat, options) == expected


def test_variables_documents_and_reasoning_as_transformers(
    oracle: PreTrainedTokenizerFast,
) -> None:
    documents = [{"title": 'A "title"', "text": "Text."}]
    chat = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning": "because"},
        {"role": "skip", "content": "-"},
    ]
    for source, kwargs in (
        (IM_BLOCKS, {"enable_thinking": False}),
        (HEADERS, {"date_string": "1 Jan 2030"}),
        (LINES, {}),
    ):
        expected = oracle.apply_chat_template(
            chat,
            chat_template=source,
            documents=documents,
            add_generation_prompt=True,
            tokenize=False,
            **kwargs,
        )
        given = documents if "documents" in source else None  # else refused, see below
        options = ChatOptions(documents=given, template_kwargs=kwargs)
        assert ours(source).render(chat, options) == expected


def test_parts_of_text_reach_templates_that_read_them_and_are_joined_for_others(
    oracle: PreTrainedTokenizerFast,
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}]
    for source, words in ((TURNS, "onetwo"), (MACRO, "-one-two")):
        expected = oracle.apply_chat_template(
            chat, chat_template=source, add_generation_prompt=True, tokenize=False
        )
        assert words in expected
        assert ours(source).render(chat) == expected
    joined = [{"role": "user", "content": "one\ntwo"}]
    assert ours(IM_BLOCKS).render(chat) == ours(IM_BLOCKS).render(joined)


def test_what_a_developer_says_is_the_system_s_to_templates_without_that_role() -> None:
    """Many would pass the message over: they look for the roles that they know."""
    chat = [{"role": "developer", "content": "Be brief."}, *CHATS["one"]]
    known = "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.content }}{% endif %}"
    for source in (HEADERS, IM_BLOCKS, f"You are a developer.{known}{{% endfor %}}"):
        as_system = [{**chat[0], "role": "system"}, *chat[1:]]
        assert ours(source).render(chat) == ours(source).render(as_system)
        assert "Be brief." in ours(source).render(chat)
    own = "{% if messages[0].role == 'developer' %}its own{% endif %}"
    assert ours(own).render(chat) == "its own"


EITHER = """\
{%- for m in messages -%}
    {%- if m.content is string -%}<{{ m.content }}>
    {%- elif m.role == "user" -%}<{% for item in m.content %}{{ item.text }}{% endfor %}>
    {%- elif m.role == "tool" -%}<{{ m.content | string }}>
    {%- else -%}<{{ m.content[0].text }}>
    {%- endif -%}
{%- endfor -%}
"""


SYSTEM, DEVELOPER, USER = (
    {"role": role, "content": [{"type": "text", "text": role}] if role == "developer" else role}
    for role in ("system", "developer", "user")
)
REFUSES_SECOND = """\
{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}
{% endif %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}"""


def test_a_beginning_of_several_messages_is_one_where_a_template_knows_no_second() -> None:
    chat = [SYSTEM, DEVELOPER, USER]
    said = ours(REFUSES_SECOND).render(chat)
    assert said == "system: system\n\ndeveloper;user: user;"
    harmony = ours(HARMONY).render(chat)  # which would leave the second one out
    assert "# Instructions\n\nsystem\n\ndeveloper<|end|>" in harmony
    assert ours(IM_BLOCKS).render(chat).count("<|im_start|>system") == 2


def test_what_the_system_says_later_is_not_lost() -> None:
    chat = [SYSTEM, USER, DEVELOPER, USER]
    there = ours(IM_BLOCKS).render(chat)
    assert there.index("developer") > there.index("user\nuser")
    at_once = [SYSTEM, DEVELOPER, USER, USER]
    assert ours(HARMONY).render(chat) == ours(HARMONY).render(at_once)
    assert ours(HARMONY).render([USER, SYSTEM]) == ours(HARMONY).render([SYSTEM, USER])
    with pytest.raises(UnprocessableError, match="late"):
        ours(REFUSES_SECOND).render(chat)


def test_no_part_is_lost_but_for_the_user_s_of_whom_templates_expect_several() -> None:
    """In the manner of Mistral Small 3.1's template, and of GLM 4.5's for what tools say."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    roles = ("system", "user", "assistant", "tool")
    said = ours(EITHER).render([{"role": role, "content": parts} for role in roles])
    assert said == "<one\ntwo><onetwo><one\ntwo><one\ntwo>"


@pytest.mark.parametrize(
    "read",
    [
        "{% for item in message.content %}{{ item.text }}{% endfor %}",
        "{% set c = message.content %}{% for item in c %}{{ item.text }}{% endfor %}",
        "{% for item in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ item['text'] | trim }}{% endfor %}",
        "{{ message.content | map(attribute='text') | join }}"
        "{% if message.name is string %}!{% endif %}",
    ],
)
def test_a_template_of_parts_alone_gets_a_string_as_one(
    oracle: PreTrainedTokenizerFast, read: str
) -> None:
    """It would find no parts in it, and leave the message empty."""
    source = "{% for message in messages %}<" + read + ">{% endfor %}"
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Well"}]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
    expected = oracle.apply_chat_template(parts, chat_template=source, tokenize=False)
    assert expected == "<Why?><Well>"
    assert ours(source).render(chat) == ours(source).render(parts) == expected
    going_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert ours(source).render(chat, going_on) == "<Why?><Well"


def test_what_a_caller_of_tools_says_and_thinks_where_a_template_has_one_place_for_both(
    oracle: PreTrainedTokenizerFast,
) -> None:
    """As gpt-oss's, which refuses what its own answers are sent back as."""
    asks, calls, hears = TOOL_CHAT
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"reasoning_content": "Hm."}, "Hm."),
        ({"reasoning_content": "Hm.", "content": "I look."}, "Hm.\n\nI look."),
        (
            {"reasoning_content": "Hm.", "content": [{"type": "text", "text": "I look."}]},
            "Hm.\n\nI look.",
        ),
        ({"content": "I look."}, "I look."),
        ({}, None),
    ]
    for fields, thinking in cases:
        expected = oracle.apply_chat_template(
            [asks, {**calls, "thinking": thinking}, hears],
            tools=TOOLS,
            chat_template=HARMONY,
            add_generation_prompt=True,
            tokenize=False,
        )
        chat = [asks, {**calls, **fields}, hears]
        assert ours(HARMONY).render(chat, ChatOptions(tools=TOOLS)) == expected


@pytest.mark.parametrize("described", [{}, {"description": None}])
def test_a_tool_without_a_description_has_an_empty_one_where_a_template_adds_it(
    described: dict[str, Any],
) -> None:
    """OpenAI leaves it out; other templates are told of none."""
    quiet = [{"type": "function", "function": {"name": "f", **described}}]
    empty = [{"type": "function", "function": {"name": "f", "description": ""}}]
    said = [ours(HARMONY).render(CHATS["one"], ChatOptions(tools=one)) for one in (quiet, empty)]
    assert said[0] == said[1]
    assert "// \ntype f = " in said[0]
    assert json.dumps(quiet[0]) in ours(IM_BLOCKS).render(CHATS["one"], ChatOptions(tools=quiet))


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_what_the_template_would_ignore_is_refused(name: str) -> None:
    options = ChatOptions(**{name: [{"type": "function"}]})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        ours("{{ messages[0].content }}").render(CHATS["one"], options)
    assert caught.value.field == name


EFFORT = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif -%}
{{ reasoning_effort }}: {{ messages[0].content }}"""


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        (ChatOptions(), "medium"),
        (ChatOptions(reasoning_effort="low"), "low"),
        (ChatOptions(template_kwargs={"reasoning_effort": "low"}), "low"),
        (ChatOptions(reasoning_effort="max", template_kwargs={"reasoning_effort": "low"}), "max"),
    ],
)
def test_an_effort_is_the_template_s_own_unless_it_is_said(
    options: ChatOptions, effort: str
) -> None:
    words = CHATS["one"][0]["content"]
    assert ours(EFFORT).render(CHATS["one"], options) == f"{effort}: {words}"


def test_an_effort_that_no_template_reads_is_refused() -> None:
    with pytest.raises(RequestError, match="has no place for it") as caught:
        ours(TURNS).render(CHATS["one"], ChatOptions(reasoning_effort="low"))
    assert caught.value.field == "reasoning_effort"


def test_named_templates_choose_the_one_for_tools() -> None:
    sources = {"default": "plain", "tool_use": "with tools{{ tools and '' }}"}
    template = ChatTemplate(sources, SPECIAL, "here")
    assert template.render(CHATS["one"]) == "plain"
    assert template.render(CHATS["one"], ChatOptions(tools=TOOLS)) == "with tools"
    only = ChatTemplate({"rag": "x"}, SPECIAL, "here")
    with pytest.raises(RequestError, match="no default chat template, only rag"):
        only.render(CHATS["one"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[5].content }}", "undefined|no element"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_words(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        ours(source).render(CHATS["one"])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("chat", "options", "field"),
    [
        ([], ChatOptions(), "messages"),
        (CHATS["one"], ChatOptions(continue_final_message=True), "continue_final_message"),
        (
            [{"role": "assistant", "content": None}],
            ChatOptions(add_generation_prompt=False, continue_final_message=True),
            "continue_final_message",
        ),
    ],
)
def test_bad_requests_name_their_field(chat: list[Any], options: ChatOptions, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        ours(IM_BLOCKS).render(chat, options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"]
)
def test_a_variable_that_has_a_field_of_its_own_is_refused(name: str) -> None:
    """It would be ignored. What this template never reads is not refused: others do."""
    unread = ChatOptions(template_kwargs={"enable_wings": True})
    assert ours(IM_BLOCKS).render(CHATS["one"], unread) == ours(IM_BLOCKS).render(CHATS["one"])
    with pytest.raises(RequestError, match=name) as caught:
        ours(IM_BLOCKS).render(CHATS["one"], ChatOptions(template_kwargs={name: None}))
    assert caught.value.field == "chat_template_kwargs"


def test_rendering_leaves_the_messages_as_they_were() -> None:
    chat = json.loads(json.dumps(TOOL_CHAT))
    chat[1]["tool_calls"][0]["function"]["arguments"] = "{}"
    before = json.dumps(chat)
    ours(IM_BLOCKS).render(chat)
    assert json.dumps(chat) == before


def test_template_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "from config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered(tmp_path) == "from config"
    named = [{"name": "default", "template": "named"}, {"name": "rag", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered(tmp_path) == "named"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert rendered(tmp_path) == "from file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools | length }} tools"
    )
    assert rendered(tmp_path, ChatOptions(tools=TOOLS)) == f"{len(TOOLS)} tools"


@pytest.mark.parametrize(
    ("sent", "seen"),
    [('{"at": 1}', {"at": 1}), ('{"at": "a\nb"}', {"at": "a\nb"}), ('{"at": ', '{"at": ')],
)
def test_arguments_of_calls_are_as_the_model_wrote_them(sent: str, seen: Any) -> None:
    call = {"function": {"name": "f", "arguments": sent}}
    template = ours("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    said = template.render([{"role": "assistant", "tool_calls": [call]}], ChatOptions())
    assert json.loads(said) == seen


def test_arguments_that_a_template_adds_to_texts_are_texts() -> None:
    """In the manner of DeepSeek's, all of which do. Those that ask what they are get objects."""
    call = {"function": {"name": "f", "arguments": '{"at": 1}'}}
    chat = [{"role": "assistant", "tool_calls": [call]}]
    each = "{% for call in messages[0]['tool_calls'] %}{% set f = call['function'] %}"
    added = each + "{{ f['name'] + '|' + f['arguments'] + '|' }}{% endfor %}"
    assert ours(added).render(chat) == 'f|{"at": 1}|'
    by_content = "{% if messages[0]['content'] is none %}" + added + "{% endif %}"
    assert ours(by_content).render(chat) == 'f|{"at": 1}|'
    asked = each + "{{ f.arguments + '' if f.arguments is string else 'object' }}{% endfor %}"
    assert ours(asked).render(chat) == "object"


def rendered(folder: Path, options: ChatOptions | None = None) -> str:
    template = ChatTemplate.from_folder(folder, SPECIAL)
    assert template is not None
    return template.render(CHATS["one"], options)


def test_no_template_is_none_and_a_broken_one_names_its_file(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path, SPECIAL) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "x"}]}')
    with pytest.raises(ModelError, match="tokenizer_config.json: chat_template must be"):
        ChatTemplate.from_folder(tmp_path, SPECIAL)
    deep = "{% for a in messages %}" * 25 + "{% endfor %}" * 25
    long = ["{{ " + text * 5000 + "1 }}" for text in ("not ", "9")]
    for broken in ("{% if %}", "{% break %}", deep, *long):
        (tmp_path / "chat_template.jinja").write_text(broken)
        with pytest.raises(ModelError, match="template.jinja: chat template 'default' is broken"):
            ChatTemplate.from_folder(tmp_path, SPECIAL)
