"""Ray's key-value store, as `meet` uses it: small JSON values, with one prefix of keys for each group of a job.

Whoever can read this store can read the secret of a group that is meeting, and join it. The store is as trusted as the cluster
itself: whoever reaches the store can run code on all nodes anyway.
"""

import json
from typing import Any, List, Optional
from urllib.parse import quote

import ray
from ray.experimental import internal_kv

NAMESPACE = b"allstream"


class Store:
    """The keys of one group: `<job>/<group>/...`. Group names are quoted, `/` too, so no group's prefix begins another's."""

    def __init__(self, group: str, job: Optional[str] = None) -> None:
        job = job or ray.get_runtime_context().get_job_id()
        self.prefix = f"{job}/{quote(group, safe='')}/"

    def put(self, key: str, value: Any) -> None:
        internal_kv._internal_kv_put(self.prefix + key, json.dumps(value), overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> Any:
        """The value of a key; None if there is no such key."""
        value = internal_kv._internal_kv_get(self.prefix + key, namespace=NAMESPACE)
        return None if value is None else json.loads(value)

    def keys(self, under: str = "") -> List[str]:
        """All keys of the group that begin with `under`; the group's prefix is left out."""
        found = internal_kv._internal_kv_list(self.prefix + under, namespace=NAMESPACE)
        return [key.decode()[len(self.prefix):] for key in found]

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(self.prefix + key, namespace=NAMESPACE)

    def delete_all(self, under: str = "") -> None:
        internal_kv._internal_kv_del(self.prefix + under, del_by_prefix=True, namespace=NAMESPACE)


def all_keys() -> List[str]:
    """Every key of allstream's that is in the store, of all groups and jobs."""
    return [key.decode() for key in internal_kv._internal_kv_list(b"", namespace=NAMESPACE)]
