"""Choose the form of tool calls by the text of the chat template."""

from typing import Any

from qerl.tasks.call_forms.deepseek import DEEPSEEK
from qerl.tasks.call_forms.form import CallForm
from qerl.tasks.call_forms.gemma import FUNCTION_GEMMA, GEMMA4
from qerl.tasks.call_forms.glm import GLM4, GLM45
from qerl.tasks.call_forms.harmony import HARMONY
from qerl.tasks.call_forms.hermes import HERMES
from qerl.tasks.call_forms.lists import GRANITE, PHI4
from qerl.tasks.call_forms.llama import LLAMA3
from qerl.tasks.call_forms.mistral import MISTRAL
from qerl.tasks.call_forms.olmo import OLMO3
from qerl.tasks.call_forms.qwen_xml import QWEN_XML

FORMS = (
    *(QWEN_XML, GLM45, HARMONY, MISTRAL, PHI4, GRANITE, DEEPSEEK, GEMMA4, FUNCTION_GEMMA, OLMO3),
    *(HERMES, LLAMA3, GLM4),
)
"""In the order in which their markers are looked for: those that only one form has come first."""


def template_text(chat_template: Any) -> str:
    """Return the text of a template; of several by name, that named tool_use, or else all."""
    if isinstance(chat_template, dict):
        chat_template = chat_template.get("tool_use") or "".join(map(str, chat_template.values()))
    return chat_template if isinstance(chat_template, str) else ""


def form_of(chat_template: Any, name: str = "auto") -> CallForm:
    """Return the form with this name; auto: the form that the template shows, Hermes if it shows none."""
    text = template_text(chat_template)
    if name != "auto":
        return next(form for form in FORMS if form.name == name)
    return next((form for form in FORMS if any(marker in text for marker in form.markers)), HERMES)
