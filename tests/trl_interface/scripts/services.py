"""Stand-ins for the servers behind environments: a game of words, a board, a road, a page."""

import threading
from types import SimpleNamespace

OPEN_URLS = set()


class Server:
    """Takes one connection at a time, as a small hosted space does."""

    def __init__(self, base_url, **options):
        if base_url in OPEN_URLS:
            raise ConnectionError(f"{base_url}: in use")
        OPEN_URLS.add(base_url)
        self.base_url, self.turns = base_url, 0


class Words(Server):
    def reset(self):
        self.turns, self.said = 0, "Guess a word of five letters.\n"
        return self._result(0.0)

    def step(self, message):
        self.turns += 1
        self.said += f"{message} XXGXX\n"
        return self._result(0.2)

    def _result(self, reward):
        message = SimpleNamespace(content=self.said, category="MESSAGE")
        return SimpleNamespace(
            observation=SimpleNamespace(messages=[message]), reward=reward, done=self.turns > 2
        )


class Ball(Server):
    def reset(self):
        self.turns, self.at = 0, 2
        return self._result(0.0)

    def step(self, action):
        self.turns += 1
        self.at += action - 1
        return self._result(1.0 if self.at == 2 else -1.0)

    def _result(self, reward):
        state = [float(i in (self.turns * 5 + 2, 45 + self.at)) for i in range(50)]
        done = self.turns > 3
        return SimpleNamespace(observation=SimpleNamespace(info_state=state, done=done), reward=reward)


class Road(Server):
    """Its methods are coroutines, which an environment runs in a loop of its own."""

    async def reset(self, scenario_name):
        self.turns = 0
        return self._result()

    async def step(self, action, direction=None):
        self.turns += 1
        return self._result()

    def _result(self):
        seen = SimpleNamespace(speed_kmh=10.0 * self.turns, nearby_actors=[{"type": "person", "distance": 9}])
        return SimpleNamespace(observation=seen, reward=0.1 * self.turns, done=self.turns > 20)


class Page:
    def __init__(self, base_url):
        self.lock = threading.Lock()

    def sync(self):
        return self

    def reset(self, task_name):
        return self._result(0.0, False)

    def step(self, action):
        with self.lock:
            return self._result(1.0, True)

    def _result(self, reward, done):
        seen = SimpleNamespace(
            goal="Click.", axtree_txt="[13] button 'Click Me!'", error="", last_action_error=False
        )
        return SimpleNamespace(observation=seen, reward=reward, done=done)
