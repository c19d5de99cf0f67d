"""A graph of langgraph: the model answers, a node checks the answer, and one hint leads back to the model.

pip install 'qerl[serve]' openai langgraph langchain-openai
qerl train demo_long --agent examples/agent_langgraph.py:agent --out runs/langgraph
"""

import re

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


class Sum(MessagesState):
    right: int
    reward: float
    hints: int


def check(state):
    numbers = re.findall(r"-?\d+", state["messages"][-1].text)
    if numbers and int(numbers[-1]) == state["right"]:
        return {"reward": 1.0 / (1 + state["hints"])}
    hint = "higher" if numbers and int(numbers[-1]) < state["right"] else "lower"
    text = f"The answer is {hint}. Answer with just the number."
    return {"messages": [{"role": "user", "content": text}], "hints": state["hints"] + 1}


async def agent(base_url, api_key, model, row):
    """Return 1 for a right answer, 1/2 for one after the hint, else 0."""
    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, max_retries=0)

    async def answer(state):
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(Sum)
    graph.add_node("answer", answer)
    graph.add_node("check", check)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", "check")
    graph.add_conditional_edges(
        "check", lambda state: END if state["reward"] or state["hints"] > 1 else "answer"
    )
    start = {"messages": list(row["prompt"]), "right": int(row["answer"]), "reward": 0.0, "hints": 0}
    end = await graph.compile().ainvoke(start)
    return {"reward": end["reward"], "hints": min(end["hints"], 1)}
