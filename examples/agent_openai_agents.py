"""Agents of openai-agents: the first hands off to one of two others, and the adder of these calls a tool.

pip install 'qerl[serve]' openai-agents
qerl train demo_long --agent examples/agent_openai_agents.py:agent --sample.max-tokens 40 --out runs/agents
"""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
MUST_CALL = ModelSettings(tool_choice="required")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent(client, row):
    """Return 1 for the right sum, 1/4 for a hand-off to the adder, else 0."""
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    poet = Agent(name="poet", instructions="Write a verse.", model=model)
    adder = Agent(
        name="adder",
        instructions="Add the numbers of the question.",
        tools=[add],
        tool_use_behavior="stop_on_first_tool",
        model=model,
        model_settings=MUST_CALL,
    )
    first = Agent(
        name="first",
        instructions="Hand off.",
        handoffs=[poet, adder],
        model=model,
        model_settings=MUST_CALL,
    )
    result = await Runner.run(first, row["prompt"][-1]["content"])
    is_adder = result.last_agent is adder
    is_right = is_adder and str(result.final_output) == row["answer"]
    return {"reward": 1.0 if is_right else 0.25 * is_adder, "handed_off": is_adder, "right": is_right}
