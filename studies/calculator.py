"""Agents of three frameworks that solve sums with a calculator: openai-agents, langgraph, pydantic-ai.

    reward = (is_valid + is_right) / 2
    is_valid   1 if the framework took a call of the tool from the model, ran it, and it gave a number
    is_right   1 if the last number of the final answer is right

No call is forced and no grammar restricts the model: its text is a call, or it is not. After a result the
tool is offered no more, else the model that the study trains calls again instead of answering. What a
framework raises because of the model, such as a call of an unknown tool, ends the episode without a final
answer.

pip install 'qerl[serve]' openai-agents langgraph langchain-openai 'pydantic-ai-slim[openai]'
"""

import ast
import operator
import re
from contextlib import suppress
from typing import Any

INSTRUCTIONS = (
    "Call the calculator once with the whole expression. Then answer with just the number that it gave."
)
MAX_ANSWERS = 3
"""Answers of the model in an episode."""
_MAX_CHARACTERS = 200
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """The tool of one episode, and how often it gave a number."""

    def __init__(self) -> None:
        self.num_results = 0

    def calculate(self, expression: str) -> str:
        """Return the value of an arithmetic expression of integers with +, - and *."""
        try:
            result = evaluate(expression)
        except ValueError as error:
            return f"Error: {error}"
        self.num_results += 1
        return str(result)

    def score(self, final_answer: str, row: dict[str, Any]) -> dict[str, float]:
        numbers = re.findall(r"-?\d+", final_answer.replace(",", ""))
        is_valid, is_right = self.num_results > 0, numbers[-1:] == [row["answer"]]
        return {"reward": (is_valid + is_right) / 2, "is_valid": is_valid, "is_right": is_right}


def evaluate(expression: str) -> int:
    """Return the value of a sum; raise ValueError for any other text."""
    try:
        if len(expression) > _MAX_CHARACTERS:
            raise ValueError
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, KeyError):
        raise ValueError(f"{expression[:40]!r} is no expression of integers, +, - and *") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


async def with_openai_agents(client, row):
    from agents import (
        Agent,
        AgentsException,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    calculator, final_answer = Calculator(), ""
    agent = Agent(
        name="calculator",
        instructions=INSTRUCTIONS,
        tools=[function_tool(calculator.calculate, is_enabled=lambda *_: not calculator.num_results)],
        model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
    )
    with suppress(AgentsException):
        result = await Runner.run(agent, row["prompt"][-1]["content"], max_turns=MAX_ANSWERS)
        final_answer = str(result.final_output)
    return calculator.score(final_answer, row)


async def with_langgraph(base_url, api_key, model, row):
    from langchain_openai import ChatOpenAI
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

    # Clients that ChatOpenAI makes load certificates twice, 0.17 s in the event loop, and stay open.
    loopback = {"verify": False, "trust_env": False}
    with DefaultHttpxClient(**loopback) as unused:
        async with DefaultAsyncHttpxClient(**loopback) as client:
            chat = ChatOpenAI(
                base_url=base_url,
                api_key=api_key,
                model=model,
                max_retries=0,
                http_client=unused,
                http_async_client=client,
            )
            return await _with_chat(chat, row)


async def _with_chat(chat, row):
    from langchain_core.tools import tool
    from langgraph.errors import GraphRecursionError
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    calculator, final_answer = Calculator(), ""
    tools = [tool(calculator.calculate)]
    with_tools = chat.bind_tools(tools)

    async def answer(state):
        messages = [("system", INSTRUCTIONS), *state["messages"]]
        return {"messages": [await (chat if calculator.num_results else with_tools).ainvoke(messages)]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    start = {"messages": [("user", row["prompt"][-1]["content"])]}
    with suppress(GraphRecursionError):
        end = await graph.compile().ainvoke(start, {"recursion_limit": 2 * MAX_ANSWERS})
        final_answer = end["messages"][-1].text
    return calculator.score(final_answer, row)


async def with_pydantic_ai(client, row):
    from pydantic_ai import Agent, Tool, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    calculator, final_answer = Calculator(), ""

    async def offered(context, tool):
        return None if calculator.num_results else tool

    agent = Agent(
        OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)),
        instructions=INSTRUCTIONS,
        tools=[Tool(calculator.calculate, prepare=offered)],
    )
    limits = UsageLimits(request_limit=MAX_ANSWERS)
    with suppress(UnexpectedModelBehavior, UsageLimitExceeded):
        final_answer = (await agent.run(row["prompt"][-1]["content"], usage_limits=limits)).output
    return calculator.score(final_answer, row)
