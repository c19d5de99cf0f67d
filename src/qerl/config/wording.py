"""What task.name gsm8k, and the set of that name, ask for after each problem."""

GSM8K_REQUEST = (
    "Solve the math problem above step by step. Put the reasoning inside <think></think> tags, then only the"
    " final number inside <answer></answer> tags: <think> reasoning </think><answer> number </answer>."
)
