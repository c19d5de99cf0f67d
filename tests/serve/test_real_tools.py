"""lm-eval-harness, inspect-ai and verifiers against a real server; a test skips where its tool is missing.

The tools run in processes of their own, without a network: tasks and tokenizer are local files.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve import parts

LM_EVAL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
url, tokenizer, folder = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={"model": "tiny", "base_url": url + "/completions", "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface", "num_concurrent": 2},
    tasks=["echoed", "chosen"], task_manager=TaskManager(include_path=folder), log_samples=True,
    bootstrap_iters=0,
)
samples = {name: [s["filtered_resps"] for s in rows] for name, rows in results["samples"].items()}
print("RESULT", json.dumps({"results": results["results"], "samples": samples}, default=str))
"""
LM_EVAL_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
output_type: {kind}
{more}
"""
INSPECT = """
import json, sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, tool

@tool
def paint():
    async def execute(is_wet: bool) -> str:
        '''Paint.

        Args:
            is_wet: Wet or dry.
        '''
        return f"painted {is_wet}"
    return execute

url, folder = sys.argv[1:]
model = get_model("openai/tiny", base_url=url, api_key="none", responses_api=False)
config = GenerateConfig(max_tokens=12, temperature=0.0, seed=1)
plain = Task(dataset=[Sample(input="hello", target="x"), Sample(input="bye", target="y")], solver=generate(),
             scorer=includes(), config=config)
called = Task(dataset=[Sample(input="go", target="x")], config=GenerateConfig(max_tokens=200, seed=1),
              solver=[use_tools(paint(), tool_choice=ToolFunction("paint")), generate(tool_calls="single")])
logs = eval([plain, called], model=model, log_dir=folder, display="none")
print("RESULT", json.dumps({
    "status": [log.status for log in logs], "errors": [str(log.error) for log in logs],
    "texts": [s.output.completion for s in logs[0].samples],
    "roles": [m.role for m in logs[1].samples[0].messages], "last": logs[1].samples[0].messages[-1].text,
}))
"""

VERIFIERS = """
import httpx
import verifiers.v1 as vf


class GreetTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def has_reply(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class GreetTaskset(vf.Taskset[GreetTask, vf.TasksetConfig]):
    def load(self) -> list[GreetTask]:
        return [GreetTask(vf.TaskData(idx=i, prompt=f"say {i}"), self.config.task) for i in range(3)]


class GreetHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=120) as http:
            reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        reply.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout=reply.text, stderr="")


__all__ = ["GreetHarness", "GreetTaskset"]
"""
VERIFIERS_EVAL = """
import json, pathlib, sys
from verifiers.v1.cli.eval.main import main
url, folder = sys.argv[1:]
sys.path.insert(0, folder)
main(["greet", "--env.agent.harness.id", "greet", "--env.agent.runtime.type", "subprocess", "--no-push",
      "--model", "tiny", "--client.base-url", url, "--client.api-key-var", "OPENAI_API_KEY",
      "--sampling.max-tokens", "12", "--sampling.temperature", "0.7"])
(traces,) = pathlib.Path("outputs").glob("*/traces.jsonl")
print("RESULT", json.dumps([json.loads(line) for line in traces.read_text().splitlines()]))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address, the model, its folder)"""
    folder = tmp_path_factory.mktemp("model")
    model = parts.load_tiny(folder, template=parts.TOOLS_TEMPLATE)
    app, _ = parts.app_of(model, max_prompt_tokens=400, max_body_bytes=20_000)
    with parts.serving(app) as address:
        yield address, model, folder


def result_of(package, script, *arguments, cwd=None):
    """Run the script, which prints a line RESULT and JSON, if the package is installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=280, cwd=cwd
    )
    assert ran.returncode == 0, ran.stderr[-3000:] + ran.stdout[-1000:]
    return json.loads(ran.stdout.rpartition("RESULT ")[2])


def write_lm_eval_tasks(folder: Path) -> None:
    rows = [
        {"question": f"{i} and {i + 1}", "choices": ["yes", "no, never"], "gold": i % 2} for i in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generation = (
        'doc_to_target: "{{question}}"\ngeneration_kwargs: {until: [done], max_gen_toks: 9}\n'
        "metric_list: [{metric: exact_match}]"
    )
    choice = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\nmetric_list: [{metric: acc}]'
    kinds = {"echoed": ("generate_until", generation), "chosen": ("multiple_choice", choice)}
    for name, (kind, more) in kinds.items():
        text = LM_EVAL_TASK.format(name=name, rows=folder / "rows.jsonl", kind=kind, more=more)
        (folder / f"{name}.yaml").write_text(text)


def test_lm_eval_generates_and_scores_choices(served, tmp_path):
    """Its likelihoods of the choices are the server's own logprobs of their tokens."""
    address, model, folder = served
    write_lm_eval_tasks(tmp_path)
    found = result_of("lm_eval", LM_EVAL, address, folder, tmp_path)
    assert found["results"]["chosen"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
    assert found["results"]["echoed"]["exact_match,none"] == 0
    assert all(len(texts) == 1 and isinstance(texts[0], str) for texts in found["samples"]["echoed"])
    for i, choices in enumerate(found["samples"]["chosen"]):
        for text, (logprob, is_greedy) in zip((" yes", " no, never"), choices, strict=True):
            context, whole = (
                model.engine.tokenizer(t)["input_ids"] for t in (f"{i} and {i + 1}", f"{i} and {i + 1}{text}")
            )
            logprobs_TV = parts.logits_of(model, whole).log_softmax(-1)[len(context) - 1 : -1]
            ids = whole[len(context) :]
            truth = sum(logprobs_TV[t, token].item() for t, token in enumerate(ids))
            assert float(logprob) == pytest.approx(truth, abs=1e-3)
            assert is_greedy in (False, "False") or logprobs_TV.argmax(-1).tolist() == ids


def test_inspect_generates_and_calls_a_tool(served, tmp_path):
    found = result_of("inspect_ai", INSPECT, served[0], tmp_path)
    assert found["status"] == ["success", "success"], found["errors"]
    assert all(found["texts"]) and found["roles"] == ["user", "assistant", "tool"]
    assert found["last"] in ("painted True", "painted False")


def test_verifiers_evaluates_a_taskset(served, tmp_path):
    (tmp_path / "greet.py").write_text(VERIFIERS)
    traces = result_of("verifiers", VERIFIERS_EVAL, served[0], tmp_path, cwd=tmp_path)
    assert [trace["ok"] for trace in traces] == [True] * 3, traces[0]["errors"]
    assert all(0 < trace["num_output_tokens"] <= 12 for trace in traces)
