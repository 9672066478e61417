"""What this adapter refuses, as errors of kvpolicy's tree."""

from __future__ import annotations

from kvpolicy import KVPolicyError


class VLLMVersionError(KVPolicyError, RuntimeError):
    """This vLLM is of a version, or lacks a name, with which the connector cannot work."""

    code = "vllm-version"


class VLLMConfigError(KVPolicyError, ValueError):
    """A vLLM configuration that the connector cannot translate; says which setting."""

    code = "vllm-config"


class VLLMTransferError(KVPolicyError, RuntimeError):
    """A transfer failed and this vLLM offers no way to recompute what it should have brought."""

    code = "vllm-transfer"
