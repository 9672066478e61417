"""kvpolicy: the policy engine for KV-cache layout and offload in LLM serving."""
