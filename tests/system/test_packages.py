"""Installed packages, by the folders that installers make."""

import sys
from importlib import metadata

from shardtrain.system.packages import list_installed_packages


def test_the_first_folder_of_the_search_path_counts_and_names_are_normalised(tmp_path):
    (tmp_path / "one/Orbax_Checkpoint-0.12.8.dist-info").mkdir(parents=True)
    for name in ("orbax_checkpoint-1.0.dist-info", "jax-0.10.2.dist-info", "odd.dist-info", "a.egg-info"):
        (tmp_path / "two" / name).mkdir(parents=True)
    path = [str(tmp_path / name) for name in ("none", "one", "two")]
    assert list_installed_packages(path) == {"jax": "0.10.2", "orbax-checkpoint": "0.12.8"}


def test_versions_are_those_of_the_packages_metadata():
    found = list_installed_packages(sys.path)
    for name in ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint"):
        assert found[name] == metadata.version(name)
