"""Object stores: places named by URLs, their clients, leases, and local caches of what is read."""
