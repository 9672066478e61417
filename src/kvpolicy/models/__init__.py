"""A model's Hugging Face ``config.json`` -> the geometry of its KV cache.

Key names, defaults and layer kinds are those of transformers' configuration classes, layer names
and recurrent-state shapes those of vLLM's models. What a config does not say is refused by key.
"""

from kvpolicy.models.build import geometry_from_config
from kvpolicy.models.dtypes import dtype_from_config
from kvpolicy.models.reading import load_config

__all__ = ["dtype_from_config", "geometry_from_config", "load_config"]
