"""Names of tenants for metrics: few, stable, and without telling anybody's cache salt."""

from hashlib import blake2b

from router.keys import Tenant

NO_TENANT = "none"
"""Requests with neither an API key nor a cache salt, and without a key those that were refused for what they hold."""
OTHER_TENANTS = "other"
"""All salts after the first `max_tenants`."""


class TenantNames:
    """Names who asks: by API key, else by cache salt. Clients choose salts, so only so many have names of their own."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._names: dict[str, str] = {}

    def name(self, tenant: Tenant | None, cache_salt: str) -> str:
        """Return the name. A salt keeps others from probing a tenant's cache, so only its hash is shown."""
        if tenant is not None:
            return tenant.name
        if not cache_salt:
            return NO_TENANT
        name = self._names.get(cache_salt)
        if name is None:
            if len(self._names) >= self._max_tenants:
                return OTHER_TENANTS
            name = f"salt-{blake2b(cache_salt.encode(), digest_size=4).hexdigest()}"
            self._names[cache_salt] = name
        return name
