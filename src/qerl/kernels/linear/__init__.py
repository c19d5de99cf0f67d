"""The linears of the learner: 16 bits, FP8 and INT8, each with its adapter."""
