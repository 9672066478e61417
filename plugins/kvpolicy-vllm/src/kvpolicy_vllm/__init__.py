"""The kvpolicy offload connector for vLLM.

Importing this package imports neither vLLM nor torch; vLLM calls `register` in each of its
processes, and imports the connector when a configuration names it.
"""

from __future__ import annotations

__version__ = "0.1.0"

CONNECTOR = "KVPolicyConnector"
CONNECTOR_MODULE = "kvpolicy_vllm.connector"

__all__ = ["CONNECTOR", "CONNECTOR_MODULE", "__version__", "register"]


def register() -> None:
    """Makes ``"kv_connector": "KVPolicyConnector"`` known to vLLM; calling it again is fine.

    Raises:
        ValueError: another distribution has taken the name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:
        # vLLM runs general plugins more than once in a process, and refuses a second registration.
        taken = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
        if taken.__module__ != CONNECTOR_MODULE:
            raise
