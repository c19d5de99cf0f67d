"""{"name": ..., "parameters": {...}} as the whole answer or after <|python_tag|>: Llama 3."""

from qerl.tasks.call_forms.form import CallForm, json_reader

LLAMA3 = CallForm(
    name="llama3",
    markers=("<|python_tag|>", '"parameters": '),
    opens=("<|python_tag|>",),
    read=json_reader(()),
    controls=("<|python_tag|>",),
    is_bare=True,
)
