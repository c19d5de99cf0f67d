"""An agent with nothing but the openai client: it asks for a sum, says higher or lower, and asks once more.

qerl train demo_long --agent examples/agent_openai.py:agent --out runs/agent
"""

import re


async def agent(client, row):
    """Return 1 for a right answer, 1/2 for one after the hint, else 0."""
    messages, right = list(row["prompt"]), int(row["answer"])
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        message = answer.choices[0].message
        numbers = re.findall(r"-?\d+", message.content)
        if numbers and int(numbers[-1]) == right:
            return {"reward": reward, "hints": 1.0 if reward < 1 else 0.0}
        hint = "higher" if numbers and int(numbers[-1]) < right else "lower"
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": f"The answer is {hint}. Answer with just the number."},
        ]
    return {"reward": 0.0, "hints": 1.0}
