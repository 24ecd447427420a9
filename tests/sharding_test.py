import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from emapg_jax import optim, sharding
from emapg_jax.models import critic
from emapg_jax.train_step import init_state
from tests import tiny


@pytest.mark.parametrize(
  ("spec", "sizes"),
  [("data:-1", (8, 1, 1)), ("data:2,fsdp:-1", (2, 4, 1)), ("tensor:2,data:4", (4, 1, 2)), ("data:2,fsdp:2,tensor:2", (2, 2, 2))],
)
def test_mesh(spec, sizes):
  mesh = sharding.make_mesh(spec)
  assert tuple(mesh.shape[axis] for axis in sharding.AXES) == sizes
  assert sharding.batch_devices(mesh) == sizes[0] * sizes[1]


@pytest.mark.parametrize(
  ("spec", "text"),
  [
    ("dta:8", "not understood at 'dta:8'"),
    ("data:0", "not understood at 'data:0'"),
    ("data:2,data:4", "not understood at 'data:4'"),
    ("data", "not understood at 'data'"),
    ("data:-1,fsdp:-1", "leaves data and fsdp open"),
    ("data:3", "does not fit 8 devices"),
    ("data:3,fsdp:-1", "does not fit 8 devices"),
  ],
)
def test_bad_mesh(spec, text):
  with pytest.raises(ValueError, match=text):
    sharding.make_mesh(spec)


def test_anchor_and_moments_lie_like_their_parameters():
  mesh = sharding.make_mesh("data:2,fsdp:2,tensor:2")
  abstract = jax.eval_shape(lambda: init_state(tiny.params(), optim.make_optimizer(1e-3), True))
  shardings = sharding.tree_shardings(mesh, abstract)
  assert shardings.params["layers"]["attn"]["q"]["kernel"].spec == P(None, "fsdp", "tensor", None)
  assert shardings.params == shardings.ema_params
  moments = [s for s in jax.tree.leaves(shardings.opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)) if hasattr(s, "mu")]
  assert moments[0].mu == moments[0].nu == shardings.params
  assert shardings.step.spec == P()


def test_critic_and_its_moments_lie_like_the_policy():
  mesh = sharding.make_mesh("data:2,fsdp:2,tensor:2")
  optimizer = optim.with_critic(optim.make_optimizer(1e-3), optim.make_optimizer(1e-2, mu_dtype="bfloat16"))

  def init():
    policy = tiny.params()
    policy["lm_head"] = {"kernel": jnp.zeros((16, 16))}
    params = {"policy": policy, "value": critic.init_critic(policy)}
    return params, optimizer.init(params)

  params, opt_state = shardings = sharding.tree_shardings(mesh, jax.eval_shape(init))
  decoder = {name: tree for name, tree in params["policy"].items() if name != "lm_head"}
  assert params["value"]["decoder"] == decoder
  # The critic's head is not the policy's, which is split both ways.
  assert params["policy"]["lm_head"]["kernel"].spec == P("fsdp", "tensor")
  assert params["value"]["head"]["kernel"].spec == P("fsdp", None)
  assert params["value"]["head"]["bias"].spec == P()
  for part in ("policy", "value"):
    (adam,) = (
      x for x in jax.tree.leaves(opt_state.inner_states[part], is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)) if hasattr(x, "mu")
    )
    other = {"policy": "value", "value": "policy"}[part]
    assert adam.mu == adam.nu == {part: params[part], other: optax.MaskedNode()}

  params, opt_state = jax.jit(init, out_shardings=shardings)()
  grads = jax.tree.map(jnp.ones_like, params)
  updates, after = jax.jit(optimizer.update, out_shardings=(shardings[0], shardings[1]))(grads, opt_state, params)
  for leaf, sharding_ in zip(jax.tree.leaves((updates, after)), jax.tree.leaves(shardings), strict=True):
    assert leaf.sharding.is_equivalent_to(sharding_, leaf.ndim)


def test_unknown_leaf_and_dimension_that_does_not_divide():
  mesh = sharding.make_mesh("data:1,fsdp:8")
  with pytest.raises(ValueError, match=r"No sharding is given for layers/attn/z/kernel of shape \(2, 3\)"):
    sharding.tree_shardings(mesh, {"layers": {"attn": {"z": {"kernel": jnp.zeros((2, 3))}}}})
  with pytest.raises(ValueError, match=r"No sharding is given for old_head/kernel"):  # a pattern begins where a key begins
    sharding.tree_shardings(mesh, {"old_head": {"kernel": jnp.zeros((16, 1))}})
  with pytest.raises(ValueError, match=r"embed/embedding of shape \(16, 12\) .* 12 is not a multiple of 8"):
    sharding.tree_shardings(mesh, {"embed": {"embedding": jnp.zeros((16, 12))}})
