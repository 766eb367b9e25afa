"""Generation: lengths, ends, keys, the window, the cache, and the tokens of transformers."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from golden_models import GOLDEN, load_golden, load_model

from shardtrain.models import huggingface
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.generate import generate
from shardtrain.models.sampling import Sampling

CONFIG = DecoderConfig(vocab=16, seq=12, embed=8, num_layers=1, num_heads=2)
KEY = jax.random.key(0)
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=2.0, top_k=9, top_p=0.9)
PROMPTS = [[1, 4, 1, 4], [2], [2, 7]]


def lists(found):
    return [tokens.tolist() for tokens in found]


@pytest.fixture(scope="module")
def model(pure):
    return jax.tree_util.Partial(pure(CONFIG).apply, pure(CONFIG).params)


@pytest.mark.parametrize(
    "sampling", [GREEDY, pytest.param(DRAWN, marks=pytest.mark.full)], ids=["greedy", "drawn"]
)
def test_with_a_cache_the_tokens_are_those_without_one(model, sampling):
    with_cache, without, by_two = (
        lists(generate(model, PROMPTS, 8, KEY, seq=12, sampling=sampling, cached=cached, rows=rows))
        for cached, rows in ((True, None), (False, None), (True, 2))
    )
    assert with_cache == without == by_two
    assert [len(row) for row in with_cache] == [8, 8, 8]
    assert len({token for row in with_cache for token in row}) > 2


# the logits of the others are compared in test_parity.py; these have windows, experts and what is left there
QUICK = ("gemma", "gemma3", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen3")
FAMILIES = sorted(path.stem for path in (GOLDEN / "generated").glob("*.npz"))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in FAMILIES]
)
def test_tokens_are_those_of_transformers(family, pure):
    """Three prompts at once; transformers continued each alone."""
    config, params = huggingface.from_huggingface(*load_model(family))
    file = load_golden(f"generated/{family}")
    prompts, expected = ([file[f"{name}{n}"].tolist() for n in (1, 3, 6)] for name in ("prompt", "tokens"))
    apply = jax.tree_util.Partial(pure(config).apply, params)
    found = lists(generate(apply, prompts, 6, KEY, seq=config.seq, sampling=GREEDY, cached=True))
    assert found == [row[len(prompt) :][:6] for prompt, row in zip(prompts, expected, strict=True)]


def count_on(tokens):
    """The next token is the last plus the first that the model sees."""
    return jax.nn.one_hot((tokens + tokens[:, :1]) % 10, 10)


def test_without_a_cache_a_full_window_moves_on_by_one():
    expected = []
    for prompt in ([1, 2], [3]):
        tokens = list(prompt)
        for _ in range(8):
            tokens.append((tokens[-1] + tokens[-3:][0]) % 10)
        expected.append(tokens[len(prompt) :])
    assert lists(generate(count_on, [[1, 2], [3]], 8, KEY, seq=3, sampling=GREEDY)) == expected


def test_a_row_ends_with_its_token():
    def follow(tokens):
        return jax.nn.one_hot((tokens + 1) % 10, 10)

    found = generate(follow, [[3], [8], [5]], 4, KEY, seq=4, sampling=GREEDY, end=[9, 6])
    assert lists(found) == [[4, 5, 6], [9], [6]]
    # all rows are finished by their first token
    assert lists(generate(follow, [[8]], 4, KEY, seq=4, sampling=GREEDY, end=[9])) == [[9]]


def test_the_key_decides_and_rows_do_not_depend_on_each_other(model):
    options = {"seq": 12, "sampling": DRAWN, "cached": True}
    same, again, other = (
        lists(generate(model, PROMPTS, 8, key, **options)) for key in (KEY, KEY, jax.random.key(1))
    )
    assert same == again != other
    first, second = generate(model, [[1], [1]], 8, KEY, **options)
    assert first.tolist() != second.tolist()


def test_one_compiled_step_for_all_tokens():
    traces = []

    def apply(tokens):
        traces.append(tokens.shape)
        return jax.nn.one_hot((tokens + 1) % 10, 10)

    found = generate(apply, [[7]], 8, KEY, seq=4, sampling=GREEDY)
    assert lists(found) == [[8, 9, 0, 1, 2, 3, 4, 5]]
    assert traces == [(1, 4)] * 2  # the prompts, and all tokens


def test_an_nnx_model_is_an_apply(pure, model):
    graph, state = nnx.split(nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, pure(CONFIG).params)
    options = {"num_tokens": 2, "key": KEY, "seq": 12, "cached": True}
    found = generate(nnx.merge(graph, state), [[1], [2]], **options)
    assert lists(found) == lists(generate(model, [[1], [2]], **options))


def test_nothing_to_add_or_to_continue(model):
    assert lists(generate(model, [[1, 2]], 0, KEY, seq=12)) == [[]]
    assert generate(model, [], 3, KEY, seq=12) == []


def test_refuses_what_is_out_of_range():
    with pytest.raises(ValueError, match="generate") as error:
        generate(jnp.sin, [[1], [], [[2]]], -1, KEY, seq=4, rows=0)
    assert str(error.value) == (
        "generate:\n"
        "  - prompt 1 has shape (0,); give one token or more, such as the one that begins a text.\n"
        "  - prompt 2 has shape (1, 1); give one token or more, such as the one that begins a text.\n"
        "  - num_tokens is -1; it must be 0 or above.\n"
        "  - rows is 0; it must be at least 1. Use rows=None for all prompts at once."
    )


@pytest.mark.parametrize(
    ("length", "use"), [(3, "Use num_tokens=1"), (4, "Give prompts of at most 3 tokens")], ids=["3", "4"]
)
def test_refuses_more_than_the_cache_can_hold(length, use):
    with pytest.raises(ValueError, match="positions") as error:
        generate(jnp.sin, [[1], [1] * length], 2, KEY, seq=4, cached=True)
    assert str(error.value) == (
        f"generate:\n  - the longest prompt has {length} tokens, and 2 are added, but the model has seq=4"
        f" positions. {use}, or cached=False, which reads the last 4 tokens for each."
    )
