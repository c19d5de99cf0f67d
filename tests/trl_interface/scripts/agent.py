"""A tool over SQLite, with rewards that read the conversation."""

import sqlite3

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


def query(sql: str) -> list:
    """
    Run a read-only query.

    Args:
        sql: The SQL command.

    Returns:
        The rows.
    """
    connection = sqlite3.connect("file:genes.db?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def asks(completions, **kwargs):
    return [float(any(turn.get("tool_calls") for turn in turns)) for turns in completions]


def ends(completions, answer, **kwargs):
    return [
        0.5 * (a.lower() in turns[-1]["content"].lower())
        for turns, a in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    with sqlite3.connect("genes.db") as connection:
        connection.execute("create table if not exists interactions (a text, b text)")
    dataset = load_dataset("genes/questions", split="train")
    dataset = dataset.filter(lambda row: row["question"].startswith("Does"))
    dataset = dataset.map(
        lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns=["question"]
    )
    training_args.chat_template_kwargs = {"enable_thinking": False}
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        train_dataset=dataset,
        eval_dataset=None,
        tools=[query],
        reward_funcs=[asks, ends],
        args=training_args,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
