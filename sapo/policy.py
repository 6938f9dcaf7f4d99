"""The policy model: load it, and score tokens without ever holding a [B, T, V] tensor of logits.

Dims: `B` responses, `T` tokens, `N` sampled tokens, `V` vocabulary, `c` a chunk of it, `H` hidden.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from sapo.packing import pack_rows, use_packed_attention

# Config fields of models that change their logits after the output head, which `Policy` does not reproduce.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")

HEAD_CHUNK_LOGITS = 1 << 22  # 16 MB, near the cache: 2^21 to 2^23 take the same time within 8 %, more take longer


def changed_logits(config: PreTrainedConfig) -> list[str]:
    """Return the fields of a model's config by which it changes its logits after the output head."""
    text = config.get_text_config()
    return [name for name in LOGIT_CHANGES if getattr(text, name, None) not in (None, 1, 1.0)]


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder or hub name exactly as it was saved.

    `AutoTokenizer` goes by the type of the model where the folder names no class of its own: around a vocabulary
    trained for a small Qwen2 model it would build Qwen2's splitting rules. Such a folder is read from tokenizer.json.
    Raises ValueError where there is no tokenizer_config.json; OSError, from transformers, for other missing files.
    """
    settings = get_tokenizer_config(path)
    if not settings:
        raise ValueError(f"no tokenizer at {path}: tokenizer_config.json is missing; save it beside the model")
    generic = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(path)


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a Hugging Face folder or hub name.

    Dropout is switched off: a token must have the same log-probability in the old_logprobs pass and in the updates. A
    tokenizer without a pad token pads with its eos token; masks go by length, so the id never matters.
    Raises ValueError for a folder that is not a saved model or has no tokenizer, a tokenizer with neither pad nor eos
    token, one with more tokens than the model has embeddings, and a model that changes its logits after the head.
    """
    local = Path(path).expanduser()
    if local.exists() or str(path).startswith((".", "/", "~")):
        path = local
        if not (path / "config.json").is_file():
            raise ValueError(f"no model at {path}: config.json is missing; give a folder written by save_pretrained")
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = load_tokenizer(path)
    except OSError as error:
        raise ValueError(
            f"cannot load a model and its tokenizer from {str(path)!r}: it is neither a complete local folder nor a "
            f"hub name that can be reached from here; give an existing folder ({str(error).splitlines()[0]})"
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {path} has neither a pad nor an eos token: set one of them in its "
                "tokenizer_config.json; generation ends with eos and rows are padded with pad"
            )
        tokenizer.pad_token = tokenizer.eos_token
    changed = changed_logits(config)
    if changed:
        raise ValueError(
            f"the model {path} changes its logits after the output head ({', '.join(changed)} in config.json), which "
            "is not supported: its log-probabilities would be wrong"
        )
    embedded = config.get_text_config().vocab_size
    if len(tokenizer) > embedded:
        raise ValueError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the model embeds {embedded}: resize the embeddings "
            "or use the model's own tokenizer"
        )
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attn_implementation
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, tokenizer


