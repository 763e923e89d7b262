"""A chat template in the manner of gpt-oss's: what it writes, leaves out and refuses."""

HARMONY = """\
{{- "<|start|>system<|message|>You are a model.\\nReasoning: " }}
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}
{{- reasoning_effort + "\\n\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- set told = namespace(developer="", skip=0, called=none) %}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set told.developer = messages[0].content %}
    {%- set told.skip = 1 %}
{%- endif %}
{%- if told.developer or tools %}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + told.developer }}
    {%- if tools %}{{- "\\n\\n# Tools\\n\\nnamespace functions {\\n\\n" }}{% endif %}
    {%- for tool in tools or [] %}
        {{- "// " + tool.function.description + "\\ntype " + tool.function.name + " = (_: " }}
        {{- (tool.function.parameters or {}).properties | default({}) | tojson }}
        {{- ") => any;\\n\\n" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- for message in messages[told.skip:] %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking with tool calls!") }}
        {%- endif %}
        {%- if message.content or message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
        {{- "<|message|>" }}{{- call.arguments | tojson }}{{- "<|call|>" }}
        {%- set told.called = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
    {%- elif message.role == "tool" %}
        {%- if told.called is none %}{{- raise_exception("no call before it") }}{% endif %}
        {{- "<|start|>functions." + told.called + " to=assistant<|channel|>commentary" }}
        {{- "<|message|>" }}{{- message.content | tojson }}{{- "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}
"""
