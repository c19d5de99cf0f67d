"""From a config to what samples: the model with its adapter, the engine around it, and the task's prompts."""

import torch

from qerl.config import RunConfig
from qerl.engine.engine import Engine
from qerl.model.adapter import add_adapter
from qerl.model.decoder import Decoder
from qerl.model.device import COMPUTE
from qerl.model.load import load_decoder
from qerl.model.names import architecture_of
from qerl.model.source import locate
from qerl.model.tokenizer import load_tokenizer, stop_token_ids
from qerl.tasks import Task, build_task


def policy_of(config: RunConfig) -> tuple[Decoder, Engine, Task]:
    """config.model has no `auto` left. The task comes first: its mistakes show before weights are read."""
    model = config.model
    source = locate(model.path)
    max_prompt_tokens = architecture_of(source.open()).max_positions - config.sample.max_tokens
    tokenizer = load_tokenizer(model.path)
    task = build_task(config.task, tokenizer, seed=config.seed, max_prompt_tokens=max_prompt_tokens)
    decoder = load_decoder(
        model.path,
        format=model.format,
        compute=COMPUTE[model.compute],
        device=torch.device(model.device),
        resident=model.operand == "resident",
        head=model.head,
    )
    add_adapter(decoder, config.adapter, seed=config.seed)
    engine = Engine(decoder, tokenizer, config.engine, stop_token_ids=stop_token_ids(tokenizer, source))
    return decoder, engine, task
