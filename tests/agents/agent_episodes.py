"""A tiny model, and an agent's episodes with it, in this process."""

import contextlib
from pathlib import Path

import tiny_run
from qerl.config import AgentConfig, ModelConfig, TaskConfig
from qerl.serve.agents.rollout import AgentPool
from qerl.serve.loaded_model import LoadedModel, load_model
from qerl.types import Prompt, Sampling

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
def playing(model: LoadedModel, agent, **settings):
    """play(*rows, ...) -> the groups of the rows; the agent's process ends with the block."""
    with AgentPool(agent, AgentConfig(**settings), TaskConfig()) as pool:
        engine = pool.engine(
            model.engine, max_positions=model.max_positions, stop_tokens=model.engine.stop_token_ids
        )

        def play(*rows, num_samples=2, max_tokens=8, seed=3, step=0, **sampling):
            prompts_P = [
                Prompt(index=i, text="", tokens_T=[1], messages=row.get("prompt"), columns=row)
                for i, row in enumerate(rows)
            ]
            return engine.generate(
                prompts_P,
                num_samples=num_samples,
                sampling=Sampling(max_tokens=max_tokens, **sampling),
                seed=seed,
                step=step,
            )

        yield play
