"""Models of Hugging Face's families: their weights and configurations, to this package and back."""

from shardtrain.models.huggingface.families import from_huggingface, to_huggingface

__all__ = ("from_huggingface", "to_huggingface")
