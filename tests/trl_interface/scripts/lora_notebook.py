"""A model object and a processing class, callbacks, several rewards with weights."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Watch(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(logs["reward"])


name = "Qwen/Qwen3-0.6B"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa")
dataset = load_dataset("trl-lib/tldr", split="train")


def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


async def letters(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


watch = Watch()
args = GRPOConfig(
    output_dir="lora", max_steps=3, max_completion_length=8, reward_weights=[0.1, 1.0], logging_steps=1
)
args.learning_rate = 1e-4
trainer = GRPOTrainer(
    model=model,
    reward_funcs=[short, letters],
    args=args,
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    callbacks=[watch],
)
trainer.train()
assert len(watch.seen) == 3
trainer.save_model("lora/final")
