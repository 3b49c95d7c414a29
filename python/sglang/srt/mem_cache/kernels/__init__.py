"""Device kernels of the cache. Imported only where the device is one that runs them."""
