"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4."""

from qerl.tasks.call_forms.form import CallForm, json_reader

HERMES = CallForm(
    name="hermes",
    markers=("<tool_call>",),
    opens=("<tool_call>",),
    read=json_reader(("</tool_call>",)),
    controls=("<tool_call>", "</tool_call>"),
    is_bare=True,
)
