"""The policy model: load it, and score tokens without ever holding a [B, T, V] tensor of logits.

Dims: `B` responses, `T` tokens, `N` sampled tokens, `V` vocabulary, `H` hidden.
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

# Config fields of models that change their logits after the output head, which `Policy` does not reproduce.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


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
    """log-softmax and entropy of chosen tokens from hidden states, over chunks of tokens.

    Only [N] results are kept; the backward pass computes the logits of a chunk again. The logits are upcast to float32
    (float64 stays), weight gradients are summed over chunks in that type too.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_tokens, with_entropy):
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=precise)  # [N]
        entropy = torch.zeros_like(logprobs)  # [N]
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[rows], weight, bias).to(precise).div_(temperature)  # [n, V]
            # float32 log_softmax on CPU is off by 5e-6 on average at a vocabulary of 150,000; logsumexp is not
            log_z = logits.logsumexp(1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_z
            if with_entropy:
                logits -= log_z[:, None]
                entropy[rows] = -(logits.exp() * logits).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.set_materialize_grads(False)  # an entropy without a bonus costs nothing in the backward pass
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        precise = entropy.dtype
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)  # [N]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=precise)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        for start in range(0, len(targets), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            logits = F.linear(hidden[rows], weight, bias).to(precise).div_(ctx.temperature)  # [n, V]
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            if grad_entropy is None:
                grad_logits = logits.softmax(1).mul_(-grad_logprobs[rows, None])
            else:
                all_logprobs = logits.log_softmax(1)
                scale = grad_logprobs[rows, None] + grad_entropy[rows, None] * (all_logprobs + entropy[rows, None])
                grad_logits = all_logprobs.exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad_logits.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[rows]
        grad_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None


class Policy(nn.Module):
    """A causal language model seen as a scorer of sampled tokens.

    `model` is the Hugging Face model (save it, generate with it). `forward` runs its submodules, so wrappers that hook
    on forward (DDP, DeepSpeed) work when they wrap this module.
    """

    def __init__(self, model: PreTrainedModel, head_chunk_tokens: int = 1024) -> None:
        """head_chunk_tokens: tokens whose logits exist at one time; head_chunk_tokens x V x 4 bytes in float32."""
        super().__init__()
        self.model = model
        self.head_chunk_tokens = head_chunk_tokens

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropy), both [B, T] nats of softmax(logits / temperature); 0 where the mask is 0.

        input_ids: [B, T] int64, right-padded with any valid id. loss_mask: [B, T], 1 = sampled; entry 0 must be 0.
        logprobs[b, t] is that of token t given the tokens before it; entropy[b, t] that of the distribution it was
        drawn from, all 0 unless `with_entropy`. float32, or float64 for a float64 model. No attention mask is needed:
        attention is causal and all padding is on the right, so positions count real tokens.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, H]
        index = loss_mask.flatten().nonzero()[:, 0]  # [N] places of the sampled tokens in [B * T]
        hidden = hidden.flatten(0, 1).index_select(0, index - 1)  # [N, H] a token is predicted from the place before it
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            scored = TokenLogprobs.apply(
                hidden, weight, bias, input_ids.flatten()[index], temperature, self.head_chunk_tokens, with_entropy
            )  # two of [N]
        return tuple(x.new_zeros(input_ids.numel()).index_copy(0, index, x).view_as(input_ids) for x in scored)
