"""The critic of PPO, as in InstructGPT: a decoder of its own, begun as a copy of the policy's, with a value head in place of the logits.

Parameters are {"decoder": the policy's tree without `lm_head`, "head": {"kernel": [D, 1], "bias": [1]}}, B sequences of S tokens, model
width D. Nothing is shared with the policy, so that value updates can't damage it (Stiennon et al., "Learning to summarize from human
feedback", arXiv 2009.01325; Ouyang et al., "Training language models to follow instructions with human feedback", arXiv 2203.02155).
"""

import jax
import jax.numpy as jnp

from emapg_jax.models import decoder
from emapg_jax.sharding import ANYWHERE, Activations
from emapg_jax.types import PyTree


def init_critic(policy_params: PyTree) -> PyTree:
  """The critic before its first update: a copy of the policy's decoder and a head of zeros, in the policy's parameter dtype.

  It shares no buffer with the policy, traced or not, so that both can be donated. Zero head: every value is exactly 0 at first, and the
  first gradient reaches the head alone, since none passes through a kernel of zeros; from the second on the decoder learns too.
  """
  # Deviation: the critics of both papers begin as the reward model; a reward computed by a rule has none.
  embedding = policy_params["embed"]["embedding"]
  dtype = embedding.dtype
  return {
    "decoder": {name: jax.tree.map(lambda p: jnp.array(p, copy=True), tree) for name, tree in policy_params.items() if name != "lm_head"},
    "head": {"kernel": jnp.zeros((embedding.shape[1], 1), dtype), "bias": jnp.zeros((1,), dtype)},
  }


def apply_critic(config: decoder.DecoderConfig, params: PyTree, tokens: jax.Array, placed: Activations = ANYWHERE) -> jax.Array:
  """The value at each position, once its token has been read: what is still to come, given tokens[:, : s + 1].

    value = hidden · kernel + bias

  Value: float32 whatever `config.dtype` is. The value BEFORE response token t is the one at the position before it.
  Gradient: into the head and the decoder; `lm_head` is never read, so that a tied and an untied policy have the same critic.

  Args:
    config: the policy's.
    params: as `init_critic` makes them.
    tokens: int32 [B, S], right-padded.
    placed: how activations lie on devices.

  Returns:
    float32 [B, S].
  """
  hidden = decoder.apply(config, params["decoder"], tokens, placed).astype(jnp.float32)
  kernel, bias = (params["head"][name].astype(jnp.float32) for name in ("kernel", "bias"))
  # Without the precision a GPU would round both factors to TF32.
  value = jnp.einsum("bsd,do->bso", hidden, kernel, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
  return value[..., 0] + bias[0]
