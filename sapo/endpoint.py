"""A model behind an OpenAI-compatible server (POST {url}/chat/completions), as a `Completer`."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3

from sapo.agents import Completion, Request
from sapo.engine.sampling import Sampling, trajectory_key
from sapo.protocol import neutralise

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

_TRANSIENT_STATUS = {408, 409, 429, 500, 502, 503, 504}
_EXCERPT_CHARS = 300
_jitter = random.SystemRandom()


class EndpointError(RuntimeError):
    """The server cannot be used; the message names its URL, what it said and the fix."""


class Endpoint:
    """Chat completions over HTTP, several at a time.

    url: base URL up to the version, as http://127.0.0.1:8000/v1. key: sent as a bearer token. Refused connections,
    timeouts and the statuses 408, 409, 429, 500, 502, 503 and 504 are tried `attempts` times with growing pauses; a
    Retry-After of the server counts, up to LONGEST_PAUSE_S. A stop text that the server cut off is put back.
    """

    def __init__(
        self,
        url: str,
        model: str,
        sampling: Sampling,
        *,
        max_tokens: int,
        seed: int = 0,
        key: str | None = None,
        timeout_s: float = 600.0,
        attempts: int = 6,
        concurrency: int = 16,
    ) -> None:
        if sampling.top_k or sampling.min_p:
            raise ValueError(
                "an OpenAI-compatible server takes temperature and top_p only: set rollout.top_k, min_p to 0"
            )
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        if not self.url.startswith(("http://", "https://")):
            raise EndpointError(f"--endpoint {url}: write the base URL with http:// or https://, up to /v1")
        self.model = model
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.seed = seed
        self.timeout_s = timeout_s
        self.attempts = attempts
        self.concurrency = concurrency
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pool = urllib3.PoolManager(maxsize=concurrency, headers=headers, retries=False)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return a completion for each request. Raises EndpointError when the server does not give one."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            futures = [threads.submit(self._one, request) for request in requests]
            try:
                return [future.result() for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def clean(self, text: str) -> str:
        return neutralise(text, None)

    def _one(self, request: Request) -> Completion:
        body = {
            "model": self.model,
            "messages": list(request.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "stop": list(request.stop),
            "seed": trajectory_key(self.seed, request.call, request.question_id, request.sample) % 2**31,
        }
        answer = self._post(body)
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            text, finish = choice["message"].get("content") or "", choice.get("finish_reason")
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise EndpointError(
                f"{self.url}: not an answer of /chat/completions: {json.dumps(answer)[:_EXCERPT_CHARS]}"
            ) from None
        if finish == "length":
            return Completion(text, "length", *counts)
        restored = restore_stop(text, request.stop)
        return Completion(restored, "stop" if any(stop in restored for stop in request.stop) else "eos", *counts)

    def _post(self, body: dict[str, Any]) -> Any:
        problem = ""
        for attempt in range(self.attempts):
            pause = 0.0
            try:
                response = self._pool.request("POST", self.url, body=json.dumps(body).encode(), timeout=self.timeout_s)
            except urllib3.exceptions.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                excerpt = response.data[:_EXCERPT_CHARS].decode("utf-8", "replace")
                if response.status == 200:
                    try:
                        return json.loads(response.data)
                    except ValueError:
                        raise EndpointError(f"{self.url}: the answer is not JSON: {excerpt!r}") from None
                problem = f"status {response.status}: {excerpt!r}"
                if response.status not in _TRANSIENT_STATUS:
                    hint = "; give the key in the variable that --api-key-env names" if response.status == 401 else ""
                    raise EndpointError(f"{self.url}, model {self.model!r}: {problem}{hint}")
                pause = _seconds(response.headers.get("Retry-After"))
            if attempt + 1 < self.attempts:
                grown = FIRST_PAUSE_S * 2**attempt * _jitter.uniform(0.5, 1)
                time.sleep(min(LONGEST_PAUSE_S, max(pause, grown)))
        raise EndpointError(
            f"{self.url}, model {self.model!r}: no answer in {self.attempts} attempts, the last: {problem}; what is "
            "done is kept, and the same command goes on from there"
        )


def restore_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` with the closing tag that servers cut off: that of the tag that was opened last and not closed.

    >>> restore_stop("<think> x </think><search> capital of France ", ("</search>", "</answer>"))
    '<think> x </think><search> capital of France </search>'
    """
    if any(stop in text for stop in stops):
        return text
    opened = [(text.rfind(stop.replace("</", "<")), stop) for stop in stops if stop.startswith("</")]
    start, stop = max(opened, default=(-1, ""))
    return text + stop if start >= 0 else text


def _seconds(retry_after: str | None) -> float:
    try:
        value = float(retry_after or 0)
    except ValueError:  # a date
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0
