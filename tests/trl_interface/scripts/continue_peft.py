"""A PeftModel that goes on learning, two evaluation sets by name, arguments of the script's own parser."""

import argparse

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def spaces(prompts, completions, completion_ids, **kwargs):
    counts = [float(completion.count(" ")) for completion in completions]
    return [-count / len(ids) for count, ids in zip(counts, completion_ids, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="Qwen/Qwen3-1.7B")
    parser.add_argument("--num-generations", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model_id)
    tokenizer.pad_token = tokenizer.eos_token
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.model_id), LoraConfig(r=4))
    rows = load_dataset("trl-lib/tldr", split="train")
    config = GRPOConfig(
        output_dir="continued",
        num_generations=args.num_generations,
        max_steps=args.steps,
        max_completion_length=8,
        temperature=0.8,
        top_k=10,
        top_p=None,
        generation_kwargs={"min_p": 0.01},
    )
    config.run_name = "continued-run"
    config.project = "mine"
    trainer = GRPOTrainer(model, spaces, config, rows, processing_class=tokenizer)
    trainer.train()
    print(trainer.evaluate({"first": rows.select(range(2)), "rest": rows.select(range(2, 5))}))
    trainer.save_model("continued/final")
    tokenizer.save_pretrained("continued/final")


if __name__ == "__main__":
    main()
