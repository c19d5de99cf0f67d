"""A tiny model, and an agent's episodes with it, in this process."""

import contextlib
from pathlib import Path
from unittest import mock

import tiny_run
from qerl.config import AgentConfig, ModelConfig, TaskConfig
from qerl.engine import PagedEngine
from qerl.serve.agents.rollout import AgentPool
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.types import GenerateRequest, Prompt, Sampling

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def load_tiny(folder: Path, *, max_positions: int = 2048) -> LoadedModel:
    tiny_run.write_model(folder, max_positions=max_positions)
    (folder / "chat_template.jinja").write_text(CHATML)
    return load_model(str(folder), None, ModelConfig(path=str(folder), dtype="fp32"), with_adapter=True)


@contextlib.contextmanager
def playing(model: LoadedModel, agent, *, task: TaskConfig | None = None, **settings):
    """play(*rows, ...) -> the groups of the rows; play.take_metrics(). The agent's process ends with the
    block."""
    with AgentPool(agent, AgentConfig(**settings), task or TaskConfig()) as pool:
        engine = pool.engine(model.engine)

        def play(*rows, num_samples=2, max_tokens=8, seed=3, step=0, **sampling):
            prompts_P = [
                Prompt(index=i, text="", tokens_T=[1], messages=row.get("prompt"), columns=row)
                for i, row in enumerate(rows)
            ]
            request = GenerateRequest(
                prompts_P,
                num_samples=num_samples,
                sampling=Sampling(max_tokens=max_tokens, **sampling),
                seed=seed,
                step=step,
            )
            return engine.generate(request)

        play.take_metrics = engine.take_metrics
        yield play


@contextlib.contextmanager
def noting_samples():
    """A list that gets (tokens, logprobs) of each sample that an engine ends."""
    sampled, to_sample = [], PagedEngine._to_sample

    def note(self, s, stopping):
        sampled.append((list(s.tokens_T), list(s.logprobs_T)))
        return to_sample(self, s, stopping)

    with mock.patch.object(PagedEngine, "_to_sample", note):
        yield sampled


def turns_of(part):
    """[(prompt tokens, sampled tokens, logprobs)] of each turn of a recorded sample."""
    (s,) = part.samples_G
    edges = [0, *(edge for span in s.environment_spans for edge in (span.start, span.stop)), len(s.tokens_T)]
    turns, left = [], list(s.logprobs_T)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        count = stop - start
        turns.append((part.prompt.tokens_T + s.tokens_T[:start], s.tokens_T[start:stop], left[:count]))
        left = left[count:]
    assert not left
    return turns
