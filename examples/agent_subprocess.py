"""A program of its own that has OPENAI_BASE_URL, OPENAI_API_KEY and no package: it asks over plain HTTP.

Any command in any language can stand in its place.

pip install 'qerl[serve]'
qerl train demo_long --agent examples/agent_subprocess.py:agent --out runs/subprocess
"""

import json
import os
import re
import subprocess
import sys
import urllib.request


def agent(base_url, api_key, row):
    """Return 1 if the last number that the program prints is right, 1/4 if it is another one, else 0."""
    done = subprocess.run(
        [sys.executable, __file__, row["prompt"][-1]["content"]],
        env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    numbers = re.findall(r"-?\d+", done.stdout)
    is_right = bool(numbers) and numbers[-1] == row["answer"]
    return {"reward": 1.0 if is_right else 0.25 * bool(numbers), "right": is_right}


def main(question):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": [{"role": "user", "content": question}]}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as reply:
        print(json.load(reply)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main(sys.argv[1])
