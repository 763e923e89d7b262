"""What a step needs of a GPU's memory beside weights and cache, by the shapes of the largest."""

from engine.models.interface import ModelDescription
from kv_cache.layout import KvGroup

# cuBLAS's workspaces, code that is loaded when it is first called, the nodes of recorded graphs,
# attention's parts, and what torch's allocator cannot use of pieces that other steps had: no
# shapes, a guess until it is measured on a card
FIXED_BYTES = 512 << 20
# for each logit, where requests with a grammar ask for logprobs; 38 were counted on a CPU
SAMPLING_BYTES = 40
# rows of logits at a time where every token of a prompt needs them: 128 rows of a vocabulary
# of 128k are 67 MB in fp32
PROMPT_LOGPROB_ROWS = 128


def step_bytes(model: ModelDescription, itemsize: int, num_tokens: int, num_seqs: int) -> int:
    """Of the most tokens and sequences in a step; recorded steps keep memory of their own."""
    activations = (num_tokens + num_seqs) * row_elements(model) * itemsize
    logits = max(num_seqs, min(num_tokens, PROMPT_LOGPROB_ROWS)) * model.vocab_size
    return FIXED_BYTES + activations + logits * (itemsize + SAMPLING_BYTES)


def row_elements(model: ModelDescription) -> int:
    """Activations of a token at the fullest place of a layer: residual, what came in and its norm,
    and beside them gate, up and their product, or queries, keys and values before and queries
    after their rotation."""
    attention = max(_attention(model, group) for group in model.groups)
    fullest = 3 * model.hidden_size + max(3 * model.mlp_size, attention)
    # transformers' own layers norm in fp32 and activate in several passes
    return fullest if model.native else 2 * fullest


def _attention(model: ModelDescription, group: KvGroup) -> int:
    return 2 * model.num_heads * group.widths[0] + group.num_kv_heads * sum(group.widths)