class TokenLogprobs(torch.autograd.Function):
    """log-softmax and entropy of chosen tokens from hidden states, over chunks of the vocabulary.

    hidden [N, H], weight [V, H] and bias [V] or None, of any types; targets [N] int64. Products are made in `dtype`;
    logits, sums over chunks and results are float32 (float64 where `dtype` is), gradients have the types of their
    inputs. At most `chunk_logits` logits exist at one time, or N. The backward pass computes them again from what the
    forward keeps, [N] each. Chunks are of the vocabulary, not of the tokens, so that each row of the weight is read,
    and its gradient written, once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, dtype, chunk_logits, with_entropy):
        inputs = hidden.to(dtype)
        chunks = _vocabulary_chunks(weight, targets, chunk_logits)
        chosen = hidden.new_zeros(len(targets), dtype=torch.promote_types(dtype, torch.float32))  # [N]
        # Of the softmax of each chunk, [chunks, N]. Made before the loop: small results that stay, between large ones
        # that go, would fragment the heap to a multiple of what is alive.
        log_zs, entropies = chosen.new_zeros(2, len(chunks), len(targets))
        for number, chunk in enumerate(chunks):
            logits = _chunk_logits(inputs, weight, bias, chunk, temperature)  # [N, c]
            inside, index = _places_in(chunk, targets)
            chosen = torch.where(inside, logits.gather(1, index[:, None])[:, 0], chosen)
            # float32 log_softmax on CPU is off by 5e-6 on average at a vocabulary of 150,000; logsumexp is not
            log_zs[number] = logits.logsumexp(1)
            if with_entropy:
                logits -= log_zs[number, :, None]
                entropies[number] = -torch.linalg.vecdot(logits.exp(), logits)
        log_z = log_zs.logsumexp(0)
        entropy = torch.zeros_like(log_z)
        if with_entropy:  # of which chunk it is, and the mean of those within
            log_shares = log_zs - log_z
            entropy = (log_shares.exp() * (entropies - log_shares)).sum(0)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.set_materialize_grads(False)  # an entropy without a bonus costs nothing in the backward pass
        ctx.settings = temperature, dtype, chunk_logits
        return chosen - log_z, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        temperature, dtype, chunk_logits = ctx.settings
        wanted = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype) if wanted[0] else None
        grad_weight = torch.empty_like(weight) if wanted[1] else None
        grad_bias = torch.empty_like(bias) if wanted[2] else None
        inputs = hidden.to(dtype)
        # with respect to logits / temperature, which the chain rule divides once more
        by_logprob = torch.zeros_like(log_z) if grad_logprobs is None else grad_logprobs / temperature  # [N]
        by_entropy = None if grad_entropy is None else grad_entropy / temperature  # [N]
        for chunk in _vocabulary_chunks(weight, targets, chunk_logits):
            logprobs = _chunk_logits(inputs, weight, bias, chunk, temperature).sub_(log_z[:, None])  # [N, c]
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            if by_entropy is None:
                grad_logits = logprobs.exp_().mul_(-by_logprob[:, None])
            else:
                scale = logprobs.mul(-by_entropy[:, None]).sub_((by_logprob + by_entropy * entropy)[:, None])
                grad_logits = logprobs.exp_().mul_(scale)
                del scale
            inside, index = _places_in(chunk, targets)
            grad_logits.scatter_add_(1, index[:, None], torch.where(inside, by_logprob, 0)[:, None])
            if grad_bias is not None:
                grad_bias[chunk] = grad_logits.sum(0)
            grad_logits = grad_logits.to(dtype)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight[chunk].to(dtype)
            if grad_weight is not None:
                grad_weight[chunk] = grad_logits.T @ inputs
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _vocabulary_chunks(weight: Tensor, targets: Tensor, chunk_logits: int) -> list[slice]:
    size = max(1, chunk_logits // max(len(targets), 1))
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


def _chunk_logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, chunk: slice, temperature: float) -> Tensor:
    """Return the logits [N, c] of a chunk of the vocabulary, divided by the temperature, float32 or wider."""
    logits = F.linear(inputs, weight[chunk].to(inputs.dtype), None if bias is None else bias[chunk].to(inputs.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _places_in(chunk: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return bool [N], which targets lie in the chunk, and [N] their places in it (any place for the others)."""
    index = targets - chunk.start
    last = chunk.stop - chunk.start - 1
    return (index >= 0) & (index <= last), index.clamp(0, last)


class Policy(nn.Module):
    """A causal language model seen as a scorer of sampled tokens.

    `model` is the Hugging Face model (save it, generate with it). `forward` runs its submodules, so wrappers that hook
    on forward (DDP, DeepSpeed) work when they wrap this module.
    """

    def __init__(
        self, model: PreTrainedModel, *, packed: bool = False, head_chunk_logits: int | None = None
    ) -> None:
        """packed: forward rows without padding, and what they begin with in common once (see `sapo/packing.py`).

        It gives the model another attention, for good. head_chunk_logits: logits that exist at one time, 4 bytes each;
        None: `HEAD_CHUNK_LOGITS` on a CPU and 16 times as many elsewhere.
        """
        super().__init__()
        self.model = model
        self.packed = packed
        self.head_chunk_logits = head_chunk_logits
        if packed:
            use_packed_attention(model)

    @property
    def attention_cost(self) -> float:
        """Cost of attention for a row of L tokens over that of the other layers, divided by L.

        A dense layer has about 12 H^2 weights, 2 FLOPs each; attention over L / 2 keys on average costs 2 H L FLOPs.
        """
        return 1 / (12 * self.model.config.get_text_config().hidden_size)

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropy), both [B, T] nats of softmax(logits / temperature); 0 where the mask is 0.

        input_ids: [B, T] int64, right-padded with any valid id. loss_mask: [B, T], 1 = sampled; entry 0 must be 0.
        logprobs[b, t] is that of token t given the tokens before it; entropy[b, t] that of the distribution it was
        drawn from, all 0 unless `with_entropy`. float32, or float64 for a float64 model. No attention mask is needed:
        attention is causal and all padding is on the right, so positions count real tokens.
        """
        index = loss_mask.flatten().nonzero()[:, 0]  # [N] places of the sampled tokens in [B * T]
        if self.packed:
            layout = pack_rows(input_ids, loss_mask)
            hidden = self.model.base_model(
                input_ids=input_ids.flatten()[layout.tokens][None],
                position_ids=layout.positions[None],
                use_cache=False,
                packed_rows=layout.rows,
            ).last_hidden_state[0]  # [tokens, H]
            before = layout.before  # [N]
        else:
            hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
            before = index - 1  # [N] a token is predicted from the place before it
        hidden = hidden.index_select(0, before)  # [N, H]
        head = self.model.get_output_embeddings()
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            scored = TokenLogprobs.apply(
                hidden,
                head.weight,
                getattr(head, "bias", None),
                input_ids.flatten()[index],
                temperature,
                dtype,
                self.head_chunk_logits or HEAD_CHUNK_LOGITS * (1 if hidden.device.type == "cpu" else 16),
                with_entropy,
            )  # two of [N]
        return tuple(x.new_zeros(input_ids.numel()).index_copy(0, index, x).view_as(input_ids) for x in scored)
