"""Combiners by name, and what is said of names that do not fit."""

import pytest

from shardtrain.combine import make_combiner


def test_a_chain_of_names_may_have_spaces_and_arguments():
    """What `test_contract.py` makes has none."""
    whole = make_combiner("top_k:0.5 + int8 + adasum:whole")
    assert whole.across_leaves
    assert whole.is_one_vector


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("adasun", ["combiner 'adasun' (did you mean 'adasum'?)"]),
        ("", ["combiner '' (known: mean, sum, adasum)"]),
        ("int9+mean", ["codec 'int9' (did you mean 'int8'?)"]),
        ("int8", ["combiner 'int8'; a codec needs a combiner after it, such as 'int8+mean'"]),
        ("mean+int8+sum", ["codec 'mean'; a combiner must be last, such as 'int8+mean'"]),
        ("mean:3", ["combiner 'mean:3': mean takes no argument; write 'mean'"]),
        (
            "scale:0,5+scale:1,2,3+scale:1e-40+mean",
            [
                f"codec 'scale:{given}': scale is '{given}'; use a number from 2e-38 to 5e+37, such as 0.5,"
                " or two with a comma between, such as '0.5,2', of which the second one comes after"
                for given in ("0,5", "1,2,3", "1e-40")
            ],
        ),
        (
            "top_k:2+power_sgd:0.5+adasum:leafs",
            [
                "codec 'top_k:2': top_k share is 2; it must be above 0 and at most 1, such as 0.01",
                "codec 'power_sgd:0.5': power_sgd rank is 0.5; it must be a whole number above 0, such as 4",
                "combiner 'adasum:leafs': adasum per 'leafs'; allowed: 'leaf', 'whole' or a function from "
                "path to group",
            ],
        ),
    ],
)
def test_names_that_do_not_fit_are_listed(text, problems):
    with pytest.raises(ValueError) as error:
        make_combiner(text)
    asked, *lines = str(error.value).splitlines()
    assert asked == f"combiner {text!r} cannot be made:"
    assert lines == [f"  - {problem}" for problem in problems]
