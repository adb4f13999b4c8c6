"""Speculative Pipeline Decoding: train the drafter, decode with it. Importing the package is cheap."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("spd-lightning")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"
