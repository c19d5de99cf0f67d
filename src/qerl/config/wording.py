"""The request that follows each GSM8K problem, in training and in evaluation."""

GSM8K_REQUEST = (
    "Solve the math problem above step by step. Put the reasoning inside <think></think> tags, then only the"
    " final number inside <answer></answer> tags: <think> reasoning </think><answer> number </answer>."
)
