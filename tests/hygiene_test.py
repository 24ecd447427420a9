"""Rules about the code itself: imports point one way, files and functions stay small, public things are documented."""

import ast
import pathlib
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "emapg_jax").rglob("*.py"))
CODE = LIBRARY + sorted((ROOT / "experiments").rglob("*.py"))

# A module may import from its own layer and from later ones.
LAYERS = (
  {
    "rollout",
    "train_step",
    "score_step",
    "step_config",
    "micro_batches",
    "envs",
    "checkpoint",
    "checkpoint_files",
    "stored_tree",
    "config",
    "config_rules",
    "metrics",
  },
  {
    "losses",
    "token_stats",
    "sharded_token_stats",
    "anchor",
    "advantages",
    "credit",
    "optim",
    "models",
    "sharding",
    "distributed",
    "streams",
    "data",
    "presets",
  },
  {"kl", "topk_kl", "masking", "types"},
)


def imports(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name):
  return next((i for i, names in enumerate(LAYERS) if name in names), None)


def relative(path):
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in LIBRARY if p.name != "__init__.py"], ids=relative)
def test_imports_point_one_way(path):
  own = path.relative_to(ROOT / "emapg_jax").parts[0].removesuffix(".py")
  assert layer(own) is not None, f"{own} belongs to no layer"
  for name in imports(path):
    parts = name.split(".")
    assert parts[0] not in ("experiments", "tests", "absl"), f"{name} is for experiments only"
    if name.startswith("flax.linen"):
      assert own == "models"
    if parts[0] == "emapg_jax" and len(parts) > 1:
      assert layer(parts[1]) is not None and layer(parts[1]) >= layer(own), f"{own} imports {parts[1]}"


def size(node):
  documented = ast.get_docstring(node) is not None
  return node.end_lineno - node.lineno + 1 - (node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0)


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_small_and_documented(path):
  text = path.read_text()
  assert len(text.splitlines()) <= 400
  tree = ast.parse(text)
  assert path.name == "__init__.py" or ast.get_docstring(tree), "a module says what it is"
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      public = not node.name.startswith("_") and node in tree.body
      assert not public or ast.get_docstring(node), f"{node.name} is public and has no docstring"
    if isinstance(node, ast.FunctionDef):
      assert size(node) <= 60, f"{node.name} has {size(node)} lines"


def test_the_library_needs_no_more_than_the_requirements_install():
  def names(lines):
    return {line.split(";")[0].strip() for line in lines if line.strip() and not line.startswith("#")}

  required = names((ROOT / "requirements.txt").read_text().splitlines())
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert names(project["dependencies"]) <= required
  assert names(project["optional-dependencies"]["run"]) <= required
