"""A call that a chat template writes is read back, whole and in pieces of any length."""

import json
import random

import jinja2
import pytest

from qerl.serve.tools import ToolCallStream
from qerl.tasks.call_forms.choice import FORMS, form_of
from qerl.tasks.call_forms.hermes import HERMES

CALLS = [
    ("add", {"a": 1, "b": [True, None, {"c": "}"}]}),
    ("say", {"text": 'it\'s "so"\n</tool_call> é', "count": "7"}),
]
SCHEMAS = {"add": {}, "say": {"properties": {"text": {"type": "string"}, "count": {"type": "string"}}}}
OBJECT = '{"name": {{ n | tojson }}, "arguments": {{ a | tojson }}}'
VALUE = "{{ v if v is string else v | tojson }}"
EACH, END = "{% for n, a in calls %}", "{% endfor %}"
ARGUMENTS = "{% for k, v in a.items() %}"
COMMA = "{{ ', ' if not loop.last }}"


def gemma(open, quote, close):
    """The macro of Gemma's own template, in which an argument's keys are sorted."""
    comma = "{{ ',' if not loop.last }}"
    value = (
        "{% macro value(v) %}{% if v is string %}Q{{ v }}Q"
        "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
        "{% elif v is mapping %}{ {%- for k, w in v | dictsort %}{{ k }}:{{ value(w) }}"
        f"{comma}{END}}}"
        f"{{% elif v is sequence %}}[{{% for w in v %}}{{{{ value(w) }}}}{comma}{END}]"
        "{% else %}{{ v }}{% endif %}{% endmacro %}"
    )
    return f"{value}{EACH}{open}call:{{{{ n }}}}{{{{ value(a) }}}}{close}{END}".replace("Q", quote)


TEMPLATES = {
    "hermes": f"{EACH}<tool_call>\n{OBJECT}\n</tool_call>\n{END}",
    "qwen_xml": f"{EACH}<tool_call>\n<function={{{{ n }}}}>\n{ARGUMENTS}<parameter={{{{ k }}}}>\n{VALUE}\n"
    f"</parameter>\n{END}</function>\n</tool_call>\n{END}",
    "glm45": f"{EACH}<tool_call>{{{{ n }}}}\n{ARGUMENTS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}"
    f"</arg_value>\n{END}</tool_call>\n{END}",
    "glm4": f"{{# [gMASK] #}}{EACH}{{{{ n }}}}\n{{{{ a | tojson }}}}\n{END}",
    "mistral": f"[TOOL_CALLS][{EACH}{OBJECT}{COMMA}{END}]",
    "mistral by name": f"{EACH}[TOOL_CALLS]{{{{ n }}}}[ARGS]{{{{ a | tojson }}}}{END}",
    "granite": f"<|tool_call|>[{EACH}{OBJECT}{COMMA}{END}]",
    "phi4": f"<|tool_call|>[{EACH}{OBJECT}{COMMA}{END}]<|/tool_call|>",
    "llama3": f"{EACH}<|python_tag|>{OBJECT.replace('arguments', 'parameters')}{END}",
    "harmony": f"{EACH}<|start|>assistant<|channel|>commentary to=functions.{{{{ n }}}} <|constrain|>json"
    f"<|message|>{{{{ a | tojson }}}}{END}",
    "deepseek": f"{EACH}{{{{ '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}}}<｜tool▁call▁begin｜>"
    f"function<｜tool▁sep｜>{{{{ n }}}}\n```json\n{{{{ a | tojson }}}}\n```<｜tool▁call▁end｜>"
    f"{END}<｜tool▁calls▁end｜>",
    "deepseek v3.1": f"<｜tool▁calls▁begin｜>{EACH}<｜tool▁call▁begin｜>{{{{ n }}}}<｜tool▁sep｜>"
    f"{{{{ a | tojson }}}}<｜tool▁call▁end｜>{END}<｜tool▁calls▁end｜>",
    "gemma4": gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "olmo3": f"<function_calls>{EACH}{{{{ n }}}}({ARGUMENTS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{END})"
    f"{{{{ '\\n' if not loop.last }}}}{END}</function_calls>",
}


def written(name):
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATES[name]).render(calls=CALLS)


def parsed(form, pieces):
    stream, text, found = ToolCallStream(SCHEMAS, is_parallel=True, form=form), "", []
    for out, calls in [*map(stream.add, pieces), stream.end()]:
        text, found = text + out, found + calls
    return text, [(call.name, call.arguments, call.id) for call in found], stream.num_malformed


def pieces_of(text, rng):
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(12, len(text)))))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def splits_of(text, num_random, rng):
    """Its characters, its halves at each place, and random pieces."""
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text)))
    yield from (pieces_of(text, rng) for _ in range(num_random))


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_template_writes_are_read_back(name):
    form = form_of(TEMPLATES[name])
    assert form.name == name.split()[0]
    text, calls, num_malformed = parsed(form, [written(name)])
    assert (text, num_malformed) == ("", 0)
    sort = form.name in ("gemma4", "function_gemma")
    assert [(each, arguments) for each, arguments, _ in calls] == [
        (each, json.dumps(dict(sorted(a.items())) if sort else a, ensure_ascii=False)) for each, a in CALLS
    ]
    if form.name == "mistral":
        assert all(len(call_id) == 9 and call_id.isalnum() for *_, call_id in calls)


def differing_pieces(name, num_random):
    """The first pieces of a text with calls that give something else than the whole."""
    rng, form, calls = random.Random(name), form_of(TEMPLATES[name]), written(name)
    texts = (calls, f"Let me see.\n{calls}\n\n done", calls[: len(calls) * 2 // 3], f" {calls[3:]}{calls}")
    for text in texts:
        whole = parsed(form, [text])
        for pieces in splits_of(text, num_random, rng):
            if parsed(form, pieces) != whole:
                return pieces


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_cut_and_random_splits_give_what_the_whole_gives(name):
    assert differing_pieces(name, num_random=250) is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_malformed_call_is_text_and_is_counted(form):
    for open in form.opens:
        text = f'see {open}{{"name": "other" &'
        assert parsed(form, [text]) == (text, [], 1)


def test_calls_without_the_tokens_that_detokenizing_drops():
    for name in ("mistral", "mistral by name", "granite", "phi4", "llama3", "harmony"):
        text = written(name)
        for token in ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>"):
            text = text.replace(token, "")
        for token in ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"):
            text = text.replace(token, "")
        rest, calls, _ = parsed(form_of(TEMPLATES[name]), [text])
        assert (rest, [each for each, *_ in calls]) == ("", ["add", "say"]), name


def test_template_without_a_form_is_that_of_described_tools():
    assert form_of(None) is form_of("{{ messages }}") is HERMES
    assert form_of({"default": "", "tool_use": "[TOOL_CALLS]"}).name == "mistral"
